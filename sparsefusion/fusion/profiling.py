"""Dense steps watched until it is known when gradients are ready; then what messages and selecting cost is measured.

Seconds are means over the ranks, so that all of them plan alike.
"""

import time
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, partial
from statistics import median, median_low

import numpy as np
import torch
import torch.distributed as dist

from sparsefusion.collectives.counted import all_reduce
from sparsefusion.fabric.measurement import collective_calls, repetitions, timed
from sparsefusion.gradients.reducer import Reducer
from sparsefusion.gradients.session import Watcher
from sparsefusion.planning.plan import Unit
from sparsefusion.planning.timeline import Costs, Tensor, Timeline
from sparsefusion.selection.fused import add_at

WATCHED = 4  # steps, after a first one in which frameworks settle their buckets
SIZES = {1 << 10: 8, 1 << 15: 5, 1 << 18: 3, 1 << 20: 1, 1 << 21: 1}  # bytes of messages: times that they are measured
SLOW_S = 0.03  # larger ones are not sent after this, but two sizes always are
LEAST, MOST = 1 << 12, 1 << 22  # numbers that selecting from is measured
SMALL = 64  # numbers of a message of which handling is measured


class Clock:
    """Marks in time, of the host or of the CUDA stream, and the seconds between them."""

    def __init__(self, device):
        self._cuda = torch.device(device).type == "cuda"

    def mark(self):
        """Now, or when the stream gets here."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start, end) -> float:
        """Between two marks; waits for the stream."""
        if not self._cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class Observation(Watcher):
    """Watches a session's steps; calls `done` with the timeline after 1 + WATCHED of them.

    parameters: {name: parameter} of all gradients. itemsize: bytes of a gradient's number; sent: in the framework's own
    messages. copied: the names of parameters that several ranks over which the model is divided hold. early: gradients may
    be sent before their atom is complete.
    """

    def __init__(self, parameters, group, itemsize: int, sent: int, copied, early: bool, done):
        self._parameters, self._group, self._done = parameters, group, done
        self._itemsize, self._sent, self._copied, self._early = itemsize, sent, copied, early
        self._clock = Clock(next(iter(parameters.values())).device)
        self._marks, self._waits, self._atoms, self._steps, self._ended = {}, [], [], [], None
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._noting(name))
            for name, p in parameters.items()
            if p.requires_grad
        ]

    def _noting(self, name):
        def note(_):
            self._marks[name] = self._clock.mark()

        return note

    def arrived(self, names) -> None:
        """An atom came; of parameters that were not used it is the first that is known."""
        mark = self._clock.mark()
        self._atoms.append(names)
        self._waits.append([mark, mark])
        for name in names:
            self._marks.setdefault(name, mark)

    def left(self) -> None:
        """Until now the framework waited, if it does that."""
        self._waits[-1][1] = self._clock.mark()

    def step_ended(self, session) -> None:
        """Keep what this step showed."""
        ended = self._clock.mark()
        if self._ended is not None:
            since = partial(self._clock.seconds, self._ended)
            waits = [] if session.holds else [(since(came), since(left)) for came, left in self._waits]
            ready = {name: without(waits, since(mark)) for name, mark in self._marks.items()}
            if not self._early:  # nothing is sent before the first atom comes, which may be when backward is over
                first = since(self._waits[0][0])
                ready = {name: max(first, seconds) for name, seconds in ready.items()}
            self._steps.append((ready, since(ended), self._atoms))
        self._ended, self._marks, self._waits, self._atoms = self._clock.mark(), {}, [], []
        if len(self._steps) >= WATCHED:
            self.stop(session)
            self._done(self._timeline(waits=not session.holds))

    def stop(self, session) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        session.watchers.remove(self)

    def _timeline(self, waits) -> Timeline:
        """Medians of the steps, means over the ranks; atoms as in the last step. What never came is as the last that did.

        The lower one of two medians: what disturbs a step makes it longer.
        """
        names, atoms = list(self._parameters), [list(atom) for atom in self._steps[-1][2]]
        came = {name for atom in atoms for name in atom}
        atoms[-1] += [name for name in names if name not in came]
        local = [median_low(ready.get(name, max(ready.values())) for ready, _, _ in self._steps) for name in names]
        local.append(median_low(step for _, step, _ in self._steps))
        *ready, step = mean_over_ranks(local, self._group, next(iter(self._parameters.values())).device)
        parameters = [self._parameters[name] for name in names]
        tensors = [
            Tensor(name, p.numel(), p.dim(), at, name in self._copied)
            for name, p, at in zip(names, parameters, ready, strict=True)
        ]
        order = sorted(tensors, key=lambda tensor: tensor.ready)
        return Timeline(tuple(order), tuple(map(tuple, atoms)), self._itemsize, self._sent, step, waits)


def without(waits, seconds) -> float:
    """When it would have been so far without these: [(seconds at the start, at the end)]."""
    return seconds - sum(end - start for start, end in waits if end <= seconds)


def mean_over_ranks(numbers, group, device) -> list[float]:
    """Of each number, the same bits on every rank."""
    total = all_reduce(torch.tensor(numbers, dtype=torch.float64, device=device), group)
    return (total / group.size()).tolist()


def measured_costs(group, device, dtype, numel: int, wish, whole="all_reduce", fabric=None) -> Costs:
    """What messages cost on the links of `group`, and selecting on its ranks; all of them call this together.

    dtype: of gradients. numel: of all of them. wish: a `Wish`. whole: the operation with which the framework sends
    gradients. fabric: what messages cost, if that is known.
    """
    fabric = fabric or measured_fabric(group, device, {"all_reduce", "all_gather", whole})
    sizes = np.unique(np.geomspace(LEAST, max(2 * LEAST, min(numel, MOST)), 4).astype(int))
    selecting = [_selecting(size, dtype, wish, device) for size in sizes.tolist()]
    k = max(64, int(wish.density * sizes[-1]))
    adding, copying = _adding(int(sizes[-1]), k, device) / k, _copying(int(sizes[-1]), device) / (4 * sizes[-1])
    handling = _handling(group, dtype, wish, device)
    *selecting, adding, copying, handling = mean_over_ranks([*selecting, adding, copying, handling], group, device)
    sending = fabric.time(wish.operation, wish.sent_bytes(SMALL, dtype.itemsize), group.size())

    @cache
    def select(count):
        if count > sizes[-1]:
            return selecting[-1] * count / sizes[-1]
        return float(np.interp(count, [0, *sizes], [0.0, *selecting]))

    return Costs(
        fabric, group.size(), select, lambda n: n * adding, lambda nbytes: nbytes * copying, whole=whole,
        handle=max(0.0, handling - selecting[0] - sending),
    )  # fmt: skip


def measured_fabric(group, device, operations) -> "Sampled":
    """Some operations at a few sizes, up to 2 MB or what takes SLOW_S; of two of them in 0.6 seconds at 200 mbit."""
    names = sorted(operations)
    calls, points = collective_calls(group, names, device), {name: [] for name in names}
    if "reduce_scatter" in calls:
        calls["reduce_scatter"] = partial(_reduce_scatter, group, device)
    for nbytes, count in SIZES.items():
        running = [name for name in calls if len(points[name]) < 2 or points[name][-1][1] < SLOW_S]
        if running:
            functions = [timed(calls[name](nbytes), device) for name in running]
            medians = repetitions(functions, group, device, count, warm_up=count > 1).median(0).values.tolist()
            for name, seconds in zip(running, medians, strict=True):
                points[name].append((nbytes, seconds))
    return Sampled(points)


def _reduce_scatter(group, device, nbytes):
    """torch's own, which frameworks call: on gloo it sends what an all-reduce does."""
    part = torch.zeros(-(-nbytes // (4 * group.size())), device=device)
    return partial(dist.reduce_scatter_tensor, part, part.repeat(group.size()), group=group)


@dataclass(frozen=True)
class Sampled:
    """Times of messages, straight lines between the measured sizes and beyond: what `Costs` needs of a `Fabric`.

    points: {operation: [(bytes, seconds)]}, ascending. Links that let bursts through make larger messages dearer per byte,
    so what is beyond goes on as between the last two.
    """

    points: dict[str, list[tuple[int, float]]]

    def time(self, operation: str, nbytes: int, ranks: int) -> float:
        """Seconds."""
        points = self.points[operation]
        if nbytes <= points[0][0]:
            return points[0][1]
        end = min(bisect_left(points, (nbytes,)), len(points) - 1)
        (small, before), (large, after) = points[end - 1], points[end]
        slope = (after - before) / (large - small)
        return after + (slope if nbytes <= large else max(0.0, slope)) * (nbytes - large)


def _selecting(numel, dtype, wish, device) -> float:
    generator = torch.Generator(device).manual_seed(0)  # a training's own is left alone
    gradients = {"numbers": torch.randn(numel, device=device, generator=generator).to(dtype)}
    reducer, unit = Reducer(None, wish.sparsifier), Unit(("numbers",), numel, max(1, int(wish.density * numel)))
    return _median(lambda: reducer.select(unit, gradients, 1.0), device)


def _handling(group, dtype, wish, device) -> float:
    """What a small sparse message takes, selecting for it and sending it included; median of seven, after one more."""
    reducer, unit = Reducer(group, wish.sparsifier, wish.wire), Unit(("numbers",), LEAST, SMALL)
    gradients = {"numbers": torch.ones(LEAST, dtype=dtype, device=device)}
    return _median(lambda: reducer.start([unit], gradients).wait(), device, 7)


def _adding(numel, k, device) -> float:
    places = (torch.arange(k, device=device) * (numel // k)).int()
    values, target = torch.ones(k, device=device), torch.zeros(numel, device=device)
    return _median(lambda: add_at([target], values, places), device)


def _copying(numel, device) -> float:
    source, target = torch.zeros(2, numel, device=device).unbind()
    return _median(lambda: target.copy_(source), device)


def _median(function, device, count=3) -> float:
    """Of so many times, after one more."""
    run = timed(function, device)
    run()
    return median(run() for _ in range(count))
