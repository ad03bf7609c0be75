"""Checkpoints of sparse gradients in torch's DDP; oracle: the run that was not interrupted."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from fused import Net, attach_fp16, backward, force_plan, quiet, residual_of, same_on_all_ranks, sum_over_ranks
from sparsefusion import SparseFusion
from sparsefusion.fusion import trial
from sparsefusion.planning.plan import Plan

POINTS = [(1 << i, 1e-3, 1e-3) for i in range(10, 20)]  # bytes, seconds


def train(model, fusion, rank, steps):
    """Steps of SGD with momentum. The optimizer is kept as an attribute of the model."""
    if not hasattr(model, "optimizer"):
        model.optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    for step in steps:
        backward(model, step, rank)
        model.optimizer.step()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_resumed_run_equals_the_uninterrupted_one(ranks, world, tmp_path):
    """Bitwise, with a final plan, also on a new model, whose DDP first has one bucket with all parameters."""

    def run(rank):
        narrow = {"mode": "interleaved", "wire": "bf16"}
        for options in ({"mode": "bucket"}, {"sparsifier": "randomk"}, narrow, {"mode": "offload", "wire": "int8"}):
            straight, first, second = (DDP(Net(), bucket_cap_mb=0.05) for _ in range(3))
            train(straight, force_plan(quiet().attach(straight), **options), rank, range(12))
            fusion = force_plan(quiet().attach(first), **options)
            train(first, fusion, rank, range(7))
            path = tmp_path / f"{rank}.pt"
            torch.save([first.state_dict(), first.optimizer.state_dict(), fusion.state_dict()], path)
            model, optimizer, state = torch.load(path, weights_only=True)
            resumed = quiet(density=0.05, **options).attach(second)
            second.load_state_dict(model)
            second.optimizer = torch.optim.SGD(second.parameters(), 1e-3, momentum=0.9)
            second.optimizer.load_state_dict(optimizer)
            resumed.load_state_dict(state)
            assert resumed.plan.hash == fusion.plan.hash
            train(second, resumed, rank, range(7, 12))
            assert all(map(torch.equal, straight.parameters(), second.parameters())), options

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_resumed_run_in_fp16_restores_its_scale(ranks, world):
    """Gradients of 1e-9 underflow in float16 without it, as in the first step from a state of an older version."""

    def run(rank):
        straight, again, without = models = [DDP(Net()) for _ in range(3)]
        fusions = [attach_fp16(model) for model in models]
        for model in models:
            model.optimizer = torch.optim.SGD(model.parameters(), 1e6)
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: 1e-9 * gradient)
        train(straight, fusions[0], rank, range(4))
        state = fusions[0].state_dict()
        train(straight, fusions[0], rank, range(4, 8))
        older = {what: value for what, value in state.items() if what != "half_scale"}
        for model, fusion, given in ((again, fusions[1], state), (without, fusions[2], older)):
            train(model, fusion, rank, range(4))
            fusion.load_state_dict(given)
            train(model, fusion, rank, range(4, 8))
        assert all(map(torch.equal, straight.parameters(), again.parameters()))
        assert not any(map(torch.equal, straight.parameters(), without.parameters()))
        for _ in range(2):  # the second attempt fails as well
            with pytest.raises(ValueError, match="rank 1 got half_scale=1.0, rank 0 got half_scale="):
                fusions[2].load_state_dict(older if rank == 1 else state)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_another_number_of_ranks_takes_the_mean_residual(ranks, world, tmp_path):
    def save(rank):
        model = DDP(Net())
        fusion = force_plan(quiet().attach(model))
        for step in range(3):
            backward(model, step, rank)
        torch.save(fusion.state_dict(), tmp_path / f"{rank}.pt")
        return residual_of(fusion, "first.weight", model.module.first.weight)

    mean = sum(ranks(save, 4)) / 4
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(4)]

    def load(rank):
        model = DDP(Net())
        fusion = quiet(mode="layerwise", density=0.05).attach(model)
        with pytest.raises(ValueError, match=f"one of 4 ranks, and here are {world}: pass load_state_dict the list"):
            fusion.load_state_dict(states[0])
        with pytest.raises(ValueError, match=r"3 states of ranks \[0, 1, 2\], and there were 4 ranks"):
            fusion.load_state_dict(states[:3])
        fusion.load_state_dict(states)
        assert fusion.plan.ranks == world and fusion.plan.mode == "layerwise"
        return sum_over_ranks(residual_of(fusion, "first.weight", model.module.first.weight)) / world

    for found in ranks(load, world):
        assert (found - mean).norm() <= 1e-6 * mean.norm()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_one_rank_is_dense(ranks, world):
    def save(rank):
        model = DDP(Net())
        fusion = attach_fp16(model)
        backward(model, 0, rank)
        return fusion.state_dict()

    states = ranks(save, world)

    def load(rank):
        fusion = attach_fp16(DDP(Net()))
        fusion.load_state_dict(states)
        return fusion.plan.mode

    assert ranks(load, 1) == ["dense"]


@pytest.mark.parametrize("world", [4, pytest.param(5, marks=pytest.mark.full)])
def test_a_plan_that_sends_too_much_here_is_not_kept(ranks, world):
    """A density of 0.3 helps on 2 ranks only. The residuals are flushed in the first step."""

    def save(rank):
        model = DDP(Net())
        fusion = force_plan(quiet(density=0.3).attach(model), density=0.3)
        backward(model, 0, rank)
        return fusion.state_dict()

    states = ranks(save, 2)

    def load(rank):
        model, reports = DDP(Net()), []
        options = dict(mode="layerwise", exchange="all_gather", report=reports.append)
        fusion = SparseFusion(density=0.3, **options).attach(model)
        fusion.load_state_dict(states)
        backward(model, 1, rank)
        assert fusion.plan.mode == "dense" and not fusion.state_dict()["residuals"]
        return reports

    assert "dense, as layerwise would not send clearly less" in ranks(load, world)[0][-1]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_plan_without_a_parameter_is_not_kept(ranks, world):
    """The parameter was frozen when the plan was made."""

    def run(rank):
        saved, fresh = Net(), DDP(Net())
        saved.last.weight.requires_grad_(False)
        saved = DDP(saved)
        fusion = quiet(mode="layerwise", density=0.05).attach(saved)
        for step in range(6):
            backward(saved, step, rank)
        resumed = quiet(mode="layerwise", density=0.05).attach(fresh)
        resumed.load_state_dict(fusion.state_dict())
        for step in range(6, 12):
            backward(fresh, step, rank)
            assert same_on_all_ranks([p.grad for p in fresh.parameters()])
        assert "last.weight" in {name for buffer in resumed.plan.buffers for name in buffer.names}
        resumed._session.plan = fusion.plan
        with pytest.raises(RuntimeError, match="the plan does not contain 'last.weight'"):
            backward(fresh, 12, rank)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_plan_of_another_budget_is_not_kept(ranks, world):
    def run(rank):
        model = DDP(Net())
        fusion = quiet(mode="selective", density=0.05, budget="paper").attach(model)
        for step in range(6):
            backward(model, step, rank)
        state = fusion.state_dict()
        fusion.detach()
        for budget, kept in (("paper", True), ("none", False)):
            resumed = quiet(mode="selective", density=0.05, budget=budget).attach(model)
            resumed.load_state_dict(state)
            assert (resumed.plan == Plan.from_json(state["plan"])) == kept and resumed._selection.is_final == kept
            resumed.detach()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_differences_between_ranks_are_errors(ranks, world):
    """Of steps, in states that are loaded."""

    def run(rank):
        model = DDP(Net())
        fusion = force_plan(quiet(density=0.05, mode="layerwise").attach(model))
        for step in range(2):
            backward(model, step, rank)
            if step == (rank == 1):
                state = fusion.state_dict()
        states = [None] * world
        dist.all_gather_object(states, state)
        with pytest.raises(ValueError, match="states of different runs or steps: step 1 of rank 0, step 2 of rank 1"):
            fusion.load_state_dict(states)
        with pytest.raises(ValueError, match=r"rank 1 got step=2, rank 0 got step=1"):
            fusion.load_state_dict(state)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_resumed_trial_continues(ranks, monkeypatch, tmp_path, world):
    """Saved during the warm-up or the trial of several plans. Nothing is profiled again."""
    monkeypatch.setattr(trial, "ROUNDS", 2)
    monkeypatch.setattr(trial, "CLOSE_RATIO", 1e9)  # so that all modes take part, on a busy machine as well
    monkeypatch.setattr(trial, "DROP_MARGIN", 1e9)

    def run(rank):
        reports = []
        for steps in (9, 20, 34):  # during the warm-up, during the first round, after a round
            saved, fresh = DDP(Net()), DDP(Net())
            fusion = SparseFusion(0.02, density_warmup=10, report=reports.append).attach(saved)
            for step in range(steps):
                backward(saved, step, rank)
            state = fusion.state_dict()
            assert state["plan"] is None and state["candidates"]
            torch.save(state, tmp_path / f"{rank}.pt")
            state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
            resumed = SparseFusion(0.02, density_warmup=10, report=reports.append).attach(fresh)
            if steps == 20:  # a state of a version that did not save trials
                del state["candidates"]["trial"]
            resumed.load_state_dict(state)
            if steps == 34:
                assert state["candidates"]["trial"]["rounds"]
                assert resumed.state_dict()["candidates"] == state["candidates"]
            for step in range(steps, 17 + 32 + trial.MOST_PLANS * trial.ROUNDS * trial.STEPS):
                backward(fresh, step, rank)
            assert resumed._selection.is_final and resumed.state_dict()["sparse_since"] == 5
        return reports

    reports = ranks(run, world)[0]
    assert sum("Predicted:" in text for text in reports) == 3 == sum("measured steps" in text for text in reports)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_replan_interrupts_a_warmup(ranks, world):
    def run(rank):
        model, plain = DDP(Net(), bucket_cap_mb=0.1), DDP(Net(), bucket_cap_mb=0.1)
        fusion = quiet(density=0.02, mode="layerwise", density_warmup=50).attach(model)
        for step in range(8):
            backward(model, step, rank), backward(plain, step, rank)
        assert fusion._session.density_ratio > 1
        fusion.replan()
        for step in (8, 9):
            backward(model, step, rank), backward(plain, step, rank)
        assert fusion._session.density_ratio == 1 and not fusion._session.is_dense_step
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        for step in range(10, 14):
            backward(model, step, rank)
        assert (
            fusion.plan.mode == "layerwise" and fusion.state_dict()["sparse_since"] == 5
        )  # the warm-up continues where it was

    ranks(run, world)


@pytest.mark.parametrize("tp, dp", [(2, 2), (3, 1)])
def test_the_state_of_another_part_is_refused(ranks, tp, dp):
    """Parts of a divided model may have the same sizes. All ranks raise the error, whichever of them has the state."""

    def run(rank):
        tensor = [dist.new_group(range(i * tp, (i + 1) * tp)) for i in range(dp)][rank // tp]
        data = [dist.new_group(range(i, tp * dp, tp)) for i in range(tp)][rank % tp]
        model = DDP(Net(), process_group=data)
        fusion = force_plan(quiet(model_group=tensor).attach(model))
        backward(model, 0, rank)
        state = fusion.state_dict()
        fusion.load_state_dict(state)
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)
        other = (rank + 1) % tp + rank // tp * tp
        for given in (states[other], states[other] if rank == 0 else state):
            with pytest.raises(
                ValueError, match=r"the state of part \[1, .\] of a model, and this rank has part \[0, "
            ):
                fusion.load_state_dict(given)
        older = {what: value for what, value in state.items() if what != "part"}
        fusion.load_state_dict(older)

    ranks(run, tp * dp)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_state_in_another_memory_format_is_refused(ranks, world):
    """Residuals have the memory format of their gradients."""

    def run(rank):
        def attached(order):
            model = DDP(torch.nn.Conv2d(17, 33, 3).to(memory_format=order))
            return model, force_plan(quiet(density=0.05).attach(model), mode="bucket", whole=())

        model, fusion = attached(torch.channels_last)
        model(torch.randn(2, 17, 9, 9)).square().mean().backward()
        state = fusion.state_dict()
        _, same = attached(torch.channels_last)
        same.load_state_dict(state)
        _, other = attached(torch.contiguous_format)
        with pytest.raises(ValueError, match=r"strides {'weight': \[153, 1, 51, 17\]}, and here {}"):
            other.load_state_dict(state)
        return same.state_dict()["residuals"]["weight"].any()

    assert all(ranks(run, world))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_invalid_states_are_refused(ranks, world):
    def run(rank):
        model = DDP(Net())
        fusion = force_plan(quiet().attach(model))
        backward(model, 0, rank)
        state = fusion.state_dict()
        wrong = {**state, "residuals": {"first.weight": torch.zeros(3)}}
        dense = Plan("dense", "dgc", 0.01, "fp32", world, (), {"dense": 1.0}).to_json()
        progress = {"samples": {}, "rounds": [{"dense": 1.0}], "turns": ["dense"]}
        candidates = {"dense": 1.0, "plans": {"dense": dense}, "trial": progress}
        for bad, why in (
            ({}, "not a state of SparseFusion"),
            (None, "NoneType is neither a state of SparseFusion nor a list of states"),
            ([], "the list of states is empty"),
            ({"version": state["version"], "residuals": {}}, "a state of SparseFusion without budget, candidates"),
            ({**state, "residuals": None}, "whose residuals are a NoneType"),
            ({**state, "residuals": {"first.weight": [0.0]}}, "whose residual of 'first.weight' is a list"),
            ({**state, "rank": 1 - rank if rank < 2 else 0}, "the state of rank"),
            (wrong, "a state with 3 elements of 'first.weight'; here it has 6400"),
            ({**state, "step": 9, "plan": "{}"}, "not a plan of sparsefusion"),
            ({**state, "step": "9"}, "whose step is '9'"),
            ({**state, "step": None}, "whose step is None"),
            ({**state, "sparse_since": 1.5}, "whose sparse_since is 1.5"),
            *(
                ({**state, "half_scale": bad}, f"half_scale is {re.escape(str(bad))}")
                for bad in (0.0, -2.0, 3.0, 2.0**65, math.inf, 2)
            ),
            ({**state, "residuals": {"last.bias": torch.zeros(2, 5)}}, r"is torch.float32 of shape \(2, 5\), not flat"),
            (
                {**state, "residuals": {"last.bias": torch.zeros(10).bfloat16()}},
                r"'last.bias' is torch.bfloat16 of shape",
            ),
            ({**state, "candidates": {}}, "whose candidates are not SparseFusion's: KeyError"),
            ({**state, "candidates": candidates | {"dense": "1 s"}}, "whose candidates do not belong together"),
            ({**state, "candidates": candidates | {"trial": progress | {"turns": []}}}, "do not belong together"),
            ({**state, "candidates": candidates | {"trial": progress | {"samples": {"dense": []}}}}, "do not belong"),
            ({**state, "candidates": candidates | {"trial": progress | {"turns": ["fast"]}}}, "do not belong together"),
            ({**state, "candidates": candidates | {"plans": {"fp16": dense}}}, "do not belong together"),
        ):
            with pytest.raises(ValueError, match=why):
                fusion.load_state_dict(bad)
        with pytest.raises(ValueError, match="whose residuals are a NoneType"):  # on one rank
            fusion.load_state_dict({**state, "residuals": None} if rank == 1 else state)
        states = [None] * world
        dist.all_gather_object(states, state)
        with pytest.raises(ValueError, match="rank 1 got state='its own state', rank 0 got state='the list"):
            fusion.load_state_dict(state if rank == 1 else states)
        with pytest.raises(ValueError, match="rank 1 got plan=None, rank 0 got plan="):
            fusion.load_state_dict({**state, "plan": None} if rank == 1 else state)
        after = fusion.state_dict()
        assert after["step"] == 1 and after["plan"] == state["plan"]
        assert all(torch.equal(after["residuals"][name], state["residuals"][name]) for name in state["residuals"])

    ranks(run, world)
