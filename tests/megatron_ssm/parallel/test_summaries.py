"""Summaries of blocks and adjoints of their initial states. Oracle: autograd through the plain scans, in float64."""

import math

import pytest
import torch

from megatron_ssm.kernels import kernels
from megatron_ssm.kernels.scan import selective_scan_ref, ssd_ref
from megatron_ssm.parallel.summaries import selective_adjoint, selective_summary, ssd_adjoint, ssd_summary
from scans import error, inputs_of

needs_kernels = pytest.mark.skipif(kernels.LIBRARY.functions is None, reason=f"no C library: {kernels.LIBRARY.why}")


def plain(scan, inputs):
    """(final state from zeros, a gradient of the outputs, the gradient of the initial state that comes from it)."""
    y, _ = scan(**inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    (adjoint,) = torch.autograd.grad((y * dy).sum(), inputs["state"])
    return scan(**inputs | {"state": None})[1], dy, adjoint


def ours_selective(inputs, dy):
    names = "x", "dt", "A_log", "B", "dt_bias"
    state, sums = selective_summary(*(inputs[name] for name in names))
    adjoint = selective_adjoint(dy, *(inputs[name] for name in ("dt", "A_log", "C", "z", "dt_bias")))
    return state, sums, adjoint


@torch.no_grad()
def check_selective(inputs, tolerance):
    with torch.enable_grad():
        expected_state, dy, expected_adjoint = plain(selective_scan_ref, inputs)
    state, sums, adjoint = ours_selective(inputs, dy)
    assert error(state, expected_state) < tolerance
    assert error(adjoint, expected_adjoint) < tolerance
    dt = inputs["dt"] if inputs["dt_bias"] is None else torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])
    assert error(sums, dt.sum(1)) < tolerance


@pytest.mark.parametrize("gated, biased", ((True, True), (False, True), (True, False)))
@pytest.mark.parametrize("channels, size", ((7, 4), (70, 16), (64, 1)))
@pytest.mark.parametrize("dtype", (torch.float64, pytest.param(torch.float32, marks=needs_kernels)), ids=str)
def test_selective(dtype, channels, size, gated, biased):
    """In float32 by the C kernel, whose blocks have 64 channels; in float64 by torch."""
    inputs = inputs_of("selective", seq=9, channels=channels, size=size, dtype=dtype)
    inputs |= dict() if gated else dict(z=None)
    inputs |= dict() if biased else dict(dt_bias=None, dt=inputs["dt"].detach().exp() / 4)
    check_selective(inputs, 1e-12 if dtype is torch.float64 else 1e-5)


@needs_kernels
@torch.no_grad()
def test_a_state_that_overflows():
    """Without dt_bias, steps may be negative. A state that overflows leaves the channel's other states as they are."""
    x, dt, B = torch.full((1, 2, 64), 0.5), torch.full((1, 2, 64), -6.0), torch.ones(1, 2, 2)
    A_log = torch.tensor([1.0, 16.0]).log().expand(64, 2).contiguous()
    state, _ = selective_summary(x, dt, A_log, B, None)
    torch.testing.assert_close(state[:, 0], torch.full((1, 64), -3 * math.exp(6) - 3), rtol=1e-5, atol=0)
    assert (state[:, 1] < -1e38).all()


@needs_kernels
def test_selective_of_tensors_with_gaps():
    """As the parts of one projection's output are, in blocks of a longer sequence."""
    inputs = inputs_of("selective", batch=2, seq=8, channels=66, dtype=torch.float32)
    apart = {
        name: torch.stack([t, t], dim=2)[:, :, 0] if t.ndim == 3 and name != "state" else t
        for name, t in inputs.items()
    }
    check_selective(apart, 1e-5)


@pytest.mark.parametrize("heads, groups", ((4, 2), (3, 1)))
def test_ssd(heads, groups):
    inputs = inputs_of("ssd", seq=9, heads=heads, groups=groups, channels=5)
    expected_state, dy, expected_adjoint = plain(ssd_ref, inputs)
    with torch.no_grad():
        state, sums = ssd_summary(*(inputs[name] for name in ("x", "dt", "A_log", "B")))
        adjoint = ssd_adjoint(dy, *(inputs[name] for name in ("dt", "A_log", "C")))
    assert error(state, expected_state) < 1e-12
    assert error(sums, inputs["dt"].sum(1)) < 1e-12
    assert error(adjoint, expected_adjoint) < 1e-12


@torch.no_grad()
def test_ssd_under_autocast():
    """States are at least fp32."""
    inputs = inputs_of("ssd", seq=9, dtype=torch.float32)
    expected, _ = ssd_summary(*(inputs[name] for name in ("x", "dt", "A_log", "B")))
    with torch.autocast("cpu", torch.bfloat16):
        state, _ = ssd_summary(*(inputs[name] for name in ("x", "dt", "A_log", "B")))
        adjoint = ssd_adjoint(inputs["x"], *(inputs[name] for name in ("dt", "A_log", "C")))
    assert adjoint.dtype == torch.float32
    assert torch.equal(state, expected)


@needs_kernels
def test_the_kernel_refuses_other_shapes():
    inputs = inputs_of("selective", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"dt has shape \(2, 5, 2\)"):
        selective_summary(
            *(inputs[name][..., :2] if name == "dt" else inputs[name] for name in ("x", "dt", "A_log", "B")), None
        )
