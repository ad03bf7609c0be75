"""Profiles dense steps to measure when each gradient is ready, and passes the timeline to the planner.

Times are means over the ranks, so that all ranks make the same plan.
"""

import time
from collections.abc import Callable, Collection, Sequence
from statistics import median_low
from typing import Any

import torch

from sparsefusion.adapters.adapter import Adapter
from sparsefusion.gradients.session import Session, StepObserver
from sparsefusion.planning.timeline import Tensor, Timeline

from .cost_measurement import mean_over_ranks

PROFILED = 4  # profiled steps, after a first step in which frameworks rebuild their buckets


class Profiler(StepObserver):
    """Observes 1 + PROFILED steps of a session, and then calls `done` with their timeline.

    copied: the names of parameters of which several ranks of a divided model hold copies.
    """

    def __init__(self, adapter: Adapter, copied: Collection[str], done: Callable[[Timeline], None]):
        self._adapter, self._copied, self._done = adapter, copied, done
        self._device = next(iter(adapter.parameters.values())).device
        self._ready_marks, self._waits, self._atoms, self._steps = {}, [], [], []
        self._ended: Any = None  # a mark
        trained = {name: p for name, p in adapter.parameters.items() if p.requires_grad}
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready_hook(name)) for name, p in trained.items()]

    def _ready_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def note_ready(_):
            self._ready_marks[name] = self._mark()

        return note_ready

    def _mark(self) -> float | torch.cuda.Event:
        """The current time, or on CUDA an event at the current end of the stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_last_step(self, mark: Any) -> float:
        """Seconds from the end of the last step to a mark. On CUDA it synchronizes the mark."""
        if self._device.type != "cuda":
            return mark - self._ended
        mark.synchronize()
        return self._ended.elapsed_time(mark) / 1e3

    def atom_arrived(self, names: Sequence[str]) -> None:
        """Record the time. It is also the time at which gradients of unused parameters are ready."""
        mark = self._mark()
        self._atoms.append(names)
        self._waits.append([mark, mark])
        for name in names:
            self._ready_marks.setdefault(name, mark)

    def dense_reduction_started(self) -> None:
        """Record the time until which the framework has waited, if it waits."""
        self._waits[-1][1] = self._mark()

    def step_ended(self, session: Session) -> None:
        """Keep the times of this step; after the last step, call `done`."""
        ended, since = self._mark(), self._since_last_step
        if self._ended is not None:
            waits = [] if session.can_wait_for_buffer else [(since(came), since(left)) for came, left in self._waits]
            ready = {name: subtract_waits(since(mark), waits) for name, mark in self._ready_marks.items()}
            if not self._adapter.sends_before_first_atom:
                first = since(self._waits[0][0])
                ready = {name: max(first, seconds) for name, seconds in ready.items()}
            self._steps.append((ready, since(ended), self._atoms))
        self._ended, self._ready_marks, self._waits, self._atoms = self._mark(), {}, [], []
        if len(self._steps) >= PROFILED:
            self.stop(session)
            self._done(self._timeline(waits=not session.can_wait_for_buffer))

    def stop(self, session: Session) -> None:
        """Observe no further steps."""
        for hook in self._hooks:
            hook.remove()
        session.observers.remove(self)

    def _timeline(self, waits: bool) -> Timeline:
        """The medians of the steps, averaged over the ranks, and the atoms of the last step.

        A gradient that was never handed over counts as the last one. The lower of two medians is used, because
        disturbances make steps longer.
        """
        adapter, atoms = self._adapter, [list(atom) for atom in self._steps[-1][2]]
        arrived = {name for atom in atoms for name in atom}
        atoms[-1] += [name for name in adapter.parameters if name not in arrived]
        local = [
            median_low(ready.get(name, max(ready.values())) for ready, _, _ in self._steps)
            for name in adapter.parameters
        ]
        local.append(median_low(step for _, step, _ in self._steps))
        *ready, step = mean_over_ranks(local, adapter.group, self._device)
        tensors = [
            Tensor(name, p.numel(), p.dim(), at, name in self._copied)
            for (name, p), at in zip(adapter.parameters.items(), ready, strict=True)
        ]
        order = sorted(tensors, key=lambda tensor: tensor.ready)
        sizes = adapter.dtype.itemsize, adapter.sent_itemsize
        return Timeline(tuple(order), tuple(map(tuple, atoms)), *sizes, step, waits)


def subtract_waits(seconds: float, waits: Sequence[tuple[float, float]]) -> float:
    """The time `seconds` without the framework's waits before it. waits: pairs (start, end)."""
    return seconds - sum(end - start for start, end in waits if end <= seconds)
