"""Experts. Oracle: a loop over experts with autograd in float64, and transformers' whole models (model/test_logits.py)."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ssm.kernels.experts import CHOSEN_SOFTMAX, SIGMOID, SOFTMAX, Router, apply_experts, apply_experts_ref
from megatron_ssm.kernels.quantized_matrices import Int8Weight
from scans import error

EXPERTS, ROWS, SIZE = 5, 6, 8


def gated(inner):
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def squared(inner):
    return F.relu(inner).square()


def inputs_of(chosen, activated, dtype=torch.float64, tokens=17):
    """[x, weights, up, down], which require gradients."""
    generator = torch.Generator().manual_seed(0)
    columns = ROWS // 2 if activated is gated else ROWS
    shapes = (tokens, SIZE), (tokens, chosen), (EXPERTS * ROWS, SIZE), (EXPERTS * SIZE, columns)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def choices(kind, chosen, tokens=17):
    """Which experts the tokens choose; two of them never."""
    if kind == "one expert":
        return torch.full((tokens, 1), 3)
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(EXPERTS - 2, generator=generator)[:chosen] for _ in range(tokens)])


def everything(function, inputs, index, activated):
    """The output, and the gradients of all inputs."""
    x, weights, up, down = inputs
    y = function(x, weights, index, EXPERTS, up, down, activated)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), inputs)]


@pytest.mark.parametrize("activated", (gated, squared))
@pytest.mark.parametrize("kind, chosen", (("several", 2), ("one expert", 1)))
def test_outputs_and_gradients(kind, chosen, activated):
    """Experts without tokens have gradients of zero."""
    inputs, index = inputs_of(chosen, activated), choices(kind, chosen)
    ours, plain = (everything(f, inputs, index, activated) for f in (apply_experts, apply_experts_ref))
    assert all(error(mine, theirs) <= 1e-12 for mine, theirs in zip(ours, plain, strict=True))
    d_up = ours[3].unflatten(0, (EXPERTS, -1))
    assert not d_up[4].any() and d_up[3 if kind == "one expert" else 0].any()
    with torch.no_grad():
        x, weights, up, down = inputs
        assert error(apply_experts(x, weights, index, EXPERTS, up, down, activated), plain[0]) <= 1e-12


@torch.no_grad()
def test_quantized_experts():
    """Those of one expert are rows of the quantized matrix of all."""
    generator = torch.Generator().manual_seed(2)
    up, down = (torch.randn(EXPERTS * 64, 64, generator=generator) for _ in range(2))
    x, weights, index = (
        torch.randn(9, 64, generator=generator),
        torch.rand(9, 2, generator=generator),
        choices("", 2, 9),
    )
    matrices = [Int8Weight.of(matrix) for matrix in (up, down)]
    ours = apply_experts(x, weights, index, EXPERTS, *matrices, squared)
    widened = [matrix.rows(slice(None)) for matrix in matrices]
    assert error(ours, apply_experts_ref(x, weights, index, EXPERTS, *widened, squared)) <= 1e-3


@pytest.mark.parametrize("form", (SOFTMAX, CHOSEN_SOFTMAX, SIGMOID))
def test_weights_of_a_router(form):
    """They are those of the largest scores, and add up to the scale where they are renormalized."""
    logits = torch.randn(7, EXPERTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights, index = Router(EXPERTS, 2, form, scale=1.5 if form == SIGMOID else 1.0).route(logits)
    assert torch.equal(index.sort(-1)[0], logits.topk(2, dim=-1)[1].sort(-1)[0])
    torch.testing.assert_close(weights.sum(-1), torch.full((7,), 1.5 if form == SIGMOID else 1.0).double())


def test_groups_and_a_correction_choose_other_experts():
    """The correction decides which experts are chosen, and not how they are weighted."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, 2.5]])
    router = Router(6, 2, SIGMOID, renormalized=False, groups=3, chosen_groups=1)
    assert router.route(logits)[1].sort()[0].tolist() == [[0, 1]]
    weights, index = router.route(logits, torch.tensor([0.0, 0, 0, 0, 2, 0]))
    assert index.sort()[0].tolist() == [[4, 5]]
    torch.testing.assert_close(weights, logits[0, index[0]].sigmoid().unsqueeze(0))
