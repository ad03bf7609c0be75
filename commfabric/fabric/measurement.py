"""Measures collectives of a process group with gloo or NCCL, call by call, or on CUDA also as replayed graphs.

At each size the operations take turns, in another order in each repetition, because a link with burst credit is affected by
earlier messages. A call begins with a barrier and lasts until its slowest rank is done; a point is the median of the
repetitions. Rank 0 fits the curves and sends them to the other ranks, so that all ranks decide from the same numbers.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from commfabric.collectives import counted as collectives
from commfabric.collectives.agreement import on_first

from .cost_model import Fabric
from .curve import Curve

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
BUDGET_S = 0.3  # time of all operations at one size, within MIN_REPETITIONS and MAX_REPETITIONS
MIN_REPETITIONS, MAX_REPETITIONS = 3, 100
SLOW_S = 2.0  # an operation that takes longer is not measured at larger sizes
# In a race, an operation is also dropped if it takes longer than RACE_RATIO times the fastest one at RACE_BYTES or more. A
# race ends when a repetition of all operations takes longer than RACE_S.
RACE_RATIO, RACE_BYTES, RACE_S = 3.0, 64 * 1024, 1.0
GRAPH_CALLS = 20  # calls in a CUDA graph

Call = Callable[[], object]  # performs an operation once
Stopwatch = Callable[[], float]  # performs an operation once, and returns its seconds on this rank


def measure(
    group: dist.ProcessGroup,
    calls: Mapping[str, Callable[[int], Call]],
    sizes: Iterable[int],
    device: torch.device | str = "cpu",
    mode: str = "eager",
    race: bool = False,
    seconds: float | None = None,
) -> Fabric:
    """Measure the times of operations. All ranks of `group` call it together, and get the same fabric.

    It sends the messages of the operations and barriers, and rank 0 broadcasts the curves.

    Args:
        group: The ranks.
        calls: {operation: function that maps nbytes to a function that performs the operation once}.
        sizes: The sizes to measure in bytes, counted as in `curve`.
        device: The device of the tensors.
        mode: "eager", or "graph" on CUDA.
        race: Measure only to find the fastest operation: much slower operations are not measured at larger sizes, and slow
            links are not measured at large sizes.
        seconds: The time for the whole measurement; None for any. It ends before a size that would exceed it if that size
            took twice as long as the one before. The first size is always measured.

    Raises:
        ValueError: On every rank, if the times cannot be fitted.
    """
    points: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
    running = list(calls)
    ends = [time.monotonic()]
    for nbytes in sorted(sizes):
        times = repetitions([timed(calls[name](nbytes), device, mode) for name in running], group, device)
        medians = times.median(0).values
        for name, median, high in zip(running, medians.tolist(), times.quantile(0.9, 0).tolist(), strict=True):
            points[name].append((nbytes, median, high))
        limit = RACE_RATIO * medians.min().item() if race and nbytes >= RACE_BYTES else SLOW_S
        running = [name for name in running if points[name][-1][1] <= min(limit, SLOW_S)]
        if not running or (race and medians.sum() > RACE_S):
            break
        ends.append(time.monotonic())
        # The time of the first size includes that of connecting the ranks, so it predicts nothing.
        following = 2 * (ends[-1] - ends[-2]) if len(ends) > 2 else 0.0
        if seconds is not None and _on_any_rank(ends[-1] - ends[0] + following > seconds, group, device):
            break
    device = torch.device(device)

    def fit() -> list[Curve]:
        return [Curve.fit(name, group.size(), measured, mode) for name, measured in points.items()]

    return Fabric(tuple(on_first(fit, group, device)), {"source": "measured", "device": device.type})


def _on_any_rank(condition: bool, group: dist.ProcessGroup, device: torch.device | str) -> bool:
    """Return True on every rank if `condition` is true on one of them. It all-reduces a number."""
    return bool(collectives.all_reduce(torch.tensor(float(condition), device=device), group, op=dist.ReduceOp.MAX))


def time_shares(seconds: float, runs: int) -> Iterator[float]:
    """The seconds that each of `runs` consecutive runs may take: equal shares of the time that is left when it begins."""
    end = time.monotonic() + seconds
    for left in range(runs, 0, -1):
        yield max(0.0, end - time.monotonic()) / left


def repetitions(
    functions: Sequence[Stopwatch],
    group: dist.ProcessGroup,
    device: torch.device | str = "cpu",
    count: int | None = None,
    warm_up: bool = True,
) -> torch.Tensor:
    """Seconds of the slowest rank: (repetitions, functions), float64, the same on every rank.

    It all-reduces one number before each call, and the times of each repetition.

    Args:
        functions: Operations made by `timed`, which take turns.
        device: The device of the operations.
        count: The number of repetitions, by default as many as BUDGET_S allows.
        warm_up: Precede them by a repetition that is not counted.
    """
    ready = torch.zeros(1, device=device)

    def repetition(number: int) -> torch.Tensor:
        """Call each function once, in an order of this repetition; returns the seconds (functions,) of the slowest rank."""
        seconds = torch.zeros(len(functions), device=device)
        order = list(range(len(functions)))
        random.Random(number).shuffle(order)  # the same on every rank
        for i in order:
            dist.all_reduce(ready, group=group)  # a barrier on this device
            seconds[i] = functions[i]()
        return collectives.all_reduce(seconds, group, op=dist.ReduceOp.MAX).cpu().double()

    if warm_up:
        repetition(0)
    rows = [repetition(1)]
    count = count or max(MIN_REPETITIONS, min(MAX_REPETITIONS, int(BUDGET_S / rows[0].sum().item())))
    return torch.stack(rows + [repetition(number) for number in range(2, count + 1)])


def timed(function: Call, device: torch.device | str = "cpu", mode: str = "eager") -> Stopwatch:
    """A function that performs `function` once and returns its seconds on this rank.

    On CUDA it synchronizes before and after. In mode "graph", it replays a CUDA graph of GRAPH_CALLS calls, and returns the
    mean seconds of a call.
    """
    if mode == "graph":
        return _timed_graph(function, device)

    def stopwatch() -> float:
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        return time.perf_counter() - start

    return stopwatch


def _timed_graph(function: Call, device: torch.device | str) -> Stopwatch:
    with torch.cuda.device(device):
        function()
        _synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                function()
    replay = timed(graph.replay, device)
    return lambda: replay() / GRAPH_CALLS


def _synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def collective_calls(
    group: dist.ProcessGroup, names: Iterable[str] = COLLECTIVES, device: torch.device | str = "cpu"
) -> dict[str, Callable[[int], Call]]:
    """The collectives `names` as the argument `calls` of `measure`: {name: nbytes -> function}.

    They act on float32 tensors, which have at least one element for each rank that receives a part. In p2p, every even rank
    sends to the next rank.
    """
    return {name: partial(_prepare, name, group, device) for name in names}


def _prepare(name: str, group: dist.ProcessGroup, device: torch.device | str, nbytes: int) -> Call:
    """A function that performs the collective `name` once, on a tensor that is allocated now."""
    ranks = group.size()
    numel = max(1, nbytes // 4)
    if name == "p2p":
        return _message(torch.zeros(numel, device=device), group)
    if name in ("reduce_scatter", "all_to_all"):
        tensor = torch.zeros(ranks, -(-numel // ranks), device=device)
    else:
        tensor = torch.zeros(numel, device=device)
    return partial(getattr(collectives, name), tensor, group)


def _message(tensor: torch.Tensor, group: dist.ProcessGroup) -> Call:
    """A function that sends `tensor` from every even rank to the next rank."""
    rank, peer = group.rank(), group.rank() ^ 1
    if peer >= group.size():
        return lambda: None
    if rank % 2 == 0:
        return lambda: collectives.exchange([(tensor, peer)], [], group).wait()
    return lambda: collectives.exchange([], [(torch.empty_like(tensor), peer)], group).wait()
