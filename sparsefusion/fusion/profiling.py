"""Profiles dense steps to measure when each gradient is ready, and passes the timeline to the planner.

Times are means over the ranks, so that all ranks make the same plan.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sparsefusion.gradients.session import Session, StepObserver
from sparsefusion.planning.timeline import Tensor, Timeline

from .cost_measurement import mean_over_ranks

PROFILED = 4  # profiled steps, after a first step in which frameworks rebuild their buckets


class Clock:
    """Records times on the host, or events on the CUDA stream, and measures the seconds between them."""

    def __init__(self, device: torch.device | str):
        self._is_cuda = torch.device(device).type == "cuda"

    def mark(self) -> float | torch.cuda.Event:
        """Record the current time, or the current end of the stream."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks. On CUDA it synchronizes the end."""
        if not self._is_cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class Profiler(StepObserver):
    """Observes 1 + PROFILED steps of a session, and then calls `done` with their timeline.

    Args:
        parameters: {name: parameter} of all gradients.
        group: The ranks that average gradients.
        itemsize: Bytes of an element of a gradient.
        sent_itemsize: Bytes of an element in the framework's own messages.
        copied: The names of parameters of which several ranks of a divided model hold copies.
        sends_before_first_atom: Gradients may be sent before the framework has handed over the first atom.
        done: Called with the timeline.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        group: ProcessGroup,
        itemsize: int,
        sent_itemsize: int,
        copied: Collection[str],
        sends_before_first_atom: bool,
        done: Callable[[Timeline], None],
    ):
        self._parameters, self._group, self._done = parameters, group, done
        self._itemsize, self._sent_itemsize = itemsize, sent_itemsize
        self._copied, self._sends_before_first_atom = copied, sends_before_first_atom
        self._clock = Clock(next(iter(parameters.values())).device)
        self._ready_marks, self._waits, self._atoms, self._steps = {}, [], [], []
        self._ended: float | torch.cuda.Event | None = None
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._ready_hook(name))
            for name, p in parameters.items()
            if p.requires_grad
        ]

    def _ready_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def note_ready(_):
            self._ready_marks[name] = self._clock.mark()

        return note_ready

    def atom_arrived(self, names: Sequence[str]) -> None:
        """Record the time. It is also the time at which gradients of unused parameters are ready."""
        mark = self._clock.mark()
        self._atoms.append(names)
        self._waits.append([mark, mark])
        for name in names:
            self._ready_marks.setdefault(name, mark)

    def dense_reduction_started(self) -> None:
        """Record the time until which the framework has waited, if it waits."""
        self._waits[-1][1] = self._clock.mark()

    def step_ended(self, session: Session) -> None:
        """Keep the times of this step; after the last step, call `done`."""
        ended = self._clock.mark()
        if self._ended is not None:
            since = partial(self._clock.seconds, self._ended)
            waits = [] if session.can_wait_for_buffer else [(since(came), since(left)) for came, left in self._waits]
            ready = {name: subtract_waits(since(mark), waits) for name, mark in self._ready_marks.items()}
            if not self._sends_before_first_atom:
                first = since(self._waits[0][0])
                ready = {name: max(first, seconds) for name, seconds in ready.items()}
            self._steps.append((ready, since(ended), self._atoms))
        self._ended, self._ready_marks, self._waits, self._atoms = self._clock.mark(), {}, [], []
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
        names, atoms = list(self._parameters), [list(atom) for atom in self._steps[-1][2]]
        arrived = {name for atom in atoms for name in atom}
        atoms[-1] += [name for name in names if name not in arrived]
        local = [median_low(ready.get(name, max(ready.values())) for ready, _, _ in self._steps) for name in names]
        local.append(median_low(step for _, step, _ in self._steps))
        *ready, step = mean_over_ranks(local, self._group, next(iter(self._parameters.values())).device)
        parameters = [self._parameters[name] for name in names]
        tensors = [
            Tensor(name, p.numel(), p.dim(), at, name in self._copied)
            for name, p, at in zip(names, parameters, ready, strict=True)
        ]
        order = sorted(tensors, key=lambda tensor: tensor.ready)
        return Timeline(tuple(order), tuple(map(tuple, atoms)), self._itemsize, self._sent_itemsize, step, waits)


def subtract_waits(seconds: float, waits: Sequence[tuple[float, float]]) -> float:
    """The time `seconds` without the framework's waits before it. waits: pairs (start, end)."""
    return seconds - sum(end - start for start, end in waits if end <= seconds)
