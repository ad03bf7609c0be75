"""Training loops of users, with what torch has for them. Oracle: the same loop on one rank, in float64."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import megatron_ssm
import tiny
from cases import oracle
from megatron_ssm import families
from megatron_ssm.model.parameters import fields_of
from megatron_ssm.train.gradients import average_replicated_gradients, clip_gradients, grad_norm

__all__ = ["oracle"]

STEPS, LIMIT, EXACT = 3, 0.5, 1e-9


def train(model, ids, replica=0, replicas=1):
    """STEPS clipped steps of AdamW on this replica's rows of ids; the norms."""
    optimizer = torch.optim.AdamW(megatron_ssm.parameter_groups(model, 0.1), lr=1e-2)
    norms = []
    for step in range(STEPS):
        rows = ids[step].chunk(replicas)[replica]
        (model.loss(rows[:, :-1], rows[:, 1:]) * replicas).backward()
        average_replicated_gradients(model)
        norms.append(grad_norm(model))
        clip_gradients(model, norms[-1], LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms)


def loaded(directory):
    """{name: tensor} of a model's files."""
    return megatron_ssm.load(directory, dtype=torch.float64).state_dict()


@pytest.mark.parametrize(
    "name",
    (
        pytest.param("mamba2-2-groups-biases-tied", marks=pytest.mark.full),
        "zamba2-2-groups-adapters-rope",
        "mamba-biases-untied",
    ),
)
@pytest.mark.parametrize("tp, dp", [(1, 2), (2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
def test_fully_shard(ranks, name, tp, dp, oracle, tmp_path):
    """Norms, clipping, weight decay, and the model that is saved. A block has parameters whose rows do not divide."""
    directory = oracle(name, torch.float64).directory
    ids = torch.randint(5, (STEPS, 4, 12), generator=torch.Generator().manual_seed(2))

    def run(rank):
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("data", "tensor"))
        data, tensor = mesh["data"], mesh["tensor"].get_group()
        model = megatron_ssm.load(directory, tensor, dtype=torch.float64, data_group=data.get_group())
        packed = weakref.ref(model.layers[0].mixer.in_proj.weight.fields[0].packed)
        for block in model.layers:
            fully_shard(block, mesh=data)
        gc.collect()
        assert packed() is None, "undivided parameters stay in memory"
        fully_shard(model, mesh=data)
        register_fsdp_forward_method(model, "loss")
        norms = train(model, ids, rank // tp, dp)
        megatron_ssm.save(model, tmp_path / "sharded")
        return norms

    alone = megatron_ssm.load(directory, dtype=torch.float64)
    expected = train(alone, ids)
    assert (expected > LIMIT).all(), "clipping was not active"
    megatron_ssm.save(alone, tmp_path / "alone")
    for norms in ranks(run, tp * dp):
        torch.testing.assert_close(norms, expected, rtol=EXACT, atol=0)
    ours, theirs = loaded(tmp_path / "sharded"), loaded(tmp_path / "alone")
    for tensor_name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[tensor_name], rtol=EXACT, atol=1e-12)


def sharded_scaler(scale):
    return ShardedGradScaler("cpu", init_scale=scale, process_group=dist.group.WORLD)


def plain_scaler(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def test_loss_scaling_where_copies_are_frozen(ranks, oracle):
    directory, ids = oracle("falcon", torch.float64).directory, torch.arange(12).view(1, -1) % 5

    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD, dtype=torch.float64)
        for parameter, field in fields_of(model).items():
            parameter.requires_grad_(field.split is not None)
        optimizer, scaler = torch.optim.SGD(megatron_ssm.parameter_groups(model, 0.0), lr=1e-2), plain_scaler(256.0)
        scaler.scale(model.loss(ids[:, :-1], ids[:, 1:])).backward()
        if rank == 1:
            model.layers[0].mixer.out_proj.weight.grad[0, -1] = torch.inf
        average_replicated_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert ranks(run, 2) == [128.0, 128.0]


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("name, scaler_of", (("mamba2-2-groups", sharded_scaler), ("falcon", plain_scaler)))
def test_loss_scaling(ranks, name, tp, scaler_of, oracle):
    """An infinite gradient in the part of one rank: all ranks skip the step and lower the scale, as one rank does."""
    directory = oracle(name, torch.float64).directory
    ids = torch.randint(5, (STEPS, 2, 12), generator=torch.Generator().manual_seed(2))

    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD, dtype=torch.float64)
        optimizer = torch.optim.AdamW(megatron_ssm.parameter_groups(model, 0.1), lr=1e-2)
        scaler, scales = scaler_of(256.0), []
        for step in range(STEPS):
            scaler.scale(model.loss(ids[step, :, :-1], ids[step, :, 1:])).backward()
            if step == 1 and rank == dist.get_world_size() - 1:
                model.layers[0].mixer.out_proj.weight.grad[0, -1] = torch.inf
            average_replicated_gradients(model)
            scaler.unscale_(optimizer)
            clip_gradients(model, grad_norm(model), LIMIT)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, {key: tensor.clone() for key, tensor in model.state_dict().items()}

    scales, parts = zip(*ranks(run, tp), strict=True)
    assert scales == ([256.0, 128.0, 128.0],) * tp
    fields = families.read(directory).fields()
    (_, expected), *_ = ranks(run, 1)
    for key, whole in tiny.assembled(parts, fields, tp).items():
        torch.testing.assert_close(whole, expected[key], rtol=EXACT, atol=1e-12)
