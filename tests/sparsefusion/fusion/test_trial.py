"""Trials of several plans; oracle: a fake clock that advances by given durations, which may differ between ranks."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sparsefusion.fusion import trial
from sparsefusion.fusion.trial import LEAST_ROUNDS, ROUNDS, STEPS, Trial, close_modes


def test_close_modes():
    """The four best of those that are close, and dense if it is close."""
    order = dict(bucket=1.0, interleaved=1.01, layerwise=1.1, offload=1.12, selective=1.2, dense=1.25, fp16=1.31)
    assert close_modes(order) == ["bucket", "interleaved", "layerwise", "dense"]
    assert close_modes(order | {"dense": 1.05}) == ["bucket", "interleaved", "dense", "layerwise"]
    assert close_modes(order | {"dense": 1.4}) == ["bucket", "interleaved", "layerwise", "offload"]
    assert close_modes(order | {"dense": 1.4, "offload": 1.2}) == ["bucket", "interleaved", "layerwise", "selective"]
    assert close_modes({"dense": 1.0, "fp16": 1.31}) == ["dense"]
    assert close_modes({"layerwise": 2.0}) == ["layerwise"]


def run_trial(monkeypatch, durations, dense=1.0, after=0, turns=None, resumed=None):
    """(the chosen mode, {mode: measured seconds}, the modes of all steps) of a trial.

    durations: {mode: seconds of a step in each round; the last ones hold for all later rounds}. turns: the modes of the
    first round; by default all. resumed: the number of steps after which another trial continues from its progress.
    """
    modes, clock, taken, decided = list(durations), [0.0], [], []
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
        seconds = durations[session.plan]
        clock[0] += seconds[min(len(taken) // (STEPS * len(modes)), len(seconds) - 1)]
        session.observers[0].step_ended(session)
    (found,) = decided
    return *found, taken


@pytest.mark.parametrize("world", [2, 3])
def test_a_resumed_trial_continues_after_its_last_complete_round(ranks, monkeypatch, world):
    def run(rank):
        durations = {"a": [0.49], "b": [0.47], "c": [0.9], "dense": [1.0]}
        mode, seconds, steps = run_trial(monkeypatch, durations)
        again = run_trial(
            monkeypatch, durations, resumed=6 * STEPS + 1
        )  # during the third round, in which only "a" and "b" take part
        assert mode == again[0] == "b" and again[1] == pytest.approx(seconds)
        assert again[2] == steps[: 6 * STEPS + 1] + steps[6 * STEPS :] and len(steps) == 4 * STEPS + 7 * 2 * STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_fastest_plan_is_chosen(ranks, monkeypatch, world):
    def run(rank):
        mode, seconds, steps = run_trial(monkeypatch, {"a": [0.5], "b": [0.4], "dense": [1.0]})
        assert mode == "b" and seconds == pytest.approx({"dense": 1.0, "a": 0.5, "b": 0.4})
        assert len(steps) == 3 * STEPS  # the others are far behind after a round
        mode, seconds, steps = run_trial(monkeypatch, {"a": [0.42], "b": [0.4], "dense": [1.0]})
        assert mode == "b" and len(steps) == 3 * STEPS + 2 * (ROUNDS - 1) * STEPS and "dense" not in steps[3 * STEPS :]
        mode, seconds, steps = run_trial(monkeypatch, {"a": [0.39], "b": [0.4], "dense": [1.0]}, after=7)
        assert mode == "a" and steps[:8] == ["a"] * 8 and len(steps) == 7 + 3 * STEPS + 2 * (ROUNDS - 1) * STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_plans_are_dropped_by_a_margin_that_shrinks(ranks, monkeypatch, world):
    def run(rank):
        _, _, steps = run_trial(monkeypatch, {"a": [0.47], "b": [0.4]})  # 1.175: within 1 + 0.2, not 1 + 0.2 / 2**0.7
        assert steps.count("a") == 2 * STEPS
        mode, _, steps = run_trial(monkeypatch, {"a": [0.47, 0.385], "b": [0.4]})  # slow in the first round only
        assert mode == "a" and steps.count("a") == ROUNDS * STEPS
        _, _, steps = run_trial(monkeypatch, {"a": [0.427], "b": [0.4]})  # 1.0675: within 1 + 0.2 / 4**0.7
        assert steps.count("a") == 5 * STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_a_plan_must_be_certainly_faster_than_dense(ranks, monkeypatch, world):
    def run(rank):
        assert run_trial(monkeypatch, {"a": [0.96], "dense": [1.0]})[0] == "dense"
        assert run_trial(monkeypatch, {"a": [0.94], "dense": [1.0]})[0] == "a"
        assert (
            run_trial(monkeypatch, {"a": [0.92, 0.99, 0.99, 0.99, 0.92], "dense": [1.0]})[0] == "a"
        )  # fast enough in 5 rounds of 8
        assert run_trial(monkeypatch, {"a": [0.92, 0.99, 0.99, 0.99, 0.99, 0.92], "dense": [1.0]})[0] == "dense"
        mode, _, steps = run_trial(monkeypatch, {"a": [0.99, 0.94, 0.94, 0.94, 0.99], "dense": [1.0]})
        assert (
            mode == "dense" and steps.count("dense") == 8 * STEPS
        )  # it was slower than 0.95 in most of the first four
        mode, _, steps = run_trial(
            monkeypatch, {"a": [0.99, 0.5], "dense": [1.0]}
        )  # the median is low, but the first round delays the decision
        assert mode == "a" and steps.count("dense") == 4 * STEPS
        alike = {"a": [0.5], "b": [0.51], "dense": [0.52]}
        assert run_trial(monkeypatch, alike, dense=0.52, turns=["a", "b"])[0] == "dense"
        # The machine was slow while dense was profiled.
        assert run_trial(monkeypatch, alike, dense=0.6, turns=["a", "b"])[0] == "dense"
        mode, _, steps = run_trial(monkeypatch, alike, dense=0.66, turns=["a", "b"])
        assert mode == "a" and "dense" not in steps  # in its profile it was slower by far

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_one_round_is_too_few_to_reject_dense(ranks, monkeypatch, world):
    """Unless dense takes 1.3 times as long."""

    def run(rank):
        durations = {"a": [0.9], "b": [1.2], "dense": [1.15, 0.9]}
        mode, _, steps = run_trial(monkeypatch, durations)
        assert mode == "dense" and steps.count("b") == STEPS
        mode, _, steps = run_trial(monkeypatch, {"a": [0.9], "b": [1.2], "dense": [1.15]})
        assert mode == "a" and steps.count("dense") == LEAST_ROUNDS * STEPS
        mode, _, steps = run_trial(monkeypatch, {"a": [0.9], "b": [1.2], "dense": [1.18]})
        assert mode == "a" and steps.count("dense") == STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_dense_takes_turns_if_the_trial_is_slower_than_the_profile(ranks, monkeypatch, world):
    """It replaces the last plan if there would be too many."""

    def run(rank):
        durations = {"a": [0.9, 0.5], "b": [1.2, 0.6], "dense": [1.0]}
        mode, _, steps = run_trial(monkeypatch, durations, dense=0.8, turns=["a", "b"])
        assert mode == "a" and "dense" not in steps[: 2 * STEPS] and steps[3 * STEPS : 4 * STEPS] == ["dense"] * STEPS
        durations = {mode: [0.9, 0.5] for mode in "abcd"} | {"dense": [1.0]}
        _, _, steps = run_trial(monkeypatch, durations, dense=0.8, turns=[*"abcd"])
        assert steps.count("d") == STEPS and "dense" in steps and steps.count("c") > 2 * STEPS

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_the_slowest_rank_counts(ranks, monkeypatch, world):
    def run(rank):
        a = 0.9 if rank == 1 else 0.3
        return run_trial(monkeypatch, {"a": [a], "b": [0.5], "dense": [1.0]})[:2]

    found = ranks(run, world)
    assert all(mode == "b" for mode, _ in found) and all(seconds == found[0][1] for _, seconds in found)


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_step_of_a_turn_does_not_count(ranks, monkeypatch, world):
    """It includes what a change of plans costs, such as flushed residuals."""

    class Late(list):
        def __getitem__(self, index):
            Late.steps += 1
            return 50.0 if Late.steps % STEPS == 1 else super().__getitem__(index)

    def run(rank):
        Late.steps = 0
        mode, seconds, _ = run_trial(monkeypatch, {"a": Late([0.5]), "b": Late([0.4])})
        assert mode == "b" and seconds == pytest.approx({"dense": 1.0, "a": 0.5, "b": 0.4})

    ranks(run, world)
