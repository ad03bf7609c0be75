"""Signals that ask a run to leave: SIGTERM, as preempted nodes get it, and SIGUSR1, which Slurm can send before the end."""

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """While it is entered, notes signals instead of letting them end the process.

    The handlers are set in the main thread only; elsewhere Python does not allow it, and signals act as they did.
    """

    def __init__(self, device: torch.device):
        self._device, self._received, self._before = device, 0, dict[int, Any]()

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def on_any_rank(self, has_failed: bool = False, is_late: bool = False) -> tuple[str, bool, bool]:
        """(the name of a signal that any rank has received, or ""; `has_failed`, `is_late`: true if one is on any rank).

        All ranks call it together and get the same. All-reduces three integers over the default group.
        """
        flags = torch.tensor([self._received, int(has_failed), int(is_late)], device=self._device)
        if dist.is_initialized():
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        number, failed, late = flags.tolist()
        return signal.Signals(number).name if number else "", bool(failed), bool(late)
