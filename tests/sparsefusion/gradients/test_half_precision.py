"""Numbers to float16 and back; oracle: torch's conversions, and numpy's."""

import math

import numpy
import pytest
import torch

from native_variants import library_path, variants
from shared import needs_library
from sparsefusion.gradients import half_precision
from sparsefusion.gradients.half_precision import largest

__all__ = ["library_path"]

SPECIAL = [
    0.0,
    -0.0,
    6e-8,
    2.9e-8,
    3e-8,
    -6.1e-5,
    65504.0,
    65519.0,
    65520.0,
    -7e4,
    1e30,
    1e-30,
    1 + 2**-11,
    1 + 3 * 2**-11,
]
TIMES = [1.0, 1 / 3, 256.0, 2.0**40]


variant = variants(half_precision)


def have_same_bits(x, y) -> bool:
    """Also of zeros with different signs."""
    return x.dtype == y.dtype and torch.equal(x.view(torch.int16), y.view(torch.int16))


def sample(numel):
    """Random values of all magnitudes; special values come first."""
    generator = torch.Generator().manual_seed(numel)
    some = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).mul(5).exp()
    some[: len(SPECIAL)] = torch.tensor(SPECIAL)[:numel]
    return some


@needs_library
@pytest.mark.parametrize("numel", [0, 1, 17, 100_003])
@pytest.mark.parametrize("times", TIMES)
def test_c_kernels_have_the_bits_of_torch(variant, numel, times):
    x = sample(numel)
    half = half_precision.to_fp16(x, times)
    assert have_same_bits(half, half_precision.to_fp16_ref(x, times)) and have_same_bits(half, (x * times).half())
    out, expected = torch.empty(numel), torch.empty(numel)
    half_precision.from_fp16(half, times, out)
    half_precision.from_fp16_ref(half, times, expected)
    assert have_same_bits(out, expected) and have_same_bits(out, half.float() * times)
    most = half.double().abs().max().item() if numel else 0.0
    assert half_precision.largest_fp16(half).item() == most == largest(half).item()


@needs_library
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 31, 100])
def test_nonfinite_values_stay_nonfinite(variant, bad, place):
    x = sample(101)
    x[place] = bad
    half = half_precision.to_fp16(x, 1e-30)
    assert torch.equal(half.isnan(), x.isnan()) and torch.equal(half.isinf(), x.isinf())
    assert not half_precision.largest_fp16(half).isfinite() and not largest(half).isfinite()
    out = torch.empty(101)
    half_precision.from_fp16(half, 2.0, out)
    assert torch.equal(out.isfinite(), x.isfinite())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_are_rounded_once(dtype):
    x = sample(1000).to(dtype)
    with numpy.errstate(over="ignore"):
        expected = (x.float() * (1 / 3)).numpy().astype(numpy.float16)
    assert have_same_bits(half_precision.to_fp16(x, 1 / 3), torch.from_numpy(expected))
    out = torch.empty_like(x)
    half_precision.from_fp16(half_precision.to_fp16(x, 2.0**-9), 2.0**9, out)
    middle = (x.double().abs() > 1) & (x.double().abs() < 1000)
    assert middle.sum() > 100 and out[middle].double().allclose(x[middle].double(), rtol=1e-3)
