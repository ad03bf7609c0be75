"""Sparsifiers: they choose which k elements of a gradient to send.

Each finds a threshold that about k magnitudes reach. `fit_k` makes it exactly k, so that messages have the same size on
all ranks, whatever their data. Sources: SSFusion, section II; Deep Gradient Compression (Lin et al., 2018), GaussianK
(Shi et al., 2019), RedSync (Fang et al., 2019), SIDCo (Abdelmoniem et al., 2021).
"""

import hashlib
import math
from statistics import NormalDist

import torch

SMALL = 16384  # elements; smaller gradients are sorted
TRIES = 10
STAGES, FIRST_SHARE = 3, 0.25  # of SIDCo: how many stages it begins with; the share that the first one leaves


# Thresholds of magnitudes (n,), which are finite; 1 <= k <= n.


def topk_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """The k-th largest magnitude."""
    return magnitudes.topk(k).values[-1].item()


def dgc_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """A threshold that somewhat more than k magnitudes should reach, from a sample of one in 33, of at most 65,536."""
    if magnitudes.numel() < SMALL:
        return 0.0
    sample = magnitudes[:: max(32, magnitudes.numel() // 65536) | 1]
    hits = len(sample) * k / magnitudes.numel()
    rank = int(hits + 2 * math.sqrt(hits) + 1)
    return topk_threshold(sample, rank) if rank < len(sample) else 0.0


def gaussiank_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """A normal distribution's threshold, corrected in up to ten steps of 20 % until 0.8 k to 1.2 k reach it."""
    found = magnitudes.square().mean().sqrt().item() * NormalDist().inv_cdf(1 - min(k / (2 * magnitudes.numel()), 0.49))
    for _ in range(TRIES):
        count = _count_reaching(magnitudes, found)
        if 0.8 * k <= count <= 1.2 * k:
            break
        found *= 1.2 if count > k else 0.8
    return found


def redsync_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """Bisection between the mean and the largest magnitude until k to 1.2 k reach the threshold (RedSync: k to 2 k)."""
    low, high = magnitudes.mean().item(), magnitudes.max().item()
    for _ in range(2 * TRIES):
        found = (low + high) / 2
        count = _count_reaching(magnitudes, found)
        if k <= count <= 1.2 * k:
            break
        low, high = (found, high) if count > k else (low, found)
    return found


def sidco_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """The threshold of exponential distributions, fitted in stages to the magnitudes above the previous threshold.

    SIDCo changes the number of stages (1 to 6) from call to call. Here it changes within one call, as long as that
    brings the number of selected elements closer to k.
    """
    share = k / magnitudes.numel()
    if share >= FIRST_SHARE:
        return _staged_threshold(magnitudes, share, 1)
    stages, best = STAGES, None
    while 1 <= stages <= 6:
        found = _staged_threshold(magnitudes, share, stages)
        count = max(_count_reaching(magnitudes, found), 1)
        if best and abs(math.log(count / k)) >= best[0]:
            break
        best = abs(math.log(count / k)), found
        if 0.8 * k <= count <= 1.2 * k:
            break
        stages += 1 if count > k else -1
    return best[1]


def _staged_threshold(magnitudes, share, stages) -> float:
    """The threshold after some stages, each of which fits an exponential distribution to what exceeds the last threshold."""
    found, first = 0.0, FIRST_SHARE if stages > 1 else share
    for stage in range(stages):
        left = magnitudes if stage == 0 else magnitudes[magnitudes >= found]
        if not left.numel():
            break
        leaves = first if stage == 0 else (share / FIRST_SHARE) ** (1 / (stages - 1))
        found -= (left.mean().item() - found) * math.log(leaves)
    return found


def _count_reaching(magnitudes, threshold) -> int:
    return int((magnitudes >= threshold).sum())


THRESHOLDS = {
    "dgc": dgc_threshold,
    "gaussiank": gaussiank_threshold,
    "redsync": redsync_threshold,
    "sidco": sidco_threshold,
}


def select(sparsifier: str, x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (k,), int64, ascending, of elements of `x` (n,) with large magnitudes. sparsifier: topk, or one of THRESHOLDS.

    Elements that are not finite are selected first. Missing indices are filled up with n - 1.
    """
    magnitudes = x.abs()
    if not math.isfinite(x.sum().item()):
        magnitudes = torch.nan_to_num(magnitudes, nan=math.inf, posinf=math.inf)
        if magnitudes.isinf().any():
            return _largest(magnitudes, k).sort().values
    if x.numel() < SMALL or sparsifier == "topk":
        return _largest(magnitudes, k).sort().values
    reaching = (magnitudes >= THRESHOLDS[sparsifier](magnitudes, k)) & (magnitudes > 0)
    return fit_k(magnitudes, reaching.nonzero().flatten(), k, exact=sparsifier == "dgc")


def fit_k(magnitudes: torch.Tensor, indices: torch.Tensor, k: int, exact: bool = False) -> torch.Tensor:
    """Exactly k of the candidate `indices` (ascending): those with the largest magnitudes, if there are more than k.

    If there are fewer, the last index of all is repeated; if there are fewer than k / 2, or with `exact`, the k largest
    of all magnitudes are taken instead.
    """
    if len(indices) > k:
        return indices[_largest(magnitudes[indices], k)].sort().values
    if len(indices) < (k if exact else k / 2):
        return _largest(magnitudes, k).sort().values
    return torch.cat([indices, indices.new_full((k - len(indices),), magnitudes.numel() - 1)])


def _largest(magnitudes, k) -> torch.Tensor:
    """The indices of the k largest magnitudes; among equal ones, the first."""
    least = magnitudes.topk(k).values[-1]
    above = (magnitudes > least).nonzero().flatten()
    equal = (magnitudes == least).nonzero().flatten()
    return torch.cat([above, equal[: k - len(above)]])


def random_indices(numel: int, k: int, name: str, step: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """k different indices (k,), int64, ascending: one in each k-th part of `numel`.

    They depend on the name and the step only, so they are the same on every rank and need not be sent.
    """
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.arange(k + 1) * numel // k
    widths = bounds.diff()
    return (bounds[:-1] + (torch.rand(k, generator=generator, dtype=torch.float64) * widths).long()).to(device)
