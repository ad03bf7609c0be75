"""Sparsifiers: the selection of the k elements of a gradient to send.

A sparsifier finds a threshold that about k magnitudes reach. `fit_k` makes them exactly k, so that messages have the same
size on all ranks. Sources: SSFusion (Ming et al.), section II; Deep Gradient Compression (Lin et al., 2018); GaussianK (Shi
et al., 2019); RedSync (Fang et al., 2019); SIDCo (Abdelmoniem et al., 2021).
"""

import hashlib
import math
from statistics import NormalDist

import torch

SMALL = 16384  # gradients with fewer elements are sorted
TRIES = 10  # corrections of a threshold
# SIDCo: the initial number of stages; the share of elements that reach the first threshold.
STAGES, FIRST_SHARE = 3, 0.25


# Thresholds. magnitudes: (n,), finite; 1 <= k <= n.


def topk_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """The k-th largest magnitude."""
    return magnitudes.topk(k).values[-1].item()


def dgc_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """A threshold that somewhat more than k magnitudes should reach, from a sample of 1 in 33 or of about 65,536."""
    if magnitudes.numel() < SMALL:
        return 0.0
    sample = magnitudes[:: max(32, magnitudes.numel() // 65536) | 1]
    hits = len(sample) * k / magnitudes.numel()
    rank = int(hits + 2 * math.sqrt(hits) + 1)
    return topk_threshold(sample, rank) if rank < len(sample) else 0.0


def gaussiank_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """The threshold of a normal distribution, corrected by 20 % up to ten times until 0.8 k to 1.2 k elements reach it."""
    deviation = magnitudes.square().mean().sqrt().item()
    threshold = deviation * NormalDist().inv_cdf(1 - min(k / (2 * magnitudes.numel()), 0.49))
    for _ in range(TRIES):
        count = _count_reaching(magnitudes, threshold)
        if 0.8 * k <= count <= 1.2 * k:
            break
        threshold *= 1.2 if count > k else 0.8
    return threshold


def redsync_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """Bisection between the mean and the largest magnitude until k to 1.2 k magnitudes reach it (RedSync: k to 2 k)."""
    low, high = magnitudes.mean().item(), magnitudes.max().item()
    for _ in range(2 * TRIES):
        threshold = (low + high) / 2
        count = _count_reaching(magnitudes, threshold)
        if k <= count <= 1.2 * k:
            break
        low, high = (threshold, high) if count > k else (low, threshold)
    return threshold


def sidco_threshold(magnitudes: torch.Tensor, k: int) -> float:
    """The threshold of exponential distributions, fitted in stages to the magnitudes above the last stage's threshold.

    SIDCo adapts the number of stages, 1 to 6, from call to call. Here it is adapted within one call, as long as that
    brings the number of selected elements closer to k.
    """
    share = k / magnitudes.numel()
    if share >= FIRST_SHARE:
        return _staged_threshold(magnitudes, share, 1)
    stages, best, least_error = STAGES, 0.0, math.inf
    while 1 <= stages <= 6:
        threshold = _staged_threshold(magnitudes, share, stages)
        count = max(_count_reaching(magnitudes, threshold), 1)
        error = abs(math.log(count / k))
        if error >= least_error:
            break
        best, least_error = threshold, error
        if 0.8 * k <= count <= 1.2 * k:
            break
        stages += 1 if count > k else -1
    return best


def _staged_threshold(magnitudes: torch.Tensor, share: float, stages: int) -> float:
    """The threshold after `stages` fits of an exponential distribution to the magnitudes that reach the last threshold."""
    threshold, first = 0.0, FIRST_SHARE if stages > 1 else share
    for stage in range(stages):
        remaining = magnitudes if stage == 0 else magnitudes[magnitudes >= threshold]
        if not remaining.numel():
            break
        stage_share = first if stage == 0 else (share / FIRST_SHARE) ** (1 / (stages - 1))
        threshold -= (remaining.mean().item() - threshold) * math.log(stage_share)
    return threshold


def _count_reaching(magnitudes: torch.Tensor, threshold: float) -> int:
    return int((magnitudes >= threshold).sum())


THRESHOLDS = {
    "dgc": dgc_threshold,
    "gaussiank": gaussiank_threshold,
    "redsync": redsync_threshold,
    "sidco": sidco_threshold,
}


def select(sparsifier: str, x: torch.Tensor, k: int) -> torch.Tensor:
    """Ascending indices (k,), int64, of elements of `x` (n,) with large magnitudes.

    Non-finite elements are selected first. If fewer than k elements are selected, the last index, n - 1, is repeated.
    sparsifier: "topk", or one of THRESHOLDS.
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
    """Exactly k ascending indices from candidate `indices`: those of the largest magnitudes, if there are more than k.

    If there are fewer, the last index of `magnitudes` is repeated. If there are fewer than k / 2, or with `exact` fewer
    than k, the k largest of all magnitudes are selected instead.
    """
    if len(indices) > k:
        return indices[_largest(magnitudes[indices], k)].sort().values
    if len(indices) < (k if exact else k / 2):
        return _largest(magnitudes, k).sort().values
    return torch.cat([indices, indices.new_full((k - len(indices),), magnitudes.numel() - 1)])


def _largest(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of the k largest magnitudes; ties go to lower indices."""
    least = magnitudes.topk(k).values[-1]
    above = (magnitudes > least).nonzero().flatten()
    equal = (magnitudes == least).nonzero().flatten()
    return torch.cat([above, equal[: k - len(above)]])


def random_indices(numel: int, k: int, name: str, step: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Ascending indices (k,), int64: a random one in each of k equal parts of `numel` elements.

    They depend on the name and the step only, so every rank computes them, and they are not sent.
    """
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.arange(k + 1) * numel // k
    widths = bounds.diff()
    return (bounds[:-1] + (torch.rand(k, generator=generator, dtype=torch.float64) * widths).long()).to(device)
