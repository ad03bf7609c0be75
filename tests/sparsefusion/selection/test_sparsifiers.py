"""Selecting k elements of a gradient; oracles: torch's sort, and the sum of gradient and residual."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native_variants import library_path, variants
from sparsefusion import SPARSIFIERS
from sparsefusion.selection import fused
from sparsefusion.selection.fused import add_at, add_at_ref, take, take_ref
from sparsefusion.selection.sparsifiers import THRESHOLDS, fit_k, random_indices, select

__all__ = ["library_path"]
needs_c = pytest.mark.skipif(not fused.kernels(), reason="no C kernels")
BIASED = [name for name in SPARSIFIERS if name != "randomk"]
EXACT = ("topk", "dgc")


def numbers(kind, count, seed=0):
    """Random values from a distribution that gradients resemble."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator)
    uniform = torch.rand(count, generator=generator)
    return {
        "normal": normal,
        "laplace": normal.sign() * uniform.log(),
        "student-t": normal / (torch.randn(3, count, generator=generator).square().mean(0)).sqrt(),
        "heavy": normal * torch.randn(count, generator=generator).exp(),
    }[kind]


KINDS = ("normal", "laplace", "student-t", "heavy")


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count, k", [(30, 3), (20_000, 200), (200_000, 500)])
def test_exactly_k_large_elements(name, kind, count, k):
    x = numbers(kind, count)
    indices = select(name, x, k)
    assert indices.shape == (k,) and indices.dtype == torch.int64
    assert 0 <= indices.min() and indices.max() < count and (indices.diff() >= 0).all()
    largest = x.abs().sort(descending=True, stable=True)
    if name in EXACT or count < 16384:
        assert torch.equal(indices, largest.indices[:k].sort().values)
    else:  # elements above a threshold are the largest ones; padding has the index count - 1
        chosen = x[indices[indices < count - 1]].abs()
        assert torch.equal(chosen.sort(descending=True).values, largest.values[: len(chosen)])
        assert len(chosen) >= k / 2


@pytest.mark.parametrize("name", ["dgc", "gaussiank", "sidco", "redsync"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [10_000, 1000])
def test_thresholds(name, kind, k):
    """From 0.5 k to 2 k magnitudes reach the threshold, also with RedSync and SIDCo, whose searches stop earlier."""
    x = numbers(kind, 1_000_000).abs()
    assert 0.5 * k <= int((x >= THRESHOLDS[name](x, k)).sum()) <= 2 * k


@pytest.mark.parametrize("name", SPARSIFIERS)
@pytest.mark.parametrize("count", [1, 2, 100, 16384, 20_000])
def test_zeros_and_few_elements(name, count):
    for k in {1, min(7, count), count}:
        if name == "randomk":
            indices = random_indices(count, k, "w", 0)
            assert len(indices.unique()) == k
        else:
            residual = torch.zeros(count)
            values, indices = take(name, [torch.zeros(count)], [residual], k)
            assert not values.any() and not residual.any()
        assert len(indices) == k and 0 <= indices.min() and indices.max() < count


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("take", [take, take_ref])
def test_nan_and_inf_are_selected_first(name, bad, take):
    """None of them remains in the residual, even if k is too small to select all of them."""
    for count, k in ((1000, 5), (50_000, 5), (50_000, 1)):
        gradient, residual = numbers("heavy", count), torch.zeros(count)
        gradient[[3, count - 1]] = bad
        values, indices = take(name, [gradient], [residual], k)
        assert not values[0].isfinite() and indices[0] == 3 and (~values.isfinite()).sum() == min(2, k)
        assert residual.isfinite().all()


@st.composite
def parts(draw):
    """(gradients, residuals, k): tensors in which some elements are equal and some are 0."""
    sizes = draw(st.lists(st.integers(1, 9000), min_size=1, max_size=4))
    seed, levels = draw(st.integers(0, 99)), draw(st.sampled_from([1, 3, 1000]))
    made = [
        numbers("heavy", 2 * size, seed + i).mul(levels).round().div(levels).view(2, -1) for i, size in enumerate(sizes)
    ]
    return [m[0].clone() for m in made], [m[1].clone() for m in made], draw(st.integers(1, sum(sizes)))


@pytest.mark.parametrize("k", [17_000, 18_000, 18_432, 19_999])
def test_k_of_nearly_all_elements(k):
    """A sample then has hardly enough elements to estimate the threshold."""
    gradient, residual = numbers("heavy", 40_000, 0).view(2, -1)
    total = gradient + residual
    values, indices = take_ref("dgc", [gradient], [residual], k)
    assert torch.equal(values.abs().sort().values, total.abs().topk(k).values.sort().values)
    assert torch.equal(total[indices.long()], values)


@needs_c
@settings(max_examples=60, deadline=None)
@given(parts(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([1.0, 0.25]))
def test_c_takes_what_torch_takes(given, dtype, scale):
    gradients, residuals, k = given
    gradients, twins = [g.to(dtype) for g in gradients], [r.clone() for r in residuals]
    values, indices = take("dgc", gradients, residuals, k, scale)
    expected, expected_indices = take_ref("dgc", gradients, twins, k, scale)
    nonzero = values != 0
    assert torch.equal(values[nonzero], expected[expected != 0])
    assert torch.equal(indices[nonzero], expected_indices[expected != 0])
    assert all(map(torch.equal, residuals, twins))


variant = variants(fused)


@needs_c
@pytest.mark.parametrize("sizes", [(1,), (63, 2, 64), (4099, 1), (1_300_000,), (700_001, 5, 600_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_build_takes_what_torch_takes(variant, sizes, dtype):
    """Also of tensors so long that thresholds come from a sample. After several steps, residuals have many magnitudes."""
    k = max(1, sum(sizes) // 100)
    residuals = [torch.zeros(size) for size in sizes]
    twins = [residual.clone() for residual in residuals]
    for step in range(3):
        gradients = [numbers("heavy", size, 7 * step + size).to(dtype) for size in sizes]
        if step == 2:
            gradients[0][0] = gradients[-1][-1] = math.nan
        values, indices = take("dgc", gradients, residuals, k, 0.5)
        expected, expected_indices = take_ref("dgc", gradients, twins, k, 0.5)
        nonzero, expected_nonzero = values != 0, expected != 0
        assert torch.equal(values[nonzero].nan_to_num(9), expected[expected_nonzero].nan_to_num(9))
        assert torch.equal(indices[nonzero], expected_indices[expected_nonzero])
        assert all(map(torch.equal, residuals, twins))


@settings(max_examples=60, deadline=None)
@given(parts(), st.sampled_from(BIASED))
def test_nothing_is_lost(given, name):
    """Adding the values back to the residuals gives the sum of gradients and residuals."""
    gradients, residuals, k = given
    total = [g + r for g, r in zip(gradients, residuals, strict=True)]
    values, indices = take(name, gradients, residuals, k)
    for add in (add_at, add_at_ref):
        restored = [r.clone() for r in residuals]
        add(restored, values, indices)
        assert all(map(torch.equal, restored, total))


@pytest.mark.parametrize("add", [add_at, add_at_ref])
@pytest.mark.parametrize("indices", [[5], [-1], [3, 2], [0, 7], [-3, 1]])
def test_wrong_indices_are_refused(add, indices):
    """Indices outside of the targets, or in another order than the targets, by the C kernel and by torch."""
    with pytest.raises(ValueError, match="do not ascend within 5 elements"):
        add([torch.zeros(3), torch.zeros(2)], torch.ones(len(indices)), torch.tensor(indices, dtype=torch.int32))


def test_tensors_that_the_kernels_do_not_support():
    """They go through torch: the C kernels read int32 indices and contiguous tensors of equal lengths."""
    for targets, indices in (
        ([torch.zeros(3), torch.zeros(2)], torch.tensor([0, 3])),
        ([torch.zeros(6)[::2], torch.zeros(2)], torch.tensor([0, 3], dtype=torch.int32)),
    ):
        add_at(targets, torch.tensor([1.0, 2.0]), indices)
        assert torch.cat(targets).tolist() == [1, 0, 0, 2, 0]
    with pytest.raises(RuntimeError):
        add_at([torch.zeros(9)], torch.ones(1), torch.arange(9, dtype=torch.int32))
    with pytest.raises(RuntimeError):
        take("dgc", [torch.ones(3)], [torch.zeros(5)], 1)


def test_fit_k():
    magnitudes = torch.tensor([5.0, 1, 4, 2, 3, 0])
    assert fit_k(magnitudes, torch.tensor([0, 2, 3, 4]), 2).tolist() == [0, 2]
    assert fit_k(magnitudes, torch.tensor([2, 3]), 3).tolist() == [2, 3, 5]  # padded
    assert fit_k(magnitudes, torch.tensor([3]), 3).tolist() == [0, 2, 4]  # too few
    assert fit_k(magnitudes, torch.tensor([2, 3]), 3, exact=True).tolist() == [0, 2, 4]


def test_random_indices_cover_all_elements_and_change():
    counts = torch.zeros(101)
    for step in range(400):
        indices = random_indices(101, 10, "w", step)
        assert len(indices.unique()) == 10
        counts[indices] += 1
    assert counts.min() > 15 and counts.max() < 75  # 40 are expected
    assert torch.equal(random_indices(101, 10, "w", 3), random_indices(101, 10, "w", 3))
    assert not torch.equal(random_indices(101, 10, "w", 3), random_indices(101, 10, "v", 3))
