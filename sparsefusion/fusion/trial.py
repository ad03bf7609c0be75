"""Plans that are predicted to be about equally fast take turns for some steps; the fastest one stays."""

import math
import time
from statistics import median

import torch
import torch.distributed as dist

from sparsefusion.collectives.counted import all_reduce
from sparsefusion.gradients.session import Watcher

MOST, CLOSE = 4, 1.3  # plans that take turns, predicted to take at most this many times the best one's seconds
ROUNDS, STEPS = 8, 4  # of each plan in each round; the first step after a change does not count
BEHIND, WANING = 0.2, 0.7  # a plan that takes BEHIND / rounds**WANING more than the best one has no further turns
WORTH = 0.95  # of a dense step's time, in the middle one of the rounds: else a plan is not worth its losses
MOSTLY = 0.75  # of the rounds are like that: then dense needs no further turns
LEAST = 3  # rounds, unless dense takes CLOSE times as long


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


class Trial(Watcher):
    """plans: {mode: plan}, dense's too. turns: the modes that begin, in this order; all ranks' are the same.

    dense: the seconds of a dense step that was watched; if the best is not surely faster, or not by far and known for a
    round or two only, either may have met a slow minute, and dense takes turns as well. after: steps to wait before. done:
    called with the mode that is best, and {mode: seconds}. progress: of one that goes on here, from its last complete round.
    """

    def __init__(self, session, plans, turns, dense: float, after: int, done, progress=None):
        self._plans, self._dense, self._after, self._done = plans, dense, after, done
        progress = progress or {"samples": {}, "rounds": [], "turns": turns}
        self._samples = {mode: [*seconds] for mode, seconds in progress["samples"].items()}  # of all steps that count
        self._rounds, self._ended = [*progress["rounds"]], None  # {mode: median} of each
        self._begin_round(session, progress["turns"])

    @property
    def progress(self) -> dict:
        """For `torch.save`: the rounds that are complete, and who has turns now."""
        samples = {mode: [*seconds] for mode, seconds in self._samples.items()}
        return {"samples": samples, "rounds": [*self._rounds], "turns": list(self._seconds)}

    def _begin_round(self, session, modes):
        self._turns = [mode for mode in modes for _ in range(STEPS)]
        self._seconds = {mode: [] for mode in modes}
        session.plan = self._plans[modes[0]]  # the best, as far as is known

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
            self._samples.setdefault(mode, []).extend(seconds)
        medians = [median(s) for s in (*self._seconds.values(), *self._samples.values())]
        medians = torch.tensor(medians, dtype=torch.float64, device=session.device)
        for group in filter(None, (session.reducer.group, session.model_group)):
            medians = all_reduce(medians, group, op=dist.ReduceOp.MAX)
        medians = iter(medians.tolist())
        self._rounds.append({mode: next(medians) for mode in self._seconds})
        seconds = {mode: next(medians) for mode in self._samples}
        best, *others = sorted(self._seconds, key=seconds.get)
        most = (1 + BEHIND / len(self._rounds) ** WANING) * seconds[best]
        of_dense = self._of_dense(best)
        sure = sum(each <= WORTH for each in of_dense) >= MOSTLY * len(of_dense)
        known = len(self._rounds) >= LEAST or CLOSE * seconds[best] <= seconds.get("dense", self._dense)
        left = [best, *(mode for mode in others if seconds[mode] <= most)]
        if not (sure and known) and "dense" not in left:
            left = [*left[: MOST - 1], "dense"]
        if len(left) > 1 and len(self._rounds) < ROUNDS:
            self._begin_round(session, left)
            return
        session.watchers.remove(self)
        self._done(best if median(of_dense) <= WORTH else "dense", {"dense": self._dense, **seconds})

    def _of_dense(self, mode) -> list[float]:
        """Its seconds, of dense's, in the rounds in which both had their turns; if dense had none, of those that it took."""
        rounds = [each for each in self._rounds if mode in each]
        beside = [each for each in rounds if "dense" in each] or rounds
        return [each[mode] / each.get("dense", self._dense) for each in beside]
