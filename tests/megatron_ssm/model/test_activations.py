"""The activations of a training step. Oracle: what torch's allocator recorded."""

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

import megatron_ssm
from attention2d import Ring
from benchmarks.support.live_memory import peak_allocated
from cases import WIDE_CASES, wide_model
from megatron_ssm.kernels import kernels
from megatron_ssm.model.activations import TrainingMemory

TOKENS = 2048
# The largest first: on two ranks. Without the case in which the ring's buffers are a tenth of the whole.
WITH_CONTEXT = [name for name in reversed(WIDE_CASES) if name != "nemotron-experts"]
needs_kernels = pytest.mark.skipif(kernels.LIBRARY.functions is None, reason="the formula is that of the C kernels")


def peak(model, ids):
    """The most bytes that a step allocates, beside parameters and their gradients.

    The least of three steps: gloo's thread sometimes lets go of a message only after the rank has gone on.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return min(peak_allocated(lambda: model.loss(ids, ids).backward()) for _ in range(3))


@needs_kernels
@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("world, sequence_parallel", ((1, False), (2, False), (2, True)))
@pytest.mark.parametrize("vocab_size", (64, 4096))
@pytest.mark.parametrize("name", by_default({"mamba", "mamba2-1-group", "zamba2"}, WIDE_CASES))
def test_the_peak_of_a_step(ranks, name, vocab_size, world, sequence_parallel, recompute, tmp_path):
    """With a vocabulary so small that a layer needs most, and with one whose logits do."""
    wide_model(name, vocab_size=vocab_size).save_pretrained(tmp_path)
    options = dict(sequence_parallel=sequence_parallel, recompute=recompute)

    def run(rank):
        model = megatron_ssm.load(tmp_path, dist.group.WORLD if world > 1 else None, **options)
        measured = peak(model, torch.zeros(1, TOKENS, dtype=torch.int64))
        return measured, TrainingMemory(model.config, world, **options).peak(1, TOKENS)

    for measured, formula in ranks(run, world):
        assert formula == pytest.approx(measured, rel=0.06)


@needs_kernels
@pytest.mark.parametrize("recompute", (pytest.param(False, marks=pytest.mark.full), True))
@pytest.mark.parametrize(
    "name, all_experts",
    (
        ("qwen3.5-experts", dict(num_experts=4, num_experts_per_tok=4)),
        pytest.param("nemotron-experts", dict(n_routed_experts=4, num_experts_per_tok=4), marks=pytest.mark.full),
    ),
)
def test_ranks_divide_the_experts(ranks, name, all_experts, recompute, tmp_path):
    """Every token goes to all experts, and so to both ranks."""
    wide_model(name, **all_experts).save_pretrained(tmp_path)

    def run(rank):
        world = dist.group.WORLD
        model = megatron_ssm.load(tmp_path, data_group=world, expert_group=world, recompute=recompute)
        measured = peak(model, torch.zeros(1, TOKENS, dtype=torch.int64))
        return measured, TrainingMemory(model.config, recompute=recompute, expert_ranks=2).peak(1, TOKENS)

    for measured, formula in ranks(run, 2):
        assert formula == pytest.approx(measured, rel=0.1)


@needs_kernels
@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", by_default({"zamba2"}, WITH_CONTEXT))
def test_context_ranks_divide_the_tokens(ranks, name, world, tmp_path):
    wide_model(name).save_pretrained(tmp_path)

    def run(rank):
        schedule = Ring(dist.group.WORLD)
        model = megatron_ssm.load(tmp_path, context=schedule)
        measured = peak(model, torch.zeros(1, TOKENS // 2, dtype=torch.int64))
        return measured, TrainingMemory(model.config).peak(1, TOKENS // 2)

    for measured, formula in ranks(run, world):
        assert formula == pytest.approx(measured, rel=0.1)
