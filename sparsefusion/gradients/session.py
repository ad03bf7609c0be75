"""One target's steps: what arrives from its framework, which plan is in force, what becomes of a step that must be skipped.

An adapter hands over gradients in atoms (`reduce`), as its framework has them ready, waits for the handles, and says when a
step is over (`end_step`). Atoms come in the same order on all ranks.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter

import torch
import torch.distributed as dist

from sparsefusion.collectives.counted import all_reduce
from sparsefusion.planning.plan import Buffer, Plan

from .nonfinite import first_not_finite, largest, largest_mean
from .reducer import Reducer


class Session:
    """reducer: what reduces, and holds residuals. sizes: {name: numel} of all gradients. plan: in force.

    holds: atoms may wait for others of their buffer; else each is sent when it comes. loss_scale: a function that returns
    the scale of the gradients, or None. skips: a step that is not finite is skipped by the training; else it is an error.
    model_group: the ranks over which the model is divided, which skip a step together; or None. skipped_steps: a function
    that counts those that the training has skipped, for whatever reason, alike on all ranks; or None.
    """

    plan: Plan

    def __init__(
        self, reducer: Reducer, sizes: Mapping[str, int], device, holds, loss_scale=None, skips=False, model_group=None,
        skipped_steps=None,
    ):  # fmt: skip
        self.reducer, self.sizes, self.device = reducer, dict(sizes), torch.device(device)
        self.holds, self.loss_scale, self.skips, self.model_group = holds, loss_scale, skips, model_group
        self.skipped_steps = skipped_steps or int  # int() is 0
        self._counted = self.skipped_steps()  # when the last step ended
        reducer.keeps = skips or skipped_steps is not None
        self.unproved = None  # called when the next step ends, to compare ranks; until then all is sent whole
        self._owes = False  # whether residuals may be left on some rank
        self.density_ratio, self.sends_all = 1.0, False  # of this step: of its k; whether all is sent whole
        self.step, self._begun, self._skipped, self._scale = 0, False, False, 1.0
        self._pending = False  # whether this rank had residuals when the step began
        self.watchers = []  # told of steps that begin and end, and of atoms that arrive
        self._clear()

    def _clear(self):
        self._handed, self._arrived, self._early, self._launched, self._next = set(), {}, {}, {}, 0
        self._reductions = []

    def reduce(self, gradients: Mapping[str, torch.Tensor], flats, whole: Callable, factor: float = 1.0) -> "Handle":
        """Start reducing an atom's gradients, flat and contiguous, to their means over all ranks, in place.

        flats: the tensors they are parts of, of which they are all. whole: starts the framework's own reduction of it and
        returns what to wait for, or None. factor: what the framework wants a mean to be multiplied by. ValueError: one of
        a parameter that had no gradients when this began.
        """
        if unknown := [name for name in gradients if name not in self.sizes]:
            raise ValueError(
                f"a gradient of {unknown[0]!r}, which had none when SparseFusion was attached: detach() and attach another"
            )
        self._begin()
        for watcher in self.watchers:
            watcher.arrived(tuple(gradients))
        if factor != 1 and (self._sparse or self._half):
            for flat in flats:
                flat.mul_(factor)
        if self._sparse:
            if twice := next((name for name in gradients if name in self._handed), None):
                self._begin_again(twice)
            self._handed.update(gradients)
            self._arrived.update((name, g) for name, g in gradients.items() if name not in self._launched)
            self._launch(complete=self.holds)
            self._launch_early()
            return Handle(self, tuple(gradients))
        self.reducer.flush(gradients, self._scale if self._half else self._scale / factor)
        if self._half:
            reduction = self.reducer.start_fp16(gradients, flats)
        else:
            reduction = WholeReduction(whole(), gradients, checks=self._flushes)
            for watcher in self.watchers:
                watcher.left()
        self._reductions.append(reduction)
        return reduction

    def _begin_again(self, name) -> None:
        """A backward ended in the middle, and this gradient is another one's. RuntimeError: some of it was sent."""
        if self._launched:
            raise RuntimeError(
                f"the gradient of {name} comes again in step {self.step}: a backward ended in the middle, and what it had "
                "sent is lost. detach() and attach() begin anew"
            )
        self._clear()

    @property
    def _sparse(self) -> bool:
        """Whether this step has buffers of the plan."""
        return bool(self.plan.buffers) and self._by_plan

    @property
    def _half(self) -> bool:
        """Whether this step's atoms are sent whole, in float16."""
        return self.plan.mode == "fp16" and self._by_plan

    @property
    def _by_plan(self) -> bool:
        """Whether this step is the plan's; else all is sent as the framework does."""
        return not (self.sends_all or self.unproved)

    @property
    def _flushes(self) -> bool:
        """Whether residuals may go in this step, which must not be lost unnoticed."""
        return self._owes and not self._sparse

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        """A gradient is there whose atom is not: what the plan sends early may leave."""
        self._begin()
        if self.plan.mode == "interleaved" and self._sparse:
            if name in self._early:
                self._begin_again(name)
            self._early[name] = gradient
            self._launch_early()

    def _begin(self):
        if self._begun:
            return
        self.settle()
        self.reducer.begin_step(self.step)
        self._begun, self._pending = True, bool(self.reducer.residuals)
        self._scale = float(self.loss_scale()) if self.loss_scale else 1.0
        for watcher in [*self.watchers]:
            watcher.step_began(self)

    def prove(self) -> None:
        """ValueError on every rank: they differ. Only where all parts of a divided model are at the same place."""
        if self.unproved:
            self.unproved()
            self.unproved = None

    def _launch(self, complete: bool) -> None:
        """Send what has arrived, in the order of the plan; complete: until the first buffer that lacks something."""
        while self._next < len(self.plan.buffers):
            buffer = self.plan.buffers[self._next]
            missing = any(name not in self._arrived and name not in self._launched for name in buffer.names)
            if missing and complete:
                return
            self._start(unit for unit in buffer.units if unit.early)  # unless it has left: always a message of its own
            self._start(unit for unit in buffer.units if not unit.early)
            if missing and not self._arrived:
                return
            self._next += 1

    def _launch_early(self) -> None:
        """What the buffer that is next sends early, if all of it is there."""
        if self._next == len(self.plan.buffers):
            return
        units = [unit for unit in self.plan.buffers[self._next].units if unit.early]
        names = [name for unit in units for name in unit.names]
        if names and all(name in self._early and name not in self._launched for name in names):
            self._arrived |= {name: self._early[name] for name in names}
            self._start(units)

    def _start(self, units) -> None:
        """Send what has arrived of these."""
        units = tuple(units)
        sizes = {name: self.sizes[name] for unit in units for name in unit.names if name in self._arrived}
        if not sizes:
            return
        units = [unit.at(self.density_ratio) for unit in Buffer(units).of(sizes).units]
        gradients = {name: self._arrived.pop(name) for name in sizes}
        reduction = self.reducer.start(units, gradients, self._scale, self.plan.mode == "interleaved")
        self._launched |= dict.fromkeys(sizes, reduction)
        self._reductions.append(reduction)

    def settle(self) -> None:
        """Between steps: if the last one is known to be skipped, residuals go back now. RuntimeError: a step has begun."""
        if self._begun:
            raise RuntimeError(f"step {self.step} has begun: what is pending is known only when it has ended")
        before, self._counted = self._counted, self.skipped_steps()
        if self._skipped or self._counted > before:
            self.reducer.roll_back()
        self._skipped, self._owes = False, self._owes or self._counted > before

    def restore(self, step: int, residuals: Mapping[str, torch.Tensor], half_scale=1.0) -> None:
        """Go on with the step of that number."""
        self.abandon()
        self.step, self._skipped, self._owes = step, False, True
        self.reducer.begin_step(step)
        self.reducer.residuals, self.reducer.half_scale.value = dict(residuals), half_scale

    def abandon(self) -> None:
        """An error ended the step that has begun, on all ranks; the next gradients are of another one.

        Residuals that had gone with it come back.
        """
        self._clear()
        self._begun, self._skipped = False, self._skipped or self._begun

    def wait(self, names) -> None:
        """Block until the means of these are in their gradients."""
        if any(name in self._arrived for name in names):
            self._launch_rest()
        for reduction in dict.fromkeys(self._launched[name] for name in names):
            reduction.wait()

    def _launch_rest(self):
        """What has arrived of buffers that lack something."""
        self._next = 0
        self._launch(complete=False)

    def end_step(self) -> None:
        """All gradients are reduced. FloatingPointError on every rank: a mean is not finite, and such steps are not skipped.

        RuntimeError: there were no gradients.
        """
        if not self._begun:
            raise RuntimeError(
                "a step ended without a gradient for SparseFusion: this framework reduces them elsewhere"
            )
        if self._arrived:
            self._launch_rest()
        if self._arrived:
            raise RuntimeError(f"the plan has no {next(iter(self._arrived))!r}: replan() makes one that does")
        for reduction in self._reductions:
            reduction.wait()
        wrong = self._verdict()
        self._clear()
        self._begun, self._skipped, self._counted = False, wrong is not None, self.skipped_steps()
        self.step += 1
        self.prove()
        for watcher in [*self.watchers]:
            watcher.step_ended(self)
        if wrong and not self.skips:
            raise FloatingPointError(
                f"step {self.step - 1}: the gradient of {wrong} is not finite on some rank. With a loss scale, give "
                "SparseFusion(loss_scale=...) the function that returns it; on_nonfinite='skip-known' if such steps are "
                "skipped without one"
            )

    def _verdict(self) -> str | None:
        """The name of a gradient whose mean is not finite, or that there is one; the same verdict on all ranks.

        What a framework has reduced counts if residuals may have gone with it, of any rank; of some frameworks a rank has
        only a part of that.
        """
        wrong, left, pending = first_not_finite(self._reductions), bool(self.reducer.residuals), self._pending
        ours = self._sparse or self._half
        if not (ours or self._flushes):
            return None
        most = largest_mean(self._reductions) if self._half else 0.0
        groups = (self.reducer.group if self._flushes else None, self.model_group)
        for group in (group for group in groups if group is not None):
            seen = torch.tensor([wrong is not None, left, pending, most], dtype=torch.float32, device=self.device)
            bad, left, pending, most = all_reduce(seen, group, op=dist.ReduceOp.MAX).tolist()
            wrong = wrong or ("a parameter of another rank" if bad else None)
        if self._half:
            self.reducer.half_scale.follow(most, self._scale)
        if not (ours or pending):
            wrong = None
        if self._sparse:
            self._owes = True
        elif self._flushes and not wrong:  # else all is as it was before
            self._owes = left
        return wrong


class Watcher:
    """What is told of a session's steps; here, of nothing that it would do anything about."""

    def step_began(self, session) -> None:
        """Before the first atom."""

    def arrived(self, names) -> None:
        """An atom came, of these gradients."""

    def left(self) -> None:
        """The atom that came last was given to its framework's own reduction; if that waits, its means are there."""

    def step_ended(self, session) -> None:
        """All means are there."""


class WholeReduction:
    """A framework's own reduction under way. work: what to wait for, or None. checks: whether it is looked at."""

    def __init__(self, work, gradients, checks=False):
        self._work, self.gradients, self._checks, self.marks = work, gradients, checks, []

    def wait(self) -> None:
        """Block until the means are there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._checks:
            self._checks, self.marks = False, [largest(gradient) for gradient in self.gradients.values()]


class Handle:
    """An atom under way, sent with its buffers."""

    def __init__(self, session: Session, names):
        self._session, self._names = session, names

    def wait(self) -> None:
        """Block until its means are in its gradients."""
        self._session.wait(self._names)


def usual_dtype(tensors, dtype_of=attrgetter("dtype")) -> torch.dtype:
    """That of most numbers of these."""
    numbers = {}
    for tensor in tensors:
        dtype = dtype_of(tensor)
        numbers[dtype] = numbers.get(dtype, 0) + tensor.numel()
    return max(numbers, key=numbers.get)
