"""Memory of load and save for models of over 200 MB. Oracle: RssAnon of each rank, read by another process."""

import json

import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from safetensors.torch import save_file

import megatron_ssm
from benchmarks.support.anonymous_memory import peak_growth
from megatron_ssm import families
from megatron_ssm.spec.fields import hf_shapes

SLACK = 8 * 2**20
FILE_BYTES = 55_000_000
SHAPES = {
    "mamba": dict(model_type="mamba", hidden_size=1472, num_hidden_layers=4, vocab_size=600, state_size=8),
    "zamba": dict(
        model_type="zamba", hidden_size=1088, num_hidden_layers=4, vocab_size=600, mamba_d_state=8,
        layers_block_type=["linear_attention"] * 2 + ["hybrid"] * 2, num_attention_heads=16, intermediate_size=2944,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=by_default(("zamba",), SHAPES))
def large(request, tmp_path_factory):
    """A directory of 200 MB. All elements of its i-th tensor are i."""
    directory, shape = tmp_path_factory.mktemp("large"), SHAPES[request.param]
    (directory / "config.json").write_text(json.dumps(shape))
    shapes = hf_shapes(families.from_dict(shape).fields())
    tensors = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}
    assert sum(tensor.nbytes for tensor in tensors.values()) >= 200 * 10**6
    save_file(tensors, directory / "model.safetensors")
    return directory


def check_values(model):
    """Assert that all elements of each parameter are the number of its Hugging Face tensor."""
    numbers = {name: i for i, name in enumerate(hf_shapes(model.config.fields()))}
    for parameter in model.parameters():
        assert parameter.min() == parameter.max() == numbers[parameter.field.hf]


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_load_and_save_hold_little(ranks, tp, large, tmp_path):
    """load needs its parameters, two slices and SLACK; save one piece and SLACK, and on rank 0 also one file."""

    def run(rank):
        with peak_growth() as loading:
            model = megatron_ssm.load(large, dist.group.WORLD)
        check_values(model)
        with peak_growth() as saving:
            megatron_ssm.save(model, tmp_path / "saved", file_bytes=FILE_BYTES)
        sizes = [parameter.nbytes for parameter in model.parameters()]
        return sum(sizes), max(sizes), loading.bytes, saving.bytes

    for rank, (parameters, piece, loading, saving) in enumerate(ranks(run, tp)):
        assert 0.8 * parameters < loading <= parameters + 2 * piece + SLACK
        assert saving <= (FILE_BYTES if rank == 0 else 0) + piece + SLACK
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) >= 4
