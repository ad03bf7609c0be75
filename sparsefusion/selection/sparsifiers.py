"""Which k numbers of a gradient to send: the published selectors, and one that does all of it in a pass.

A selector finds about k of the largest magnitudes; `fit_k` makes it exactly k, so that messages have one size on all
ranks, whatever their data. Sources: SSFusion, section II; Deep Gradient Compression (Lin et al., 2018), GaussianK (Shi et
al., 2019), RedSync (Fang et al., 2019), SIDCo (Abdelmoniem et al., 2021).
"""

import hashlib
import math
from statistics import NormalDist

import torch

SMALL = 16384  # numbers: below, all are sorted
TRIES = 10
STAGES, FIRST_SHARE = 3, 0.25  # of SIDCo: the stages it begins with; what the first one leaves


# Of thresholds: magnitudes (n,), floating, finite, none below 0; 1 <= k <= n.


def topk_threshold(magnitudes, k: int) -> float:
    """The k-th largest."""
    return magnitudes.topk(k).values[-1].item()


def dgc_threshold(magnitudes, k: int) -> float:
    """What somewhat more than k should reach, from a sample of one in 33, at most 65,536."""
    if magnitudes.numel() < SMALL:
        return 0.0
    sample = magnitudes[:: max(32, magnitudes.numel() // 65536) | 1]
    hits = len(sample) * k / magnitudes.numel()
    rank = int(hits + 2 * math.sqrt(hits) + 1)
    return topk_threshold(sample, rank) if rank < len(sample) else 0.0


def gaussiank_threshold(magnitudes, k: int) -> float:
    """Of a normal distribution with mean 0; then up to ten steps of a fifth until 0.8 to 1.2 k reach it."""
    found = magnitudes.square().mean().sqrt().item() * NormalDist().inv_cdf(1 - min(k / (2 * magnitudes.numel()), 0.49))
    for _ in range(TRIES):
        count = _reaching(magnitudes, found)
        if 0.8 * k <= count <= 1.2 * k:
            break
        found *= 1.2 if count > k else 0.8
    return found


def redsync_threshold(magnitudes, k: int) -> float:
    """Between the mean and the largest, by bisection until k to 1.2 k reach it (RedSync: to 2 k)."""
    low, high = magnitudes.mean().item(), magnitudes.max().item()
    for _ in range(2 * TRIES):
        found = (low + high) / 2
        count = _reaching(magnitudes, found)
        if k <= count <= 1.2 * k:
            break
        low, high = (found, high) if count > k else (low, found)
    return found


def sidco_threshold(magnitudes, k: int) -> float:
    """Of exponential distributions fitted in stages to what exceeds the last threshold.

    SIDCo changes the number of stages, 1 to 6, from call to call; here within a call, while that brings the count nearer.
    """
    share = k / magnitudes.numel()
    if share >= FIRST_SHARE:
        return _in_stages(magnitudes, share, 1)
    stages, best = STAGES, None
    while 1 <= stages <= 6:
        found = _in_stages(magnitudes, share, stages)
        count = max(_reaching(magnitudes, found), 1)
        if best and abs(math.log(count / k)) >= best[0]:
            break
        best = abs(math.log(count / k)), found
        if 0.8 * k <= count <= 1.2 * k:
            break
        stages += 1 if count > k else -1
    return best[1]


def _in_stages(magnitudes, share, stages) -> float:
    """The threshold of an exponential distribution's tail, fitted anew to each stage's exceedances."""
    found, first = 0.0, FIRST_SHARE if stages > 1 else share
    for stage in range(stages):
        left = magnitudes if stage == 0 else magnitudes[magnitudes >= found]
        if not left.numel():
            break
        leaves = first if stage == 0 else (share / FIRST_SHARE) ** (1 / (stages - 1))
        found -= (left.mean().item() - found) * math.log(leaves)
    return found


def _reaching(magnitudes, threshold) -> int:
    return int((magnitudes >= threshold).sum())


THRESHOLDS = {
    "dgc": dgc_threshold,
    "gaussiank": gaussiank_threshold,
    "redsync": redsync_threshold,
    "sidco": sidco_threshold,
}


def select(sparsifier: str, x, k: int) -> torch.Tensor:
    """Places (k,), int64, ascending, of numbers of `x` (n,) with large magnitudes; sparsifier: topk, or one of THRESHOLDS.

    What is not finite comes first. Padding is place n - 1 again.
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


def fit_k(magnitudes, places, k: int, exact=False) -> torch.Tensor:
    """Exactly k of `places` (ascending): the largest if there are more. Fewer are padded with the last place of all;
    fewer than half, or with `exact`, are given up for the k largest of all."""
    if len(places) > k:
        return places[_largest(magnitudes[places], k)].sort().values
    if len(places) < (k if exact else k / 2):
        return _largest(magnitudes, k).sort().values
    return torch.cat([places, places.new_full((k - len(places),), magnitudes.numel() - 1)])


def _largest(magnitudes, k) -> torch.Tensor:
    """Places of the k largest; of equal ones the first."""
    least = magnitudes.topk(k).values[-1]
    above = (magnitudes > least).nonzero().flatten()
    equal = (magnitudes == least).nonzero().flatten()
    return torch.cat([above, equal[: k - len(above)]])


def random_places(numel: int, k: int, name: str, step: int, device="cpu") -> torch.Tensor:
    """k different places (k,), int64, ascending, the same on every rank: one in each k-th part of `numel`.

    They depend on nothing but the name and the step, so they need not be sent.
    """
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.arange(k + 1) * numel // k
    widths = bounds.diff()
    return (bounds[:-1] + (torch.rand(k, generator=generator, dtype=torch.float64) * widths).long()).to(device)
