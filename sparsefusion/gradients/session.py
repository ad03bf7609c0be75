"""The training steps of one model: reduces its gradients by the active plan, and handles skipped steps.

An adapter calls `reduce` for each atom (gradients that its framework hands over together), waits for the returned handles,
and calls `end_step` when the step is over. Atoms arrive in the same order on all ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commfabric.collectives.counted import all_reduce
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
    """The base class of observers of a session's steps, such as a profiler or the trial of a plan. It does nothing."""

    def step_began(self, session: "Session") -> None:
        """Called before the first atom of a step."""

    def atom_arrived(self, names: Sequence[str]) -> None:
        """Called when the framework hands over an atom with the gradients of these parameters."""

    def dense_reduction_started(self) -> None:
        """Called when the framework has started its own reduction of the last atom.

        If the framework waits for the result, the means have been computed by then.
        """

    def step_ended(self, session: "Session") -> None:
        """Called when all means are in the gradients."""


class Session:
    """Reduces the gradients of one model, step by step. Every rank of `reducer.group` has a session.

    Args:
        reducer: Reduces gradients and holds residuals.
        sizes: {name: number of elements} of all gradients.
        device: The device of the gradients.
        can_wait_for_buffer: True if an atom may wait for the other atoms of its buffer; otherwise it is sent at once.
        loss_scale: Returns the scale of the gradients; None if they are not scaled.
        skips_nonfinite_steps: True if the training skips a step with non-finite gradients; otherwise that is an error.
        model_group: The ranks over which the model is divided, which skip steps together, or None.
        skipped_steps: Returns the number of steps that the training has skipped for any reason, equal on all ranks; or None.

    Attributes:
        plan: The active plan.
        step: The number of the current step.
        is_dense_step: Set by observers: True if all gradients of the current step are sent dense.
        density_ratio: Set by observers: the factor of every k of the plan in the current step.
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
        self._scale = 1.0  # the loss scale of the last step that needed it
        self.skips_nonfinite_steps = skips_nonfinite_steps
        reducer.feedback.can_roll_back = skips_nonfinite_steps or skipped_steps is not None
        self.density_ratio, self.is_dense_step = 1.0, False
        self.observers: list[StepObserver] = []
        self.step, self._has_begun = 0, False
        self._queue, self._skipped = (
            BufferQueue(reducer, self.sizes),
            SkippedSteps(reducer.feedback, skipped_steps or int),
        )
        self._reductions: list = []  # reductions of this step that are not in the queue
        self._may_have_residuals = False  # some rank may have residuals
        self._had_residuals = False  # this rank had residuals when the step began

    def reduce(
        self,
        gradients: Mapping[str, torch.Tensor],
        flat_buffers: Sequence[torch.Tensor],
        reduce_dense: Callable[[], Waitable | None],
        factor: float = 1.0,
    ) -> Waitable:
        """Start averaging the gradients of an atom over the ranks, in place.

        Args:
            gradients: {name: gradient}, flat and contiguous.
            flat_buffers: The flat tensors that consist of these gradients.
            reduce_dense: Starts the framework's own reduction, and returns its handle, or None if it is done.
            factor: The framework expects the mean times this factor.

        Raises:
            ValueError: A parameter had no gradient when the session was made.
        """
        if unknown := [name for name in gradients if name not in self.sizes]:
            raise ValueError(
                f"{unknown[0]!r} has a gradient now but had none when SparseFusion was attached: call detach() and attach() "
                "again"
            )
        self._begin()
        for observer in self.observers:
            observer.atom_arrived(tuple(gradients))
        if factor != 1 and (self._uses_buffers or self._uses_fp16):
            for flat in flat_buffers:
                flat.mul_(factor)
        if self._uses_buffers:
            if (repeated := self._queue.first_repeated(gradients)) is not None:
                self._restart_step(repeated)
            self._queue.add(gradients, wait_for_buffer=self.can_wait_for_buffer)
            return QueuedAtom(self._queue, tuple(gradients))
        reduction = self._reduce_dense(gradients, flat_buffers, reduce_dense, factor)
        self._reductions.append(reduction)
        return reduction

    def _reduce_dense(
        self,
        gradients: Mapping[str, torch.Tensor],
        flat_buffers: Sequence[torch.Tensor],
        reduce_dense: Callable[[], Waitable | None],
        factor: float,
    ) -> Waitable:
        """Start averaging all elements of an atom, with its residuals added, in float16 or by the framework."""
        scale = self._scale
        self.reducer.feedback.flush(gradients, scale if self._uses_fp16 else scale / factor)
        if self._uses_fp16:
            return self.reducer.start_fp16(gradients, flat_buffers)
        reduction = FrameworkReduction(reduce_dense(), gradients, is_checked=self._flushes_residuals)
        for observer in self.observers:
            observer.dense_reduction_started()
        return reduction

    def _restart_step(self, name: str) -> None:
        """Forget the gradients of a backward pass that an error ended. RuntimeError if some of them were sent."""
        if self._queue.has_sent:
            raise RuntimeError(
                f"the gradient of {name} arrived twice in step {self.step}: a backward pass failed after it had sent "
                "gradients, which are lost. Call detach() and attach() to start again"
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
        """True if this step may send residuals with dense gradients, so that its means must be checked."""
        return self._may_have_residuals and not self._uses_buffers

    def gradient_ready(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient that is ready before its atom; it is sent now if the plan sends it early."""
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
                raise ValueError(f"loss_scale() must return a number above 0, not {self._scale}")
        self._queue.begin(self.plan, self._scale, self.density_ratio)

    def finish_skipped_step(self) -> None:
        """If the last step was skipped, restore the residuals that it started with. RuntimeError if a step has begun."""
        if self._has_begun:
            raise RuntimeError(f"step {self.step} has begun: residuals are known only between steps")
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
        """After an error on all ranks, restore the residuals before the step; the next gradients start a new step."""
        self._clear()
        if self._has_begun:
            self._skipped.step_failed()
        self._has_begun = False

    def _clear(self) -> None:
        self._queue.clear()
        self._reductions = []

    def end_step(self) -> None:
        """End a step whose gradients have all been handed over: wait for their means.

        Raises:
            FloatingPointError: On every rank, if a mean is not finite and the training does not skip such steps.
            RuntimeError: The step had no gradients.
        """
        if not self._has_begun:
            raise RuntimeError(
                "a step ended without a gradient for SparseFusion: the framework has reduced them in another way"
            )
        if self._queue.unsent is not None:
            self._queue.send_incomplete()
        if self._queue.unsent is not None:
            raise RuntimeError(f"the plan does not contain {self._queue.unsent!r}: replan() makes a new plan")
        for reduction in self._all_reductions:
            reduction.wait()
        nonfinite_name = self._nonfinite_gradient()
        self._clear()
        self._has_begun = False
        self._skipped.step_ended(was_skipped=nonfinite_name is not None)
        self.step += 1
        for observer in [*self.observers]:
            observer.step_ended(self)
        if nonfinite_name and not self.skips_nonfinite_steps:
            raise FloatingPointError(
                f"step {self.step - 1}: the gradient of {nonfinite_name} is not finite on some rank. If the training "
                "uses a loss scale, pass SparseFusion(loss_scale=function); if it skips such steps without one, pass "
                "on_nonfinite='skip-known'"
            )

    @property
    def _all_reductions(self) -> list:
        return [*self._queue.reductions, *self._reductions]

    def _nonfinite_gradient(self) -> str | None:
        """The name of a gradient whose mean is not finite, "a parameter of another rank", or None if all are finite.

        All ranks get the same result. Means that the framework computed are checked only if residuals may have been added
        to them on any rank; some frameworks leave only a part of these means on each rank.
        """
        nonfinite_name, has_residuals = first_nonfinite(self._all_reductions), bool(self.reducer.feedback.residuals)
        had_residuals, follows_plan = self._had_residuals, self._uses_buffers or self._uses_fp16
        if not (follows_plan or self._flushes_residuals):
            return None
        magnitude = largest_mean(self._all_reductions) if self._uses_fp16 else 0.0
        for group in (self.reducer.group if self._flushes_residuals else None, self.model_group):
            if group is None:
                continue
            flags = [nonfinite_name is not None, has_residuals, had_residuals, magnitude]
            local = torch.tensor(flags, dtype=torch.float32, device=self.device)
            is_bad, has_residuals, had_residuals, magnitude = all_reduce(local, group, op=dist.ReduceOp.MAX).tolist()
            nonfinite_name = nonfinite_name or ("a parameter of another rank" if is_bad else None)
        if self._uses_fp16:
            self.reducer.fp16_scale.follow(magnitude, self._scale)
        if not (follows_plan or had_residuals):
            nonfinite_name = None
        if self._uses_buffers:
            self._may_have_residuals = True
        elif self._flushes_residuals and not nonfinite_name:  # a skipped step leaves the residuals unchanged
            self._may_have_residuals = bool(has_residuals)
        return nonfinite_name


class FrameworkReduction:
    """A pending reduction by the framework. is_checked: check its means for NaN and Inf."""

    def __init__(self, work: Waitable | None, gradients: Mapping[str, torch.Tensor], is_checked: bool = False):
        self._work, self.gradients, self._is_checked = work, gradients, is_checked
        self.maxima: list[torch.Tensor] = []  # the largest magnitude of each mean; filled by `wait`

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
    """The dtype that most elements of these tensors have."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        dtype = dtype_of(tensor)
        counts[dtype] = counts.get(dtype, 0) + tensor.numel()
    return max(counts, key=counts.__getitem__)
