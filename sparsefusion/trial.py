"""Plans that are predicted to be about equally fast take turns for some steps; the fastest one stays."""

import time
from statistics import median

import torch
import torch.distributed as dist

from .collectives import all_reduce

ROUNDS, STEPS = 3, 6  # of each plan; the first step after a change does not count
SURE = 0.95  # of the dense step's time: what does not reach it is not worth its losses


class Trial:
    """plans: {mode: plan}, in the order in which they are tried; all ranks' are the same. after: steps to wait before.

    dense: the seconds of a dense step. done: called with the mode that is best, and {mode: seconds}.
    """

    def __init__(self, session, plans, dense: float, after: int, done):
        self._plans, self._dense, self._after, self._done = plans, dense, after, done
        self._turns = [mode for _ in range(ROUNDS) for mode in plans for _ in range(STEPS)]
        self._seconds, self._ended = {mode: [] for mode in plans}, None
        session.plan = plans[self._turns[0]]  # the best, as far as is known

    def step_began(self, session) -> None:
        """Nothing to do."""

    def arrived(self, names) -> None:
        """Nothing to do."""

    def step_ended(self, session) -> None:
        """The next plan's turn, or the end."""
        self._after -= 1
        if self._after >= 0:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, turn = time.perf_counter(), len(self._turns) - 1
        mode, *self._turns = self._turns
        if self._ended is not None and turn % STEPS != STEPS - 1:
            self._seconds[mode].append(now - self._ended)
        self._ended = now
        if self._turns:
            session.plan = self._plans[self._turns[0]]
            return
        session.watchers.remove(self)
        self._decide(session)

    def _decide(self, session):
        """By the slowest rank's medians, the same numbers everywhere."""
        group, device = session.reducer.group, session.device
        medians = torch.tensor([median(s) for s in self._seconds.values()], dtype=torch.float64, device=device)
        medians = all_reduce(medians, group, op=dist.ReduceOp.MAX).tolist()
        seconds = dict(zip(self._plans, medians, strict=True))
        best = min(seconds, key=seconds.get)
        dense = seconds.get("dense", self._dense)
        if seconds[best] > SURE * dense:
            best = "dense"
        self._done(best, {"dense": dense, **seconds})
