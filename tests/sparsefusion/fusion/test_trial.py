"""Plans that take turns; oracle: a clock that is told how long each plan's steps take, and another tale on each rank."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sparsefusion.fusion import trial
from sparsefusion.fusion.trial import LEAST, ROUNDS, STEPS, Trial, close_modes


def test_contestants():
    """The four best of those that are close, and dense if it is."""
    order = dict(bucket=1.0, interleaved=1.01, layerwise=1.1, offload=1.12, selective=1.2, dense=1.25, fp16=1.31)
    assert close_modes(order) == ["bucket", "interleaved", "layerwise", "dense"]
    assert close_modes(order | {"dense": 1.05}) == ["bucket", "interleaved", "dense", "layerwise"]
    assert close_modes(order | {"dense": 1.4}) == ["bucket", "interleaved", "layerwise", "offload"]
    assert close_modes(order | {"dense": 1.4, "offload": 1.2}) == ["bucket", "interleaved", "layerwise", "selective"]
    assert close_modes({"dense": 1.0, "fp16": 1.31}) == ["dense"]
    assert close_modes({"layerwise": 2.0}) == ["layerwise"]


def tried(monkeypatch, tale, dense=1.0, after=0, turns=None, resumed=None):
    """The mode that is decided for, measured seconds, and the modes of all steps.

    tale: {mode: a step's seconds in each round, the last ones in all others}. turns: the modes that begin; else all.
    resumed: the number of steps after which another trial goes on.
    """
    modes, clock, taken, decided = list(tale), [0.0], [], []
    monkeypatch.setattr(trial.time, "perf_counter", lambda: clock[0])
    session = SimpleNamespace(
        observers=[],
        plan=None,
        device=torch.device("cpu"),
        model_group=None,
        reducer=SimpleNamespace(group=dist.group.WORLD),
    )
    plans = {mode: mode for mode in [*modes, "dense"]}
    begin = partial(Trial, session, plans, turns or modes, dense, after, lambda *found: decided.append(found))
    session.observers.append(begin())
    while session.observers and len(taken) < 1000:
        if len(taken) == resumed:
            session.observers = [begin(progress=json.loads(json.dumps(session.observers[0].progress)))]
        taken.append(session.plan)
        seconds = tale[session.plan]
        clock[0] += seconds[min(len(taken) // (STEPS * len(modes)), len(seconds) - 1)]
        session.observers[0].step_ended(session)
    (found,) = decided
    return *found, taken


@pytest.mark.parametrize("world", [2, 3])
def test_a_trial_goes_on_after_its_last_complete_round(ranks, monkeypatch, world):
    def run(rank):
        tale = {"a": [0.49], "b": [0.47], "c": [0.9], "dense": [1.0]}
        mode, seconds, steps = tried(monkeypatch, tale)
        again = tried(monkeypatch, tale, resumed=6 * STEPS + 1)  # in the third round, the second one of "a" and "b"
        assert mode == again[0] == "b" and again[1] == pytest.approx(seconds)
        assert again[2] == steps[: 6 * STEPS + 1] + steps[6 * STEPS :] and len(steps) == 4 * STEPS + 7 * 2 * STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_fastest_stays(ranks, monkeypatch, world):
    def run(rank):
        mode, seconds, steps = tried(monkeypatch, {"a": [0.5], "b": [0.4], "dense": [1.0]})
        assert mode == "b" and seconds == pytest.approx({"dense": 1.0, "a": 0.5, "b": 0.4})
        assert len(steps) == 3 * STEPS  # the others are far behind after a round
        mode, seconds, steps = tried(monkeypatch, {"a": [0.42], "b": [0.4], "dense": [1.0]})
        assert mode == "b" and len(steps) == 3 * STEPS + 2 * (ROUNDS - 1) * STEPS and "dense" not in steps[3 * STEPS :]
        mode, seconds, steps = tried(monkeypatch, {"a": [0.39], "b": [0.4], "dense": [1.0]}, after=7)
        assert mode == "a" and steps[:8] == ["a"] * 8 and len(steps) == 7 + 3 * STEPS + 2 * (ROUNDS - 1) * STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_a_plan_may_be_the_further_behind_the_less_is_known(ranks, monkeypatch, world):
    def run(rank):
        _, _, steps = tried(monkeypatch, {"a": [0.47], "b": [0.4]})  # 1.175: within 1 + 0.2, not 1 + 0.2 / 2**0.7
        assert steps.count("a") == 2 * STEPS
        mode, _, steps = tried(monkeypatch, {"a": [0.47, 0.385], "b": [0.4]})  # a bad start
        assert mode == "a" and steps.count("a") == ROUNDS * STEPS
        _, _, steps = tried(monkeypatch, {"a": [0.427], "b": [0.4]})  # 1.0675: within 1 + 0.2 / 4**0.7
        assert steps.count("a") == 5 * STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_not_surely_faster_than_dense_is_not_worth_it(ranks, monkeypatch, world):
    def run(rank):
        assert tried(monkeypatch, {"a": [0.96], "dense": [1.0]})[0] == "dense"
        assert tried(monkeypatch, {"a": [0.94], "dense": [1.0]})[0] == "a"
        assert tried(monkeypatch, {"a": [0.92, 0.99, 0.99, 0.99, 0.92], "dense": [1.0]})[0] == "a"  # in 5 rounds of 8
        assert tried(monkeypatch, {"a": [0.92, 0.99, 0.99, 0.99, 0.99, 0.92], "dense": [1.0]})[0] == "dense"
        mode, _, steps = tried(monkeypatch, {"a": [0.99, 0.94, 0.94, 0.94, 0.99], "dense": [1.0]})
        assert mode == "dense" and steps.count("dense") == 8 * STEPS  # though not in the first four
        mode, _, steps = tried(monkeypatch, {"a": [0.99, 0.5], "dense": [1.0]})  # far ahead before it is sure
        assert mode == "a" and steps.count("dense") == 4 * STEPS
        alike = {"a": [0.5], "b": [0.51], "dense": [0.52]}
        assert tried(monkeypatch, alike, dense=0.52, turns=["a", "b"])[0] == "dense"
        # which was watched in a slow minute
        assert tried(monkeypatch, alike, dense=0.6, turns=["a", "b"])[0] == "dense"
        mode, _, steps = tried(monkeypatch, alike, dense=0.66, turns=["a", "b"])
        assert mode == "a" and "dense" not in steps  # it was watched before, and slower by far

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_one_round_is_too_few_against_dense(ranks, monkeypatch, world):
    """Unless it takes 1.3 times as long."""

    def run(rank):
        tale = {"a": [0.9], "b": [1.2], "dense": [1.15, 0.9]}
        mode, _, steps = tried(monkeypatch, tale)
        assert mode == "dense" and steps.count("b") == STEPS
        mode, _, steps = tried(monkeypatch, {"a": [0.9], "b": [1.2], "dense": [1.15]})
        assert mode == "a" and steps.count("dense") == LEAST * STEPS
        mode, _, steps = tried(monkeypatch, {"a": [0.9], "b": [1.2], "dense": [1.18]})
        assert mode == "a" and steps.count("dense") == STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_a_slow_minute_after_dense_was_watched(ranks, monkeypatch, world):
    """Then dense takes turns, too, in place of the last one if there would be too many."""

    def run(rank):
        tale = {"a": [0.9, 0.5], "b": [1.2, 0.6], "dense": [1.0]}
        mode, _, steps = tried(monkeypatch, tale, dense=0.8, turns=["a", "b"])
        assert mode == "a" and "dense" not in steps[: 2 * STEPS] and steps[3 * STEPS : 4 * STEPS] == ["dense"] * STEPS
        tale = {mode: [0.9, 0.5] for mode in "abcd"} | {"dense": [1.0]}
        _, _, steps = tried(monkeypatch, tale, dense=0.8, turns=[*"abcd"])
        assert steps.count("d") == STEPS and "dense" in steps and steps.count("c") > 2 * STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_the_slowest_rank_counts(ranks, monkeypatch, world):
    def run(rank):
        a = 0.9 if rank == 1 else 0.3
        return tried(monkeypatch, {"a": [a], "b": [0.5], "dense": [1.0]})[:2]

    found = ranks(run, world)
    assert all(mode == "b" for mode, _ in found) and all(seconds == found[0][1] for _, seconds in found)


@pytest.mark.parametrize("world", [1, 2])
def test_a_first_step_does_not_count(ranks, monkeypatch, world):
    """What a change of plans costs, residuals that go with it, is no plan's fault."""

    class Late(list):
        def __getitem__(self, index):
            Late.steps += 1
            return 50.0 if Late.steps % STEPS == 1 else super().__getitem__(index)

    def run(rank):
        Late.steps = 0
        mode, seconds, _ = tried(monkeypatch, {"a": Late([0.5]), "b": Late([0.4])})
        assert mode == "b" and seconds == pytest.approx({"dense": 1.0, "a": 0.5, "b": 0.4})

    ranks(run, world)
