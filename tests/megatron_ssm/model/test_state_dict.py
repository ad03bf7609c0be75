"""What other libraries write and read of a model's state_dict. Oracle: the parameters before."""

import copy

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from safetensors.torch import load_file, load_model, save_file, save_model

import megatron_ssm
from cases import oracle
from megatron_ssm.parallel.layers import Packed

__all__ = ["oracle"]


def is_equal(model, expected):
    """Whether the model has these parameters, and no field of a packed tensor has left it, which would slow it down."""
    state = model.state_dict()
    is_packed = all(module.is_packed for module in model.modules() if isinstance(module, Packed))
    return is_packed and state.keys() == expected.keys() and all(state[name].equal(expected[name]) for name in state)


def by_save_model(model, folder):
    save_model(model, f"{folder}/model.safetensors")
    yield
    load_model(model, f"{folder}/model.safetensors")


def by_save_file(model, folder):
    save_file(model.state_dict(), f"{folder}/state.safetensors")
    yield
    model.load_state_dict(load_file(f"{folder}/state.safetensors"))


def by_torch(model, folder):
    torch.save(model.state_dict(), f"{folder}/state.pt")
    yield
    model.load_state_dict(torch.load(f"{folder}/state.pt", weights_only=True))


def by_torch_checkpoint(model, folder):
    torch_checkpoint.save(model.state_dict(), checkpoint_id=f"{folder}/checkpoint", no_dist=True)
    yield
    torch_checkpoint.load(model.state_dict(), checkpoint_id=f"{folder}/checkpoint", no_dist=True)  # in place


def by_accelerate(model, folder):
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_model(model, f"{folder}/accelerate", max_shard_size=50_000)
    yield
    accelerate.load_checkpoint_in_model(model, f"{folder}/accelerate")


def by_accelerate_state(model, folder):
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(f"{folder}/state")
    yield
    accelerator.load_state(f"{folder}/state")


WRITERS = by_save_model, by_save_file, by_torch, by_torch_checkpoint
NAMES = (
    "mamba-biases-untied", "falcon", "mamba2-2-groups-biases-tied", "zamba-2-heads-biases",
    "zamba2-4-groups-biases-adapters-untied",
)  # fmt: skip


def check_writers(model, folder, writers):
    """Write the model, change it, and read it again, by each of the writers."""
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for writer in writers:
        folder.mkdir(exist_ok=True)
        written = writer(model, folder)
        next(written)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        next(written, None)
        assert is_equal(model, expected), writer.__name__


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("name", NAMES)
def test_every_family_survives_writing(ranks, tp, name, oracle, tmp_path):
    """Also a copy of a model, and one whose dtype has changed."""
    directory = oracle(name).directory

    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD)
        check_writers(model, tmp_path / f"{rank}", WRITERS)
        for index, other in enumerate((copy.deepcopy(model), model.bfloat16())):
            check_writers(other, tmp_path / f"{rank}-{index}", WRITERS[:1])

    ranks(run, tp)


def test_accelerate(ranks, oracle, tmp_path):
    """In a process of its own, because accelerate keeps a global state."""
    directory = oracle("zamba2-2-groups-adapters-rope").directory

    def run(rank):
        dist.destroy_process_group()
        model = megatron_ssm.load(directory)
        check_writers(model, tmp_path / "one", (by_accelerate, by_accelerate_state))

    ranks(run, 1)
