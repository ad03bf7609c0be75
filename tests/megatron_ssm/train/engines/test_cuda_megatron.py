"""Training with Megatron-Core's DDP and distributed optimizer on NCCL ranks. Oracle: torch's engine on one CPU rank."""

import pytest

import fp32_runs
import tiny
from megatron_ssm.checkpoints.training import Snapshot
from ranks import run_cuda_ranks

pytestmark = pytest.mark.cuda

# {name: (number of ranks, tensor-parallel ranks, changes of the options)}
RUNS = {
    "mamba2, dp 1": (1, 1, {}),
    "mamba2, dp 2": (2, 1, {}),
    "mamba untied, tp 2": (2, 2, fp32_runs.MODELS["mamba untied"]),
    "mamba2 groups, tp 2, dp 2": (4, 2, fp32_runs.MODELS["mamba2 groups"]),
    "mamba2, cp 2": (2, 1, dict(context_parallel_size=2)),
}


def megatrons(divided, **changes):
    """The options of a run with Megatron's engine, in float32 if the optimizer is divided."""
    kind = dict(use_distributed_optimizer=True, params_dtype="float32") if divided else {}
    return tiny.options(engine="megatron", micro_batch_size=1, **kind, **changes)


def trained(rank, tp, run, steps):
    """Losses and gradient norms of the first steps."""
    return tiny.curve(tiny.trainer_on(tp, run, device="cuda"), steps)


@pytest.mark.parametrize("name", RUNS)
def test_curves(name):
    """Clipped steps in float64 through Megatron's DDP."""
    world, tp, changes = RUNS[name]
    alone = {key: value for key, value in changes.items() if key != "context_parallel_size"}
    expected = tiny.curve(tiny.trainer(tiny.options(**alone, micro_batch_size=4)))
    assert (expected[1] > tiny.RUN["clip_grad"]).all(), "clipping was not active"
    for found in run_cuda_ranks(trained, world, tp, megatrons(False, **changes), tiny.STEPS):
        assert (found - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("name", RUNS)
def test_curves_of_the_distributed_optimizer(name):
    """10 clipped steps in float32."""
    world, tp, changes = RUNS[name]
    expected = fp32_runs.one_rank(name.split(",")[0])
    for found in run_cuda_ranks(trained, world, tp, megatrons(True, **changes), 20):
        assert fp32_runs.close(found, expected), (found - expected).abs().max()


def begun(rank, run, folder):
    """Train three steps and write a checkpoint."""
    trainer = tiny.trainer_on(1, run, device="cuda")
    tiny.curve(trainer, 3)
    Snapshot.of(folder, 3, trainer.model, trainer.checkpoint_state(), {}).write()


def continued(rank, run, folder):
    """The five steps after such a checkpoint."""
    trainer = tiny.trainer_on(2, run, device="cuda")
    trainer.load(folder / "step-000003", 3)
    return tiny.curve(trainer, 8, start=3)


@pytest.mark.parametrize("first, then", [("torch", "megatron"), ("megatron", "torch")])
def test_checkpoints(tmp_path, first, then):
    """A run on two replicas is continued by another engine, on two tensor-parallel ranks, with the moments."""
    runs = {"torch": tiny.options(params_dtype="float32", micro_batch_size=1), "megatron": megatrons(True)}
    run_cuda_ranks(begun, 2, runs[first], tmp_path)
    for found in run_cuda_ranks(continued, 2, runs[then], tmp_path):
        assert fp32_runs.close(found, fp32_runs.one_rank("mamba2")[:, 3:8])
