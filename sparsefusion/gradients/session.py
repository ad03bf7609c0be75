"""The training steps of one model: reduces its gradients by the active plan, and handles skipped steps.

An adapter calls `reduce` for each atom (gradients that its framework hands over together), waits for the returned handles,
and calls `end_step` when the step is over. Atoms arrive in the same order on all ranks.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commfabric.collectives.counted import all_reduce
from sparsefusion.planning.plan import Buffer, Plan, Unit

from .half_precision import largest
from .reducer import Reducer, Reduction


class Waitable(Protocol):
    """A reduction in progress."""

    def wait(self) -> object:
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

    A buffer of the plan whose gradients are complete is sent after all buffers before it, so every rank starts the same
    messages in the same order. Units that the plan marks as early may be sent before their buffer is complete.

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
        self.skips_nonfinite_steps = skips_nonfinite_steps
        reducer.feedback.can_roll_back = skips_nonfinite_steps or skipped_steps is not None
        self.density_ratio, self.is_dense_step = 1.0, False
        self.observers: list[StepObserver] = []
        self.step, self._has_begun = 0, False
        self._scale = 1.0  # the loss scale of the last step that needed it
        self._count_skipped = skipped_steps or int
        self._was_skipped, self._skipped = False, self._count_skipped()  # of the last step; of all steps until its end
        self._may_have_residuals = False  # some rank may have residuals
        self._had_residuals = False  # this rank had residuals when the step began
        self._buffers: tuple[Buffer, ...] = ()  # of this step
        self._clear()

    def _clear(self) -> None:
        """Forget the gradients and the messages of the step."""
        self._handed_over: set[str] = set()  # names of gradients that the framework handed over in atoms
        self._arrived: dict[str, torch.Tensor] = {}  # gradients that are not sent yet
        self._early: dict[str, torch.Tensor] = {}  # gradients that were ready before their atom was handed over
        self._started: dict[str, Reduction] = {}  # {name of a gradient: its reduction}
        self._next = 0  # the number of the first buffer that has not been sent
        self._reductions: list = []

    @property
    def _uses_buffers(self) -> bool:
        """True if this step sends the buffers of the plan."""
        return bool(self.plan.buffers) and not self.is_dense_step

    @property
    def _uses_fp16(self) -> bool:
        """True if this step sends all elements in float16."""
        return self.plan.mode == "fp16" and not self.is_dense_step

    @property
    def _flushes_residuals(self) -> bool:
        """True if this step may send residuals with dense gradients, so that its means must be checked."""
        return self._may_have_residuals and not self._uses_buffers

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
            self._add(gradients)
            return Pending(partial(self._wait_for, tuple(gradients)))
        self.reducer.feedback.flush(gradients, self._scale if self._uses_fp16 else self._scale / factor)
        if self._uses_fp16:
            self._reductions.append(self.reducer.start_fp16(gradients, flat_buffers))
        else:
            self._reductions.append(FrameworkReduction(reduce_dense(), gradients, self._flushes_residuals))
            for observer in self.observers:
                observer.dense_reduction_started()
        return self._reductions[-1]

    def gradient_ready(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient that is ready before its atom; it is sent now if the plan sends it early."""
        self._begin()
        if self.plan.mode == "interleaved" and self._uses_buffers:
            self._restart_if_repeated([name], self._early)
            self._early[name] = gradient
            self._send_early()

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
        self._buffers = self.plan.buffers

    def _restart_if_repeated(self, names: Iterable[str], known: Iterable[str]) -> None:
        """Forget the gradients of a backward pass that an error ended. RuntimeError if some of them were sent."""
        repeated = next((name for name in names if name in known), None)
        if repeated is not None and self._started:
            raise RuntimeError(
                f"the gradient of {repeated} arrived twice in step {self.step}: a backward pass failed after it had sent "
                "gradients, which are lost. Call detach() and attach() to start again"
            )
        if repeated is not None:
            self._clear()

    # The messages of the plan's buffers

    def _add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add the gradients of an atom, and send what is complete, or all of them if they cannot wait for their buffer."""
        self._restart_if_repeated(gradients, self._handed_over)
        self._handed_over.update(gradients)
        for name, gradient in gradients.items():
            if name in self._started:  # sent early, from a tensor that may be another one than the atom's
                self._started[name].gradients[name] = gradient
            else:
                self._arrived[name] = gradient
        self._send(complete_only=self.can_wait_for_buffer)
        self._send_early()

    def _send(self, complete_only: bool) -> None:
        """Send arrived gradients in the order of the plan; with `complete_only`, up to the first incomplete buffer."""
        while self._next < len(self._buffers):
            buffer = self._buffers[self._next]
            is_incomplete = any(name not in self._arrived and name not in self._started for name in buffer.names)
            if is_incomplete and complete_only:
                return
            # Early units have their own message, even if they were not sent early.
            self._start(unit for unit in buffer.units if unit.early)
            self._start(unit for unit in buffer.units if not unit.early)
            if is_incomplete and not self._arrived:
                return
            self._next += 1

    def _send_incomplete(self) -> None:
        """Send the gradients of incomplete buffers that have arrived."""
        self._next = 0
        self._send(complete_only=False)

    def _send_early(self) -> None:
        """Send the early units of the next buffer, if all of their gradients are ready."""
        if self._next == len(self._buffers):
            return
        units = [unit for unit in self._buffers[self._next].units if unit.early]
        names = [name for unit in units for name in unit.names]
        ready = {name: self._early[name] for name in names if name in self._early} | self._arrived
        if names and all(name in ready and name not in self._started for name in names):
            self._arrived |= {name: ready[name] for name in names}
            self._start(units)

    def _start(self, units: Iterable[Unit]) -> None:
        """Start the messages for the gradients of these units that have arrived."""
        units = tuple(units)
        sizes = {name: self.sizes[name] for unit in units for name in unit.names if name in self._arrived}
        if not sizes:
            return
        units = [unit.with_density_ratio(self.density_ratio) for unit in Buffer(units).restricted_to(sizes).units]
        gradients = {name: self._arrived.pop(name) for name in sizes}
        reduction = self.reducer.start(units, gradients, self._scale, self.plan.mode == "interleaved")
        self._started |= dict.fromkeys(sizes, reduction)
        self._reductions.append(reduction)

    def _wait_for(self, names: Iterable[str]) -> None:
        """Block until the means of these gradients are in their tensors."""
        if any(name in self._arrived for name in names):
            self._send_incomplete()
        for reduction in dict.fromkeys(self._started[name] for name in names):
            reduction.wait()

    # The end of a step

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
        if self._arrived:
            self._send_incomplete()
        if self._arrived:
            raise RuntimeError(f"the plan does not contain {next(iter(self._arrived))!r}: replan() makes a new plan")
        for reduction in self._reductions:
            reduction.wait()
        nonfinite_name = self._nonfinite_gradient()
        self._clear()
        self._has_begun = False
        self._was_skipped, self._skipped = nonfinite_name is not None, self._count_skipped()
        self.step += 1
        for observer in [*self.observers]:
            observer.step_ended(self)
        if nonfinite_name and not self.skips_nonfinite_steps:
            raise FloatingPointError(
                f"step {self.step - 1}: the gradient of {nonfinite_name} is not finite on some rank. If the training "
                "uses a loss scale, pass SparseFusion(loss_scale=function); if it skips such steps without one, pass "
                "on_nonfinite='skip-known'"
            )

    def _nonfinite_gradient(self) -> str | None:
        """The name of a gradient whose mean is not finite, "a parameter of another rank", or None if all are finite.

        All ranks get the same result. Means that the framework computed are checked only if residuals may have been added
        to them on any rank; some frameworks leave only a part of these means on each rank.
        """
        had_residuals, has_residuals = self._had_residuals, bool(self.reducer.feedback.residuals)
        follows_plan, name = self._uses_buffers or self._uses_fp16, None
        if not (follows_plan or self._flushes_residuals):
            return None
        maxima = [maximum for reduction in self._reductions for maximum in reduction.maxima]
        magnitude = torch.stack(maxima).nan_to_num(math.inf, math.inf).max().item() if maxima else 0.0
        if not math.isfinite(magnitude):
            bad = next(r for r in self._reductions if r.maxima and not torch.stack(r.maxima).isfinite().all())
            # The framework may have reused the memory of the gradient.
            name = next((name for name, g in bad.gradients.items() if not g.isfinite().all()), "a parameter")
        for group in (self.reducer.group if self._flushes_residuals else None, self.model_group):
            if group is None:
                continue
            flags = [name is not None, has_residuals, had_residuals, magnitude]
            local = torch.tensor(flags, dtype=torch.float32, device=self.device)
            is_bad, has_residuals, had_residuals, magnitude = all_reduce(local, group, op=dist.ReduceOp.MAX).tolist()
            name = name or ("a parameter of another rank" if is_bad else None)
        if self._uses_fp16:
            self.reducer.fp16_scale.follow(magnitude, self._scale)
        if not (follows_plan or had_residuals):
            name = None
        if self._uses_buffers:
            self._may_have_residuals = True
        elif self._flushes_residuals and not name:  # a skipped step leaves the residuals unchanged
            self._may_have_residuals = bool(has_residuals)
        return name

    def finish_skipped_step(self) -> None:
        """If the last step was skipped, restore the residuals that it started with. RuntimeError if a step has begun."""
        if self._has_begun:
            raise RuntimeError(f"step {self.step} has begun: residuals are known only between steps")
        before, self._skipped = self._skipped, self._count_skipped()
        if self._was_skipped or self._skipped > before:
            self.reducer.feedback.roll_back()
        self._was_skipped = False
        self._may_have_residuals = self._may_have_residuals or self._skipped > before

    def abandon_step(self) -> None:
        """After an error on all ranks, restore the residuals before the step; the next gradients start a new step."""
        self._clear()
        self._was_skipped, self._has_begun = self._was_skipped or self._has_begun, False

    def restore(self, step: int, residuals: Mapping[str, torch.Tensor], fp16_scale: float = 1.0) -> None:
        """Continue with step number `step` and these residuals, from a checkpoint."""
        self.abandon_step()
        self.step, self._was_skipped, self._may_have_residuals = step, False, True
        self.reducer.feedback.begin_step(step)
        self.reducer.feedback.residuals, self.reducer.fp16_scale.value = dict(residuals), fp16_scale


@dataclass
class Pending:
    """A reduction in progress. wait: blocks until the means are in the gradients."""

    wait: Callable[[], None]


@dataclass
class FrameworkReduction:
    """A pending reduction by the framework. is_checked: find the largest magnitude of each mean."""

    work: Waitable | None
    gradients: Mapping[str, torch.Tensor]
    is_checked: bool
    maxima: list[torch.Tensor] = field(default_factory=list)  # filled by `wait`

    def wait(self) -> None:
        """Block until the means are in the gradients."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.is_checked:
            self.is_checked, self.maxima = False, [largest(gradient) for gradient in self.gradients.values()]


def most_common_dtype(
    tensors: Iterable[torch.Tensor], dtype_of: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
) -> torch.dtype:
    """The dtype that most elements of these tensors have."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        dtype = dtype_of(tensor)
        counts[dtype] = counts.get(dtype, 0) + tensor.numel()
    return max(counts, key=counts.__getitem__)
