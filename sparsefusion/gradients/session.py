"""The training steps of one model: reduces its gradients by the active plan, and handles steps that are skipped.

An adapter calls `reduce` for each atom (the gradients that its framework hands over together), waits for the returned
handles, and calls `end_step` when the step is over. Atoms arrive in the same order on all ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sparsefusion.collectives.counted import all_reduce
from sparsefusion.planning.plan import Plan

from .buffer_queue import BufferQueue
from .nonfinite import first_nonfinite, largest, largest_mean
from .reducer import Reducer
from .skipped_steps import SkippedSteps


class Waitable(Protocol):
    """A reduction in progress."""

    def wait(self) -> None:
        """Block until the means are in the gradients."""


class StepObserver:
    """Is told of the steps of a session, as a profiler or the trial of a plan must be. This base class does nothing."""

    def step_began(self, session: "Session") -> None:
        """Called before the first atom of a step."""

    def atom_arrived(self, names: Sequence[str]) -> None:
        """Called when the framework hands over an atom with the gradients of these parameters."""

    def dense_reduction_started(self) -> None:
        """Called when the framework has started its own reduction of the last atom.

        If the framework waits for the result, the means are already there.
        """

    def step_ended(self, session: "Session") -> None:
        """Called when all means are in the gradients."""


class Session:
    """Reduces the gradients of one model, step by step. Every rank of `reducer.group` has one.

    reducer: reduces gradients and holds residuals.
    sizes: {name: number of elements} of all gradients.
    can_wait_for_buffer: an atom may wait for the other atoms of its buffer; otherwise each is sent when it arrives.
    loss_scale: returns the scale of the gradients, or None if they are not scaled.
    skips_nonfinite_steps: the training skips a step whose gradients are not finite; otherwise that is an error.
    model_group: the ranks over which the model is divided, which skip steps together, or None.
    skipped_steps: returns how many steps the training has skipped, for any reason, the same on all ranks, or None.

    Attributes: plan, the active plan. is_dense_step, density_ratio: set by observers for the current step; all gradients
    are sent dense, or every k of the plan is multiplied. step, the number of the current step.
    """

    plan: Plan

    def __init__(
        self,
        reducer: Reducer,
        sizes: Mapping[str, int],
        device: torch.device | str,
        can_wait_for_buffer: bool,
        loss_scale: Callable[[], float] | None = None,
        skips_nonfinite_steps: bool = False,
        model_group: ProcessGroup | None = None,
        skipped_steps: Callable[[], int] | None = None,
    ):
        self.reducer, self.sizes, self.device = reducer, dict(sizes), torch.device(device)
        self.can_wait_for_buffer, self.loss_scale, self.model_group = can_wait_for_buffer, loss_scale, model_group
        self._scale = 1.0  # of the last step that needed it
        self.skips_nonfinite_steps = skips_nonfinite_steps
        reducer.feedback.can_roll_back = skips_nonfinite_steps or skipped_steps is not None
        self.density_ratio, self.is_dense_step = 1.0, False
        self.observers: list[StepObserver] = []
        self.step, self._has_begun = 0, False
        self._queue, self._skipped = (
            BufferQueue(reducer, self.sizes),
            SkippedSteps(reducer.feedback, skipped_steps or int),
        )
        self._reductions: list = []  # of this step, beside those of the queue
        self._may_have_residuals = False  # some rank may have residuals
        self._had_residuals = False  # this rank had residuals when the step began

    def reduce(
        self,
        gradients: Mapping[str, torch.Tensor],
        flats: Sequence[torch.Tensor],
        reduce_dense: Callable[[], Waitable | None],
        factor: float = 1.0,
    ) -> Waitable:
        """Start averaging the gradients of an atom over the ranks, in place.

        gradients: {name: gradient}, flat and contiguous. flats: the tensors of which the gradients are parts; together
        the gradients are all of them. reduce_dense: starts the framework's own reduction, and returns what to wait for,
        or None. factor: the framework expects the mean times this. ValueError: a gradient of a parameter that had none
        when the session was made.
        """
        if unknown := [name for name in gradients if name not in self.sizes]:
            raise ValueError(
                f"a gradient of {unknown[0]!r}, which had none when SparseFusion was attached: detach() and attach another"
            )
        self._begin()
        for observer in self.observers:
            observer.atom_arrived(tuple(gradients))
        if factor != 1 and (self._uses_buffers or self._uses_fp16):
            for flat in flats:
                flat.mul_(factor)
        if self._uses_buffers:
            if (repeated := self._queue.first_repeated(gradients)) is not None:
                self._restart_step(repeated)
            self._queue.add(gradients, wait_for_buffer=self.can_wait_for_buffer)
            return QueuedAtom(self._queue, tuple(gradients))
        reduction = self._reduce_dense(gradients, flats, reduce_dense, factor)
        self._reductions.append(reduction)
        return reduction

    def _reduce_dense(
        self,
        gradients: Mapping[str, torch.Tensor],
        flats: Sequence[torch.Tensor],
        reduce_dense: Callable[[], Waitable | None],
        factor: float,
    ) -> Waitable:
        """Start averaging all elements of an atom, with its residuals added, in float16 or by the framework."""
        scale = self._scale
        self.reducer.feedback.flush(gradients, scale if self._uses_fp16 else scale / factor)
        if self._uses_fp16:
            return self.reducer.start_fp16(gradients, flats)
        reduction = FrameworkReduction(reduce_dense(), gradients, is_checked=self._flushes_residuals)
        for observer in self.observers:
            observer.dense_reduction_started()
        return reduction

    def _restart_step(self, name: str) -> None:
        """An error ended a backward pass, and this gradient is from another. RuntimeError: some gradients were sent."""
        if self._queue.has_sent:
            raise RuntimeError(
                f"the gradient of {name} comes again in step {self.step}: a backward pass ended in the middle, and what it "
                "had sent is lost. detach() and attach() begin anew"
            )
        self._queue.clear()

    @property
    def _uses_buffers(self) -> bool:
        """True if this step sends the buffers of the plan."""
        return bool(self.plan.buffers) and self._follows_plan

    @property
    def _uses_fp16(self) -> bool:
        """True if this step sends all elements in float16."""
        return self.plan.mode == "fp16" and self._follows_plan

    @property
    def _follows_plan(self) -> bool:
        """True if this step follows the plan; otherwise the framework reduces everything itself."""
        return not self.is_dense_step

    @property
    def _flushes_residuals(self) -> bool:
        """True if residuals may be sent in this step with dense gradients, so that the result must be checked."""
        return self._may_have_residuals and not self._uses_buffers

    def gradient_ready(self, name: str, gradient: torch.Tensor) -> None:
        """A gradient is ready, and its atom is not: it is sent now if the plan sends it early."""
        self._begin()
        if self.plan.mode == "interleaved" and self._uses_buffers:
            if self._queue.first_repeated([name], early=True) is not None:
                self._restart_step(name)
            self._queue.add_early(name, gradient)

    def _begin(self) -> None:
        if self._has_begun:
            return
        self.finish_skipped_step()
        self.reducer.feedback.begin_step(self.step)
        self._has_begun, self._had_residuals = True, bool(self.reducer.feedback.residuals)
        for observer in [*self.observers]:
            observer.step_began(self)
        if self._uses_buffers or self._uses_fp16 or (self._flushes_residuals and self._had_residuals):
            self._scale = 1.0 if self.loss_scale is None else float(self.loss_scale())
            if not self._scale > 0:
                raise ValueError(f"loss_scale() returned {self._scale}, which is not above 0")
        self._queue.begin(self.plan, self._scale, self.density_ratio)

    def finish_skipped_step(self) -> None:
        """If the last step was skipped, restore its residuals now. RuntimeError: a step has begun."""
        if self._has_begun:
            raise RuntimeError(f"step {self.step} has begun: residuals are known only when it has ended")
        if self._skipped.roll_back():
            self._may_have_residuals = True

    def restore(self, step: int, residuals: Mapping[str, torch.Tensor], fp16_scale: float = 1.0) -> None:
        """Continue with step number `step` and these residuals, from a checkpoint."""
        self.abandon_step()
        self._skipped.forget()
        self.step, self._may_have_residuals = step, True
        self.reducer.feedback.begin_step(step)
        self.reducer.feedback.residuals, self.reducer.fp16_scale.value = dict(residuals), fp16_scale

    def abandon_step(self) -> None:
        """An error ended the step on all ranks: restore its residuals, and let the next gradients start a new step."""
        self._clear()
        if self._has_begun:
            self._skipped.step_failed()
        self._has_begun = False

    def _clear(self) -> None:
        self._queue.clear()
        self._reductions = []

    def end_step(self) -> None:
        """All gradients of the step have been handed over: wait for their means.

        FloatingPointError on every rank: a mean is not finite, and the training does not skip such steps. RuntimeError: the
        step had no gradients.
        """
        if not self._has_begun:
            raise RuntimeError(
                "a step ended without a gradient for SparseFusion: this framework reduces them elsewhere"
            )
        if self._queue.unsent is not None:
            self._queue.send_incomplete()
        if self._queue.unsent is not None:
            raise RuntimeError(f"the plan has no {self._queue.unsent!r}: replan() makes one that does")
        for reduction in self._all_reductions:
            reduction.wait()
        nonfinite = self._nonfinite_gradient()
        self._clear()
        self._has_begun = False
        self._skipped.step_ended(was_skipped=nonfinite is not None)
        self.step += 1
        for observer in [*self.observers]:
            observer.step_ended(self)
        if nonfinite and not self.skips_nonfinite_steps:
            raise FloatingPointError(
                f"step {self.step - 1}: the gradient of {nonfinite} is not finite on some rank. With a loss scale, give "
                "SparseFusion(loss_scale=...) the function that returns it; on_nonfinite='skip-known' if such steps are "
                "skipped without one"
            )

    @property
    def _all_reductions(self) -> list:
        return [*self._queue.reductions, *self._reductions]

    def _nonfinite_gradient(self) -> str | None:
        """The name of a gradient whose mean is not finite, or "a parameter of another rank"; None: all are finite.

        All ranks come to the same verdict. Means that the framework computed count only if residuals may have been
        added to them on any rank; some frameworks leave only a part of these means on each rank.
        """
        nonfinite, has_residuals = first_nonfinite(self._all_reductions), bool(self.reducer.feedback.residuals)
        had_residuals, is_ours = self._had_residuals, self._uses_buffers or self._uses_fp16
        if not (is_ours or self._flushes_residuals):
            return None
        largest_seen = largest_mean(self._all_reductions) if self._uses_fp16 else 0.0
        for group in (self.reducer.group if self._flushes_residuals else None, self.model_group):
            if group is None:
                continue
            seen = [nonfinite is not None, has_residuals, had_residuals, largest_seen]
            local = torch.tensor(seen, dtype=torch.float32, device=self.device)
            is_bad, has_residuals, had_residuals, largest_seen = all_reduce(local, group, op=dist.ReduceOp.MAX).tolist()
            nonfinite = nonfinite or ("a parameter of another rank" if is_bad else None)
        if self._uses_fp16:
            self.reducer.fp16_scale.follow(largest_seen, self._scale)
        if not (is_ours or had_residuals):
            nonfinite = None
        if self._uses_buffers:
            self._may_have_residuals = True
        elif self._flushes_residuals and not nonfinite:  # otherwise residuals are as they were before the step
            self._may_have_residuals = bool(has_residuals)
        return nonfinite


class FrameworkReduction:
    """A reduction by the framework in progress. is_checked: whether its means are examined for NaN and Inf."""

    def __init__(self, work: Waitable | None, gradients: Mapping[str, torch.Tensor], is_checked: bool = False):
        self._work, self.gradients, self._is_checked = work, gradients, is_checked
        self.maxima: list[torch.Tensor] = []  # once waited for: the largest magnitude of each mean

    def wait(self) -> None:
        """Block until the means are in the gradients."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._is_checked:
            self._is_checked, self.maxima = False, [largest(gradient) for gradient in self.gradients.values()]


class QueuedAtom:
    """An atom whose gradients are sent with the buffers of the plan."""

    def __init__(self, queue: BufferQueue, names: Sequence[str]):
        self._queue, self._names = queue, names

    def wait(self) -> None:
        """Block until the means of the atom are in its gradients."""
        self._queue.wait(self._names)


def most_common_dtype(
    tensors: Iterable[torch.Tensor], dtype_of: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
) -> torch.dtype:
    """The dtype of most elements of these tensors."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        dtype = dtype_of(tensor)
        counts[dtype] = counts.get(dtype, 0) + tensor.numel()
    return max(counts, key=counts.__getitem__)
