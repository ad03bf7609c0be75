"""Megatron-Core's distributed optimizer, on CPU. Oracle: torch's engine, in float32, with the same weights and data.

Megatron has it for float32 and 16 bits only, and asks whether its tensors are CUDA's: here it is told that they are.
"""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tiny
from fp32_runs import MODELS, close, one_rank
from megatron_ssm.checkpoints.training import Snapshot


class CpuIsCuda(TorchFunctionMode):
    """What is made on "cuda" is made on the CPU, and the types of tensors have CUDA's names."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        is_name = function is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if is_name else result


@pytest.fixture(autouse=True)
def told_the_cpu(monkeypatch):
    assert not torch.cuda.is_available(), "then Megatron needs no such help"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


DIVIDED = dict(engine="megatron", use_distributed_optimizer=True, params_dtype="float32")


def options(engine="megatron", **changes):
    chosen = DIVIDED if engine == "megatron" else dict(engine=engine, params_dtype="float32")
    return tiny.options(**chosen | dict(micro_batch_size=1) | changes)


def trainer_on(tp, run, vocab=tiny.VOCAB):
    """`tiny.trainer_on`; Megatron asks for types of tensors and makes some of its own when its optimizer is made."""
    with CpuIsCuda():
        return tiny.trainer_on(tp, run, vocab)


@pytest.mark.parametrize(
    "tp, dp, cp, model",
    [pytest.param(1, 2, 1, "mamba2", marks=pytest.mark.full), (2, 2, 1, "mamba2 groups"),
     pytest.param(1, 1, 2, "mamba2", marks=pytest.mark.full),
     pytest.param(2, 1, 1, "mamba untied", marks=pytest.mark.full),
     pytest.param(1, 4, 1, "mamba2", marks=pytest.mark.full),
     pytest.param(4, 1, 1, "mamba2 groups", marks=pytest.mark.full),
     pytest.param(2, 1, 2, "mamba2", marks=pytest.mark.full)],
)  # fmt: skip
def test_curves(ranks, tp, dp, cp, model):
    """Clipped steps, in micro-batches."""
    run = options(**MODELS[model], context_parallel_size=cp)
    curves = ranks(lambda rank: tiny.curve(trainer_on(tp, run)), tp * dp * cp)
    assert all(torch.equal(curve, curves[0]) for curve in curves)
    expected = one_rank(model)[:, : tiny.STEPS]
    assert close(curves[0], expected), (curves[0] - expected).abs().max()


@pytest.mark.parametrize(
    "tp, dp, less_memory",
    [(1, 2, dict(recompute_activations=True)), (2, 2, dict(sequence_parallel=True)),
     pytest.param(2, 2, dict(sequence_parallel=True, recompute_activations=True), marks=pytest.mark.full)],
)  # fmt: skip
def test_less_memory(ranks, tp, dp, less_memory):
    run = options(**less_memory)
    for curve in ranks(lambda rank: tiny.curve(trainer_on(tp, run), 4), tp * dp):
        assert close(curve, one_rank("mamba2")[:, :4])


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_frozen_parameters(ranks, tp, dp):
    """Zamba2's idle adapters are in no bucket. The losses are those of torch's engine on the same ranks."""
    run, plain = options(**tiny.ZAMBA2_UNTIED), options("torch", **tiny.ZAMBA2_UNTIED)
    ours, torchs = ranks(lambda rank: [tiny.curve(trainer_on(tp, each))[0] for each in (run, plain)], tp * dp)[0]
    assert close(ours, torchs), (ours - torchs).abs().max()


@pytest.mark.parametrize("tp, dp", [(4, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_clipping_counts_each_element_once(ranks, tp, dp):
    """Gradients of B and C, of which several ranks have a copy, are so large that the norm shows it; two groups."""

    def with_large_gradients(trainer):
        for name, parameter in trainer.model.named_parameters():
            if name.endswith((".B", ".C")):
                parameter.register_hook(lambda gradient: 1000 * gradient)
        return trainer

    run = options(mamba_num_groups=2)
    oracle = with_large_gradients(tiny.trainer(options("torch", mamba_num_groups=2, micro_batch_size=4)))
    whole = tiny.curve(oracle, 2)
    for curve in ranks(lambda rank: tiny.curve(with_large_gradients(trainer_on(tp, run)), 2), tp * dp):
        assert torch.allclose(curve, whole, rtol=1e-5, atol=0)


@pytest.mark.parametrize("tp, dp, divides", [(2, 2, True), (2, 1, False)])
def test_copies_of_parameters_stay_equal(ranks, tp, dp, divides):
    """The shares of two tensor-parallel ranks do not end at the same element, because their vocabularies differ."""
    run = options(use_distributed_optimizer=divides)

    def train(rank):
        trainer = tiny.rounding_differently(trainer_on(tp, run))
        tiny.curve(trainer, 3)
        return tiny.pieces(trainer), trainer.model.config.fields()

    parameters, fields = zip(*ranks(train, tp * dp), strict=True)
    tiny.assembled(parameters, fields[0], tp)  # asserts it


@pytest.mark.parametrize("tp, dp", [(2, 2), pytest.param(1, 4, marks=pytest.mark.full)])
def test_each_moment_is_on_one_replica(ranks, tp, dp):
    """A bucket's parameters begin at multiples of 64, so the shares differ by some padding."""

    def train(rank):
        trainer = trainer_on(tp, options())
        tiny.curve(trainer, 1)
        moments = [state["exp_avg"].numel() for state in trainer.optimizer.state.values()]
        return sum(moments), sum(parameter.numel() for parameter in trainer.model.parameters())

    counts = ranks(train, tp * dp)
    assert sum(moments for moments, _ in counts) == sum(elements for _, elements in counts) / dp
    assert all(moments < 1.5 * elements / dp for moments, elements in counts)


# Checkpoints


@pytest.mark.parametrize("tp, dp", [(2, 2), pytest.param(1, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("first, then", [("torch", "megatron"), ("megatron", "torch")])
def test_checkpoints(ranks, tmp_path, tp, dp, first, then):
    """A run is continued by another engine, on other ranks where there are several, with the moments."""

    def begin(rank):
        trainer = trainer_on(tp, options(first))
        tiny.curve(trainer, 3)
        Snapshot.of(tmp_path, 3, trainer.model, trainer.checkpoint_state(), {}).write()

    def go_on(rank):
        trainer = trainer_on(dp, options(then))
        trainer.load(tmp_path / "step-000003", 3)
        return tiny.curve(trainer, 6, start=3)

    ranks(begin, tp * dp)
    assert close(ranks(go_on, tp * dp)[0], one_rank("mamba2")[:, 3:6])


@pytest.mark.parametrize("tp, dp", [(2, 2), pytest.param(1, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("model", [{}, pytest.param(tiny.ZAMBA2_UNTIED, marks=pytest.mark.full)])
def test_resumed_runs_are_bitwise_equal(ranks, tmp_path, tp, dp, model):
    run = options(**model)

    def train(rank):
        trainer = trainer_on(tp, run)
        tiny.curve(trainer, 2)
        Snapshot.of(tmp_path, 2, trainer.model, trainer.checkpoint_state(), {}).write()
        straight = tiny.curve(trainer, 4, start=2)
        again = trainer_on(tp, run)
        again.load(tmp_path / "step-000002", 2)
        assert torch.equal(tiny.curve(again, 4, start=2), straight)
        assert all(map(torch.equal, tiny.pieces(trainer).values(), tiny.pieces(again).values()))
        assert trainer.checkpoint_state().steps == again.checkpoint_state().steps == 4

    ranks(train, tp * dp)


# Steps that are not finite, and sparse gradients


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_a_skipped_step_changes_nothing(ranks, tp, dp):
    """The run is the one whose batches lack that step."""
    run = options(lr_decay_style="constant", lr_warmup_iters=0)

    def train(rank):
        trainer, other = trainer_on(tp, run), trainer_on(tp, run)
        data = tiny.batches(run)
        trainer.step(data, 0), other.step(data, 0)
        hook = trainer.model.layers[0].mixer.D.register_hook(lambda grad: grad * (math.inf if rank == 0 else 1.0))
        assert trainer.step(data, 1).is_skipped
        hook.remove()
        for step in (2, 3):
            assert trainer.step(data, step) == other.step(data, step)

    ranks(train, tp * dp)


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_sparse_gradients(ranks, tp, dp):
    """Those of Megatron's DDP alone, and what was not sent is added again, whatever part of it this rank updates."""
    sparse = dict(gradient_mode="layerwise", gradient_density=0.05)
    runs = [options(**sparse), tiny.options(engine="megatron", params_dtype="float32", micro_batch_size=1, **sparse)]

    def train(rank):
        trainers = [trainer_on(tp, run) for run in runs]
        curves = [tiny.curve(trainer, 9) for trainer in trainers]
        assert all(trainer.fusion.state_dict()["residuals"] for trainer in trainers)
        for trainer in trainers:
            trainer.fusion.detach()
            trainer.pending_gradients = {name: torch.full_like(p, 0.25) for name, p in trainer.named_parameters()}
            curves.append(tiny.curve(trainer, 11, start=9))
            assert not trainer.pending_gradients
        return curves

    divided, whole, divided_on, whole_on = ranks(train, tp * dp)[0]
    assert close(divided, whole) and close(divided_on, whole_on)


REFUSED = {
    "--use-distributed-optimizer needs --engine megatron, not fsdp": dict(engine="fsdp"),
    "--use-distributed-optimizer has no float64 parameters: --params-dtype float32": dict(params_dtype="float64"),
    "--memory-budget has no formula for --use-distributed-optimizer": dict(memory_budget=1.0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        tiny.options(**DIVIDED | REFUSED[message])
