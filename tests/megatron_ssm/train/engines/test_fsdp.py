"""Training with torch's `fully_shard`, on CPU. Oracle: torch's engine on one rank, with the same weights and data."""

import functools
import math

import pytest
import torch

import tiny
from megatron_ssm.model.parameters import fields_of
from megatron_ssm.train.options import Options

STEPS = 20
BOUND = {"float64": 1e-10, "float32": 1e-5}
AMPLIFIED = 20  # in float32, how much more rounding grows through the shared blocks of zamba2 in STEPS steps
MODELS = {"mamba2": dict(mamba_num_groups=2), "zamba2 untied": tiny.ZAMBA2_UNTIED}


@functools.cache
def one_rank(model, dtype="float64"):
    """The curve of torch's engine on one rank, with the whole batch at once."""
    run = tiny.options(**MODELS[model], micro_batch_size=4, params_dtype=dtype)
    curve = tiny.curve(tiny.trainer(run), STEPS)
    assert (curve[1] > run.clip_grad).any(), "clipping was not active"
    return curve


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    "tp, cp, dp, model",
    [(1, 1, 2, "mamba2"), (2, 1, 2, "mamba2"), (1, 2, 1, "zamba2 untied"),
     pytest.param(2, 2, 2, "mamba2", marks=pytest.mark.full),
     pytest.param(1, 1, 4, "zamba2 untied", marks=pytest.mark.full)],
)  # fmt: skip
def test_curves(ranks, tp, cp, dp, model, dtype):
    """Clipped steps, in micro-batches."""
    run = tiny.options(**MODELS[model], engine="fsdp", micro_batch_size=1, context_parallel_size=cp, params_dtype=dtype)
    curves = ranks(lambda rank: tiny.curve(tiny.trainer_on(tp, run), STEPS), tp * cp * dp, timeout=300)
    assert all(torch.equal(curve, curves[0]) for curve in curves)
    bound = BOUND[dtype] * (AMPLIFIED if dtype == "float32" and "zamba2" in model else 1)
    expected = one_rank(model, dtype)
    loss, norm = ((curves[0] - expected).abs() / expected.abs().clamp(min=1)).amax(1)
    assert loss <= bound and norm <= (5 if dtype == "float32" else 1) * bound


def test_each_rank_has_its_share(ranks):
    def held(rank):
        trainer = tiny.trainer_on(1, tiny.options(engine="fsdp"))
        local = sum(p.to_local().numel() for p in trainer.model.parameters())
        return local, sum(math.prod(field.shape) for field in fields_of(trainer.model).values())

    parts = ranks(held, 2)
    assert sum(local for local, _ in parts) == parts[0][1] and max(local for local, _ in parts) < 0.6 * parts[0][1]


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_checkpoints(ranks, tmp_path, tp, dp):
    """A run is continued by torch's engine, and one of torch's is continued, on other ranks."""
    torchs, ours = (tiny.options(**MODELS["mamba2"], engine=engine) for engine in ("torch", "fsdp"))
    for before, after in ((torchs, ours), (ours, torchs), (ours, ours)):
        folder = tmp_path / before.engine / after.engine
        curve = tiny.continued(ranks, folder, before, after, tp, dp, 8)
        assert (curve - one_rank("mamba2")[:, 3:8]).abs().max() <= 1e-10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(gradient_mode="layerwise"), "--gradient-mode layerwise: SparseFusion does not work with --engine fsdp"),
        (dict(expert_model_parallel_size=2), "is not implemented for --engine fsdp"),
        (dict(use_distributed_optimizer=True, params_dtype="float32"), "needs --engine megatron, not fsdp"),
        (dict(memory_budget=1.0), "has no formula for --engine fsdp"),
        (dict(lora_rank=2, init_from="DIR"), "--lora-rank 2 is not implemented for --engine fsdp"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Options(engine="fsdp", **changes)
