"""Sends the buffers of a plan in its order, each as soon as all of its gradients have arrived."""

from collections.abc import Iterable, Mapping

import torch

from sparsefusion.planning.plan import Buffer, Plan, Unit

from .reducer import Reducer, Reduction


class BufferQueue:
    """The gradients of one step that have arrived, and the messages that were started for them.

    A buffer whose gradients are complete is sent after all buffers before it, so every rank starts the same messages in the
    same order. Units that the plan marks as early may be sent before their buffer is complete.

    Args:
        reducer: Starts the messages.
        sizes: {name: numel} of all gradients.
    """

    def __init__(self, reducer: Reducer, sizes: Mapping[str, int]):
        self._reducer, self._sizes = reducer, sizes
        self._buffers: tuple[Buffer, ...] = ()
        self._is_interleaved, self._scale, self._density_ratio = False, 1.0, 1.0
        self.clear()

    def begin(self, plan: Plan, scale: float, density_ratio: float) -> None:
        """Start an empty step. scale: the loss scale. density_ratio: the factor of every k of the plan."""
        self._buffers, self._is_interleaved = plan.buffers, plan.mode == "interleaved"
        self._scale, self._density_ratio = scale, density_ratio
        self.clear()

    def clear(self) -> None:
        """Forget all gradients and messages of the step."""
        self._handed_over: set[str] = set()  # names of gradients that the framework handed over in atoms
        self._arrived: dict[str, torch.Tensor] = {}  # gradients that are not sent yet
        self._early: dict[str, torch.Tensor] = {}  # gradients that were ready before their atom was handed over
        self._started: dict[str, Reduction] = {}  # {name of a gradient: its reduction}
        self._next = 0  # the number of the first buffer that has not been sent
        self.reductions: list[Reduction] = []

    @property
    def has_sent(self) -> bool:
        """True if a message of this step has been started."""
        return bool(self._started)

    @property
    def unsent(self) -> str | None:
        """The name of a gradient that has arrived but has not been sent, or None."""
        return next(iter(self._arrived), None)

    def first_repeated(self, names: Iterable[str], early: bool = False) -> str | None:
        """The first of these gradients that already arrived in this step by `add`, or with `early` by `add_early`."""
        known = self._early if early else self._handed_over
        return next((name for name in names if name in known), None)

    def add(self, gradients: Mapping[str, torch.Tensor], wait_for_buffer: bool) -> None:
        """Add the gradients of an atom. wait_for_buffer: send complete buffers only, not all gradients at once."""
        self._handed_over.update(gradients)
        for name, gradient in gradients.items():
            if name in self._started:  # sent early, from a tensor that may be another one than the atom's
                self._started[name].gradients[name] = gradient
            else:
                self._arrived[name] = gradient
        self._send(complete_only=wait_for_buffer)
        self._send_early()

    def add_early(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient whose atom is not complete, and send it if the plan sends it early."""
        self._early[name] = gradient
        self._send_early()

    def send_incomplete(self) -> None:
        """Send the gradients of incomplete buffers that have arrived."""
        self._next = 0
        self._send(complete_only=False)

    def wait(self, names: Iterable[str]) -> None:
        """Block until the means of these gradients are in their tensors."""
        if any(name in self._arrived for name in names):
            self.send_incomplete()
        for reduction in dict.fromkeys(self._started[name] for name in names):
            reduction.wait()

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
        sizes = {name: self._sizes[name] for unit in units for name in unit.names if name in self._arrived}
        if not sizes:
            return
        units = [unit.with_density_ratio(self._density_ratio) for unit in Buffer(units).restricted_to(sizes).units]
        gradients = {name: self._arrived.pop(name) for name in sizes}
        reduction = self._reducer.start(units, gradients, self._scale, self._is_interleaved)
        self._started |= dict.fromkeys(sizes, reduction)
        self.reductions.append(reduction)
