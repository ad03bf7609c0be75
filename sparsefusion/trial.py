"""Plans that are predicted to be about equally fast take turns for some steps; the fastest one stays."""

import math
import time
from statistics import median

import torch
import torch.distributed as dist

from .collectives import all_reduce

MOST, CLOSE = 4, 1.3  # plans that take turns, predicted to take at most this many times the best one's seconds
ROUNDS, STEPS = 8, 4  # of each plan in each round; the first step after a change does not count
BEHIND = 0.2  # over the root of the rounds so far: a plan that takes this much more than the best has no further turns
SURE, MOSTLY = 0.95, 0.75  # of a dense step's time, in this share of the rounds: else a plan is not worth its losses


def longest() -> int:
    """Steps of the longest trial."""
    return MOST * ROUNDS * STEPS


def contestants(seconds) -> list[str]:
    """The modes whose plans take turns, by the predictions {mode: seconds}, the best one first.

    dense takes part if it is close: by its seconds of another time the others could not be judged.
    """
    order = sorted(seconds, key=seconds.get)
    if seconds.get("offload", 0) >= seconds.get("selective", math.inf):
        order.remove("offload")  # which is the same, by a thread that is waited for
    close = [mode for mode in order if seconds[mode] <= CLOSE * seconds[order[0]]]
    return [*close[: MOST - 1], "dense"] if "dense" in close[MOST:] else close[:MOST]


class Trial:
    """plans: {mode: plan}, in the order in which they are tried; all ranks' are the same. after: steps to wait before.

    dense: the seconds of a dense step. done: called with the mode that is best, and {mode: seconds}.
    """

    def __init__(self, session, plans, dense: float, after: int, done):
        self._plans, self._dense, self._after, self._done = plans, dense, after, done
        self._samples, self._rounds = {mode: [] for mode in plans}, {mode: [] for mode in plans}
        self._ended = None
        self._begin_round(session, list(plans))

    def _begin_round(self, session, modes):
        self._turns = [mode for mode in modes for _ in range(STEPS)]
        self._seconds = {mode: [] for mode in modes}
        session.plan = self._plans[modes[0]]  # the best, as far as is known

    def step_began(self, session) -> None:
        """Nothing to do."""

    def arrived(self, names) -> None:
        """Nothing to do."""

    def step_ended(self, session) -> None:
        """The next plan's turn, the next round, or the end."""
        self._after -= 1
        if self._after >= 0:
            return
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        now, turn = time.perf_counter(), len(self._turns) - 1
        mode, *self._turns = self._turns
        if self._ended is not None and turn % STEPS != STEPS - 1:
            self._seconds[mode].append(now - self._ended)
        self._ended = now
        if self._turns:
            session.plan = self._plans[self._turns[0]]
        else:
            self._end_round(session)

    def _end_round(self, session):
        """By the slowest rank's medians, the same numbers everywhere."""
        for mode, seconds in self._seconds.items():
            self._samples[mode] += seconds
        medians = [median(s) for s in (*self._seconds.values(), *self._samples.values())]
        medians = torch.tensor(medians, dtype=torch.float64, device=session.device)
        for group in filter(None, (session.reducer.group, session.model_group)):
            medians = all_reduce(medians, group, op=dist.ReduceOp.MAX)
        medians = medians.tolist()
        for mode in self._seconds:
            self._rounds[mode].append(medians.pop(0))
        seconds = dict(zip(self._plans, medians, strict=True))
        order = sorted(self._seconds, key=seconds.get)
        rounds = len(self._rounds[order[0]])
        most = (1 + BEHIND / math.sqrt(rounds)) * seconds[order[0]]
        unsure = not self._is_sure(order[0])
        left = [mode for mode in order if seconds[mode] <= most or (mode == "dense" and unsure)]
        if len(left) > 1 and rounds < ROUNDS:
            self._begin_round(session, left)
            return
        session.watchers.remove(self)
        self._done(left[0] if self._is_sure(left[0]) else "dense", {"dense": self._dense, **seconds})

    def _is_sure(self, mode) -> bool:
        """Whether it was clearly faster than dense, mostly, when both had their turns."""
        mine, dense = self._rounds[mode], self._rounds.get("dense") or [self._dense] * ROUNDS
        sure = [a <= SURE * b for a, b in zip(mine, dense, strict=False)]
        return sum(sure) >= MOSTLY * len(sure)
