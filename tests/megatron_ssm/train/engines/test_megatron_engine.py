"""Training with Megatron-Core's DDP, on CPU. Oracle: torch's engine, in float64, with the same weights and data."""

import functools
import math

import pytest
import torch
from chosen import full

import fp32_runs
import tiny
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pretraining import pretrain

EXACT = 1e-10
MODELS = {
    "mamba2": {},
    "mamba untied": dict(model_type="mamba", untie_embeddings_and_output_weights=True),
    "mamba2 groups": dict(mamba_num_groups=2),
    "zamba2 untied": tiny.ZAMBA2_UNTIED,
}


@functools.cache
def one_rank(model):
    """The curve of torch's engine on one rank, with the whole batch at once."""
    run = tiny.options(**MODELS[model], micro_batch_size=4)
    curve = tiny.curve(tiny.trainer(run), 8)
    assert (curve[1] > run.clip_grad).all(), "clipping was not active"
    return curve


def close(a, b):
    return bool(((a - b).abs() <= EXACT).all())


@pytest.mark.parametrize(
    "tp, dp, cp, model",
    [full(1, 2, 1, "mamba2"), (2, 1, 1, "mamba untied"), (2, 2, 1, "mamba2 groups"), (1, 1, 2, "mamba2"),
     pytest.param(1, 1, 1, "zamba2 untied", marks=pytest.mark.full),
     pytest.param(2, 2, 1, "zamba2 untied", marks=pytest.mark.full),
     pytest.param(4, 1, 1, "mamba2 groups", marks=pytest.mark.full),
     pytest.param(2, 2, 2, "mamba2", marks=pytest.mark.full)],
)  # fmt: skip
def test_curves(ranks, tp, dp, cp, model):
    """Clipped steps, in micro-batches."""
    run = tiny.options(**MODELS[model], engine="megatron", micro_batch_size=1, context_parallel_size=cp)
    curves = ranks(lambda rank: tiny.curve(tiny.trainer_on(tp, run)), tp * dp * cp)
    assert all(torch.equal(curve, curves[0]) for curve in curves)
    assert close(curves[0], one_rank(model)[:, : tiny.STEPS])


@pytest.mark.parametrize(
    "tp, dp, cp, less_memory",
    [(1, 2, 1, dict(recompute_activations=True)), (2, 1, 1, dict(sequence_parallel=True)),
     pytest.param(2, 2, 1, dict(sequence_parallel=True, recompute_activations=True), marks=pytest.mark.full),
     pytest.param(2, 1, 2, dict(sequence_parallel=True, recompute_activations=True), marks=pytest.mark.full)],
)  # fmt: skip
def test_less_memory(ranks, tp, dp, cp, less_memory):
    run = tiny.options(engine="megatron", micro_batch_size=1, context_parallel_size=cp, **less_memory)
    for curve in ranks(lambda rank: tiny.curve(tiny.trainer_on(tp, run), 4), tp * dp * cp):
        assert close(curve, one_rank("mamba2")[:, :4])


@pytest.mark.parametrize(
    "tp, dp", [(1, 2), pytest.param(2, 1, marks=pytest.mark.full), pytest.param(2, 2, marks=pytest.mark.full)]
)
def test_curves_in_fp32(ranks, tp, dp):
    run = tiny.options(engine="megatron", micro_batch_size=1, params_dtype="float32")
    curve = ranks(lambda rank: tiny.curve(tiny.trainer_on(tp, run)), tp * dp)[0]
    assert fp32_runs.close(curve, fp32_runs.one_rank("mamba2")[:, : tiny.STEPS])


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_checkpoints(ranks, tmp_path, tp, dp):
    """A run is continued by torch's engine, and one of torch's is continued, on other ranks."""
    torchs, megatrons = (tiny.options(engine=engine) for engine in ("torch", "megatron"))
    for before, after in ((torchs, megatrons), (megatrons, torchs)):
        curve = tiny.continued(ranks, tmp_path / before.engine, before, after, tp, dp, 6)
        assert close(curve, one_rank("mamba2")[:, 3:6])


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_sparse_gradients(ranks, tp, dp):
    """Those of torch's engine: the first steps are dense, then both send the same selection of every tensor."""
    sparse = dict(gradient_mode="layerwise", gradient_density=0.05)

    def train(rank):
        runs = [tiny.options(**sparse, engine=engine, micro_batch_size=1) for engine in ("torch", "megatron")]
        trainers = [tiny.trainer_on(tp, run) for run in runs]
        curves = [tiny.curve(trainer, 9) for trainer in trainers]
        assert all(trainer.fusion.state_dict()["residuals"] for trainer in trainers)
        return curves

    torchs, megatrons = ranks(train, tp * dp)[0]
    assert close(torchs[:, :5], one_rank("mamba2")[:, :5]) and not close(torchs[:, :8], one_rank("mamba2"))
    assert (torchs[0] - megatrons[0]).abs().max() <= 0.05


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_a_skipped_step_changes_nothing(ranks, tp, dp):
    """The run is the one whose batches lack that step."""
    run = tiny.options(engine="megatron", lr_decay_style="constant", lr_warmup_iters=0)

    def train(rank):
        trainer, other = tiny.trainer_on(tp, run), tiny.trainer_on(tp, run)
        data = tiny.batches(run)
        trainer.step(data, 0), other.step(data, 0)
        hook = trainer.model.layers[0].mixer.D.register_hook(lambda grad: grad * (math.inf if rank == 0 else 1.0))
        assert trainer.step(data, 1).is_skipped
        hook.remove()
        for step in (2, 3):
            assert trainer.step(data, step) == other.step(data, step)

    ranks(train, tp * dp)


def test_its_distributed_optimizer_is_refused_without_cuda():
    flags = ["--engine", "megatron", "--use-distributed-optimizer", "--params-dtype", "float32", "--device", "cpu"]
    with pytest.raises(ValueError, match="^--use-distributed-optimizer needs --device cuda: .*CUDA's tensors only$"):
        pretrain(parse_options(["--data", "x", "--out", "y", *flags]))
