"""A trial: plans with close predictions take turns for some steps, and the fastest one is chosen."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from commfabric.collectives.counted import all_reduce
from sparsefusion.gradients.session import Session, StepObserver
from sparsefusion.planning.plan import Plan

# At most MOST_PLANS plans take turns. Their predicted time is at most CLOSE_RATIO times that of the best one.
MOST_PLANS, CLOSE_RATIO = 4, 1.3
ROUNDS, STEPS = 8, 4  # a round has STEPS steps of each plan; the first step after a change does not count
# A plan that is slower than the best one by more than a share of DROP_MARGIN / rounds**DROP_DECAY is dropped.
DROP_MARGIN, DROP_DECAY = 0.2, 0.7
WORTHWHILE_RATIO = 0.95  # a plan must take at most this share of a dense step, in the median of the rounds
CERTAIN_SHARE = 0.75  # if this share of the rounds reaches WORTHWHILE_RATIO, dense gets no further turns
LEAST_ROUNDS = 3  # the number of rounds before that, unless dense takes CLOSE_RATIO times as long


def close_modes(seconds: Mapping[str, float]) -> list[str]:
    """The modes whose plans take turns, best first, from the predictions {mode: seconds}.

    If dense is close, it is included, because its time during the trial may differ from the profile.
    """
    order = sorted(seconds, key=lambda mode: seconds[mode])
    if seconds.get("offload", 0) >= seconds.get("selective", math.inf):
        order.remove("offload")  # the same plan, with a thread to wait for
    close = [mode for mode in order if seconds[mode] <= CLOSE_RATIO * seconds[order[0]]]
    return [*close[: MOST_PLANS - 1], "dense"] if "dense" in close[MOST_PLANS:] else close[:MOST_PLANS]


class Trial(StepObserver):
    """Lets plans take turns, round by round, and drops plans that are clearly slower.

    If the best plan is not certainly faster than dense, or has been measured in few rounds only, dense takes turns as well,
    because the machine may have been slow while either was measured.

    Args:
        session: The session.
        plans: {mode: plan}, including dense.
        turns: The modes of the first round, in order, equal on all ranks.
        dense: Seconds of a profiled dense step.
        after: The number of steps to wait before the trial.
        done: Called with the best mode and {mode: seconds}.
        progress: The progress of a trial from a checkpoint, which continues after its last complete round.
    """

    def __init__(
        self,
        session: Session,
        plans: Mapping[str, Plan],
        turns: Sequence[str],
        dense: float,
        after: int,
        done: Callable[[str, Mapping[str, float]], None],
        progress: Mapping | None = None,
    ):
        self._plans, self._dense, self._after, self._done = plans, dense, after, done
        progress = progress or {"samples": {}, "rounds": [], "turns": turns}
        # The seconds of all steps that count, by mode.
        self._samples = {mode: [*seconds] for mode, seconds in progress["samples"].items()}
        self._rounds = [*progress["rounds"]]  # {mode: median seconds} of every round
        self._ended: float | None = None
        self._begin_round(session, progress["turns"])

    @property
    def progress(self) -> dict:
        """The progress for checkpoints: measured times, complete rounds, and the modes of the current round."""
        samples = {mode: [*seconds] for mode, seconds in self._samples.items()}
        return {"samples": samples, "rounds": [*self._rounds], "turns": list(self._seconds)}

    def _begin_round(self, session: Session, modes: Sequence[str]) -> None:
        self._turns = [mode for mode in modes for _ in range(STEPS)]
        self._seconds = {mode: [] for mode in modes}
        session.plan = self._plans[modes[0]]  # the best so far

    def step_ended(self, session: Session) -> None:
        """Activate the next plan, begin the next round, or end the trial."""
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

    def _end_round(self, session: Session) -> None:
        """Begin another round with the plans that may be the fastest, or decide."""
        for mode, seconds in self._seconds.items():
            self._samples.setdefault(mode, []).extend(seconds)
        of_round, of_all = self._slowest_medians(session)
        self._rounds.append(of_round)
        best, *others = sorted(self._seconds, key=lambda mode: of_all[mode])
        slowest = (1 + DROP_MARGIN / len(self._rounds) ** DROP_DECAY) * of_all[best]
        relative = self._relative_to_dense(best)
        is_certain = sum(ratio <= WORTHWHILE_RATIO for ratio in relative) >= CERTAIN_SHARE * len(relative)
        is_known = len(self._rounds) >= LEAST_ROUNDS or CLOSE_RATIO * of_all[best] <= of_all.get("dense", self._dense)
        remaining = [best, *(mode for mode in others if of_all[mode] <= slowest)]
        if not (is_certain and is_known) and "dense" not in remaining:
            remaining = [*remaining[: MOST_PLANS - 1], "dense"]
        if len(remaining) > 1 and len(self._rounds) < ROUNDS:
            self._begin_round(session, remaining)
            return
        session.observers.remove(self)
        self._done(best if median(relative) <= WORTHWHILE_RATIO else "dense", {"dense": self._dense, **of_all})

    def _slowest_medians(self, session: Session) -> tuple[dict[str, float], dict[str, float]]:
        """{mode: median seconds of the slowest rank} of this round and of all rounds, equal on all ranks."""
        local = [median(s) for s in (*self._seconds.values(), *self._samples.values())]
        medians = torch.tensor(local, dtype=torch.float64, device=session.device)
        for group in filter(None, (session.reducer.group, session.model_group)):
            medians = all_reduce(medians, group, op=dist.ReduceOp.MAX)
        slowest = iter(medians.tolist())
        return {mode: next(slowest) for mode in self._seconds}, {mode: next(slowest) for mode in self._samples}

    def _relative_to_dense(self, mode: str) -> list[float]:
        """The time of a mode relative to dense in each round that measured both.

        If no round did, it is relative to the profiled dense step, in all rounds of the mode.
        """
        rounds = [seconds for seconds in self._rounds if mode in seconds]
        with_dense = [seconds for seconds in rounds if "dense" in seconds] or rounds
        return [seconds[mode] / seconds.get("dense", self._dense) for seconds in with_dense]
