"""All-reduces on several NCCL ranks. Oracle: float64 sums on the CPU. The tests need CUDA."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from sent_bytes import bytes_by_hand

from commfabric.collectives.counted import Counter
from commfabric.reduction.quantized import all_reduce
from ranks import run_cuda_ranks

pytestmark = pytest.mark.cuda

FORMATS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 5e-3, "int8": 3e-2}  # and bounds of ||error|| / ||sum||
SIZES = (1000, 1023, 4097, 1_000_003)


def heavy_tailed(n, rank):
    """The input of a rank: n float32 values, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * rank + n)
    return torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator))


def reduced(rank):
    """{(n, format, algorithm): (sum, counted bytes)} on this rank; NaN and infinities reach the sum."""
    found = {}
    for n, format, algorithm in product(SIZES, FORMATS, ("native", "one_shot", "two_shot")):
        if (format, algorithm) == ("int8", "native"):
            continue
        x, counter = heavy_tailed(n, rank).cuda(), Counter()
        total = all_reduce(x, dist.group.WORLD, format, algorithm, counter)
        found[n, format, algorithm] = total.cpu(), counter.sent
        assert torch.equal(x.cpu(), heavy_tailed(n, rank))
        x[0], x[-1] = float("nan"), float("inf")
        total = all_reduce(x, dist.group.WORLD, format, algorithm)
        assert total[0].isnan() and not total[-1].isfinite(), (format, algorithm)
    return found


@pytest.mark.parametrize("world", (2, 3, 4))
def test_sums_and_bytes(world):
    """The sums have the same bits on all ranks and are near the float64 sum."""
    first, *others = run_cuda_ranks(reduced, world)
    for (n, format, algorithm), (total, sent) in first.items():
        exact = sum(heavy_tailed(n, rank).double() for rank in range(world))
        assert (total - exact).norm() <= FORMATS[format] * exact.norm(), (n, format, algorithm)
        assert all(torch.equal(total, other[n, format, algorithm][0]) for other in others)
        assert sent == bytes_by_hand(format, algorithm, n, world)


def chosen(rank):
    """The sum in the format that is the fastest on these links."""
    return all_reduce(heavy_tailed(100_000, rank).cuda(), dist.group.WORLD, "auto").cpu()


@pytest.mark.parametrize("world", (2, 3))
def test_the_fastest_format(world):
    exact = sum(heavy_tailed(100_000, rank).double() for rank in range(world))
    for total in run_cuda_ranks(chosen, world):
        assert (total - exact).norm() <= 3e-2 * exact.norm()
