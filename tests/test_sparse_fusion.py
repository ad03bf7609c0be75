"""Sparse gradients through torch's DDP; oracles: DDP itself, and the plain sums of every rank's gradients."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from fused import Net, backward, batch, force, longest_trial, pending, plan, same_on_all_ranks, summed
from sparsefusion import SPARSIFIERS, SparseFusion, observation, trial
from sparsefusion.curve import Curve
from sparsefusion.fabric import Fabric
from sparsefusion.plan import WIRES, Plan, Unit
from sparsefusion.reducer import Reducer
from sparsefusion.session import Session

POINTS = [(1 << i, 1e-3, 1e-3) for i in range(10, 20)]  # bytes, seconds
SPARSE = ("layerwise", "bucket", "selective", "interleaved", "offload")


def quiet(**options):
    """A SparseFusion that reports nothing."""
    return SparseFusion(report=lambda text: None, **options)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_dense_is_ddps_own(ranks, world, view, batched):
    """Bit for bit: new gradients, accumulated ones (which DDP scales otherwise), unused ones, bfloat16; and detached."""

    def run(rank):
        for dtype, none in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
            plain, ours = (
                DDP(
                    Net(dtype),
                    bucket_cap_mb=0.1,
                    gradient_as_bucket_view=view,
                    find_unused_parameters=True,
                    **({"batched_grad_copy": True} if batched else {}),
                )
                for _ in range(2)
            )
            fusion = quiet(mode="dense").attach(ours)
            for step in range(6):
                for model in (plain, ours):
                    model.zero_grad(set_to_none=none)
                    with model.no_sync():
                        model(batch(step, rank, dtype)).square().mean().backward()
                    model(batch(step + 100, rank, dtype), step % 2 == 0).square().mean().backward()
                for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
                    assert torch.equal(p.grad, q.grad) if p.grad is not None else q.grad is None, (dtype, none, step)
                if step == 3:
                    fusion.detach()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_fp16_is_torchs_hook(ranks, world):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def run(rank):
        plain, ours = (DDP(Net(), bucket_cap_mb=0.1) for _ in range(2))
        plain.register_comm_hook(None, fp16_compress_hook)
        quiet(mode="fp16").attach(ours)
        for step in range(3):
            backward(plain, step, rank), backward(ours, step, rank)
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), ours.parameters(), strict=True))

    ranks(run, world)


def conserved(rank, world, steps=5, dtype=torch.float32, changes=None, **options):
    """The largest relative error, over parameters, of applied + pending against the sum of all gradients."""
    ours, reference = DDP(Net(dtype), bucket_cap_mb=0.1), Net(dtype)
    fusion = force(quiet().attach(ours), **options)
    given, applied = {}, {}
    for step in range(steps):
        if changes and step in changes:
            force(fusion, **options | changes[step])
        backward(reference, step, rank, dtype=dtype), backward(ours, step, rank, dtype=dtype)
        assert same_on_all_ranks([p.grad for p in ours.parameters()])
        for (name, p), (_, q) in zip(reference.named_parameters(), ours.module.named_parameters(), strict=True):
            given[name] = given.get(name, 0) + p.grad.double()
            applied[name] = applied.get(name, 0) + q.grad.double()
    worst = 0.0
    if dtype == torch.bfloat16:  # means of what is sent whole are rounded, as the framework's are
        given = {name: total for name, total in given.items() if total.numel() >= 1000}
    for name, total in given.items():
        expected = summed(total)
        error = world * applied[name] + summed(pending(fusion, name, total)) - expected
        worst = max(worst, (error.norm() / expected.norm()).item())
    return worst


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_nothing_is_lost_in_any_mode_and_format(ranks, world):
    def run(rank):
        for mode in SPARSE:
            for wire in WIRES:
                assert conserved(rank, world, mode=mode, wire=wire) < 1e-6, (mode, wire)
        for sparsifier in SPARSIFIERS:
            assert conserved(rank, world, sparsifier=sparsifier) < 1e-6, sparsifier
        assert conserved(rank, world, dtype=torch.float64) < 1e-13
        assert conserved(rank, world, dtype=torch.bfloat16) < 1e-6  # what is rounded off a mean is pending, too

    ranks(run, world)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_nothing_is_lost_whatever_plan_follows(ranks, world, data):
    """Property: plans, formats and densities change between steps; what becomes dense is flushed."""
    plans = st.fixed_dictionaries({
        "mode": st.sampled_from(SPARSE), "density": st.sampled_from([0.01, 0.1, 0.3]), "wire": st.sampled_from(WIRES),
        "sparsifier": st.sampled_from(SPARSIFIERS),
    })  # fmt: skip
    changes = data.draw(st.dictionaries(st.integers(0, 7), plans, max_size=4))

    def run(rank):
        return conserved(rank, world, steps=8, changes=changes)

    assert max(ranks(run, world)) < 1e-5


@pytest.mark.parametrize("world", [2, 3])
def test_pending_gradients_leave_when_all_is_sent_again(ranks, world):
    def run(rank):
        ours, reference = DDP(Net(), bucket_cap_mb=0.1), Net()
        fusion, total = force(quiet().attach(ours)), 0
        for step in range(4):
            if step == 3:
                fusion._session.plan = plan(fusion._session.sizes, world, density=0)  # all of it whole
            backward(reference, step, rank), backward(ours, step, rank)
            total = (
                total + reference.second.weight.grad.double() * world - ours.module.second.weight.grad.double() * world
            )
        assert not fusion.state_dict()["residuals"]
        return summed(total).norm() / summed(reference.second.weight.grad).norm()

    assert max(ranks(run, world)) < 1e-5


@pytest.mark.parametrize("world", [2, 3])
def test_offloaded_and_interleaved_are_bitwise_the_same(ranks, world):
    def run(rank):
        models = [DDP(Net(), bucket_cap_mb=0.1) for _ in range(3)]
        for model, mode in zip(models, ("selective", "offload", "interleaved"), strict=True):
            force(quiet().attach(model), mode=mode)
        for step in range(4):
            for model in models:
                backward(model, step, rank)
            for others in zip(*(model.parameters() for model in models), strict=True):
                assert all(torch.equal(others[0].grad, p.grad) for p in others)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_accumulation_clipping_and_optimizers_keep_ranks_alike(ranks, world):
    """50 steps of parameters that stay bit-identical; parameter groups, AdamW, autocast, clipping of the mean."""

    def run(rank):
        for mode, wire, sparsifier in zip(SPARSE, ("fp32", "int8", "bf16", "fp16", "int8"), SPARSIFIERS, strict=False):
            model = DDP(Net(), bucket_cap_mb=0.1)
            force(quiet().attach(model), mode=mode, wire=wire, sparsifier=sparsifier)
            groups = [{"params": [p], "lr": 1e-3 * (1 + i % 2)} for i, p in enumerate(model.parameters())]
            optimizer = torch.optim.AdamW(groups)
            for step in range(50):
                optimizer.zero_grad()
                with model.no_sync():
                    model(batch(step, rank)).square().mean().backward()
                with torch.autocast("cpu", torch.bfloat16):
                    model(batch(step + 100, rank), spare=True).float().square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            assert same_on_all_ranks(model.parameters()) and all(p.isfinite().all() for p in model.parameters())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_unused_parameters_keep_what_is_pending(ranks, world):
    """DDP does not apply the mean of a parameter that no rank used, so nothing of it may leave, also when all is sent."""

    def run(rank):
        for options in ({"mode": "layerwise"}, {"mode": "bucket"}, {"sparsifier": "randomk"}, {"flushed": True}):
            flushed = options.pop("flushed", False)
            model = DDP(Net(), bucket_cap_mb=0.1, find_unused_parameters=True)
            fusion = force(quiet().attach(model), **options)
            backward(model, 0, rank)
            before = pending(fusion, "spare.weight", model.module.spare.weight)
            if flushed:
                fusion._session.plan = replace(fusion.plan, mode="dense", buffers=())
            backward(model, 1, rank, spare=False)
            assert model.module.spare.weight.grad is None
            assert before.any() and torch.equal(before, pending(fusion, "spare.weight", model.module.spare.weight))
            backward(model, 2, rank, spare=rank == 0)  # used by one rank: its mean is applied on all
            assert model.module.spare.weight.grad.any() and same_on_all_ranks([model.module.spare.weight.grad])

    ranks(run, world)


# What is not finite


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_an_error_everywhere(ranks, world, bad):
    def run(rank):
        for options in [{"mode": mode} for mode in SPARSE] + [{"sparsifier": name} for name in SPARSIFIERS]:
            model = DDP(Net(), bucket_cap_mb=0.1)
            fusion = force(quiet().attach(model), **options)
            backward(model, 0, rank)
            if rank == world - 1:
                model.module.second.weight.register_hook(lambda g: g.index_fill(0, torch.tensor(7), bad))
            with pytest.raises(FloatingPointError, match=r"step 1: the gradient of \S+ is not finite"):
                backward(model, 1, rank)
            assert all(residual.isfinite().all() for residual in fusion.state_dict()["residuals"].values())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_fp16_sends_again_what_is_out_of_its_range(ranks, world):
    def run(rank):
        plain, ours = (DDP(Net(), bucket_cap_mb=0.1) for _ in range(2))
        quiet(mode="fp16").attach(ours)
        for model in (plain, ours) if rank == 0 else ():
            model.module.first.bias.register_hook(lambda g: g * 1e30)
        for step in range(3):
            backward(plain, step, rank), backward(ours, step, rank)
            assert same_on_all_ranks([p.grad for p in ours.parameters()])
            for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
                assert (q.grad.double() - p.grad).norm() <= 1e-3 * p.grad.double().norm()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_fp16_reports_what_is_not_finite_and_dense_is_ddps_own(ranks, world):
    def run(rank):
        for mode in ("dense", "fp16"):
            model = DDP(Net())
            quiet(mode=mode).attach(model)
            if rank == 0:
                model.module.first.bias.register_hook(lambda g: g * math.inf)
            if mode == "dense":
                backward(model, 0, rank)
            else:
                with pytest.raises(FloatingPointError, match="step 0: the gradient of first.bias"):
                    backward(model, 0, rank)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_skipped_steps_leave_no_trace(ranks, world):
    """With a GradScaler: a run with three overflows has the residuals and parameters of one without these batches.

    Before one of them, residuals have been flushed into a step that sends all.
    """

    def run(rank):
        models = [DDP(Net(), bucket_cap_mb=0.1) for _ in range(2)]
        found = []
        for model, overflows in zip(models, ((2, 4, 6), ()), strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
            fusion = force(quiet(loss_scale=scaler.get_scale).attach(model))
            sparse, whole = fusion.plan, replace(fusion.plan, mode="dense", buffers=())
            optimizer, batches = torch.optim.SGD(model.parameters(), 0.1), iter(range(100))
            for step in range(10 if overflows else 7):
                optimizer.zero_grad()
                wrong = step in overflows
                done = step - sum(each < step for each in overflows)
                fusion._session.plan = whole if done in (3, 4) else sparse  # 3 is what overflows as step 4
                loss = model(batch(99 if wrong else next(batches), rank), True).square().mean()
                scaler.scale(loss * math.inf if wrong and rank == 0 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
            found.append((list(model.parameters()), fusion.state_dict()["residuals"]))
        (parameters, residuals), (expected, others) = found
        assert all(map(torch.equal, parameters, expected))
        assert residuals.keys() == others.keys() and all(torch.equal(residuals[n], others[n]) for n in others)

    ranks(run, world)


def divided(world):
    """The calling rank's data group and model group, where two ranks share a model."""
    parts = [[rank for rank in range(world) if rank % 2 == part] for part in (0, 1)]
    return dist.new_subgroups_by_enumeration(parts)[0], dist.new_subgroups(2)[0]


@pytest.mark.parametrize("world", [4, 6])
def test_parts_of_a_divided_model_skip_a_step_together(ranks, world):
    """What is not finite in one part is an error in all, or with a loss scale a step without a trace in all."""

    def run(rank):
        data, model_group = divided(world)
        for scale in (None, lambda: 1.0):
            model = DDP(Net(), process_group=data)
            fusion = quiet(loss_scale=scale, model_group=model_group)
            force(fusion.attach(model))
            backward(model, 0, rank)
            before = fusion.state_dict()["residuals"]
            if rank == 0:
                model.module.second.weight.register_hook(lambda g: g.index_fill(0, torch.tensor(7), math.nan))
            if scale is None:
                with pytest.raises(FloatingPointError, match="a parameter of another" if rank % 2 else "second.weight"):
                    backward(model, 1, rank)
                continue
            backward(model, 1, rank)
            after = fusion.state_dict()["residuals"]
            assert all(torch.equal(before[name], after[name]) for name in before)

    ranks(run, world)


@pytest.mark.parametrize("world", [4, 6])
def test_parts_of_a_divided_model_refuse_together(ranks, world):
    """One rank was given another density."""

    def run(rank):
        data, model_group = divided(world)
        fusion = quiet(density=0.02 if rank == 2 else 0.01, model_group=model_group)
        model = DDP(Net(), process_group=data)
        fusion.attach(model)
        with pytest.raises(ValueError, match="asked something else than rank 0"):
            backward(model, 0, rank)

    ranks(run, world)


@pytest.mark.parametrize("world", [4, 6])
def test_what_some_replicas_do_not_use_is_flushed_later(ranks, world):
    """With a loss scale, and parts of the model: every rank asks the others in the same steps."""

    def run(rank):
        data, model_group = divided(world)
        model = DDP(Net(), process_group=data, find_unused_parameters=True)
        fusion = quiet(loss_scale=lambda: 1.0, model_group=model_group)
        force(fusion.attach(model))
        backward(model, 0, rank)
        fusion._session.plan = replace(fusion.plan, mode="dense", buffers=())
        for step in (1, 2):
            backward(model, step, rank, spare=rank > 1)
            assert set(fusion.state_dict()["residuals"]) == (set() if rank > 1 else {"spare.weight"})
        for step in (3, 4):
            backward(model, step, rank)
            assert not fusion.state_dict()["residuals"]

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_framework_overwrites_was_looked_at(ranks, world):
    """Two atoms in the same memory, as ZeRO 1 has them; the first one overflows, so no residual may have gone."""

    def run(rank):
        session = Session(Reducer(dist.group.WORLD), {"a": 9, "b": 9}, "cpu", holds=False, loss_scale=lambda: 1.0)
        session.plan = Plan("dense", "dgc", 0.01, "fp32", world)
        session.restore(0, {name: torch.full((9,), 1.0 + rank) for name in "ab"})
        memory = torch.empty(9)
        for name, value in (("a", math.inf if rank == 0 else 1.0), ("b", 1.0)):
            memory.fill_(value)
            session.reduce({name: memory}, [memory], lambda: dist.all_reduce(memory)).wait()
            assert memory[0] == (math.inf if name == "a" else world + sum(range(1, world + 1)))
        with pytest.raises(RuntimeError, match="step 0 has begun"):
            session.settle()
        session.end_step()
        session.settle()
        assert all(torch.equal(r, torch.full((9,), 1.0 + rank)) for r in session.reducer.residuals.values())
        with pytest.raises(RuntimeError, match="a step ended without a gradient"):
            session.end_step()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_of_several_dtypes_lose_nothing_together(ranks, world):
    def run(rank):
        dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64, "d": torch.float16}
        reducer = Reducer(dist.group.WORLD)
        unit, given, applied = Unit(tuple(dtypes), 4000, 100), dict.fromkeys(dtypes, 0), dict.fromkeys(dtypes, 0)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            gradients = {name: torch.randn(1000, generator=generator).to(dtype) for name, dtype in dtypes.items()}
            given = {name: given[name] + g.double() for name, g in gradients.items()}
            reducer.start([unit], gradients).wait()
            applied = {name: applied[name] + world * g.double() for name, g in gradients.items()}
        for name in dtypes:
            error = applied[name] + summed(reducer.residuals[name]) - summed(given[name])
            assert error.norm() <= 1e-6 * summed(given[name]).norm(), name

    ranks(run, world)


def test_what_is_pending_survives_a_narrow_format():
    """Residuals far below float16's smallest number, flushed into gradients that a loss scale has made larger."""
    reducer, gradient = Reducer(None), torch.ones(10, dtype=torch.float16)
    reducer.residuals["a"] = torch.full((10,), 1e-8)
    reducer.flush({"a": gradient}, scale=2.0**20)
    assert gradient.allclose(torch.tensor(1 + 1e-8 * 2**20).half()) and not reducer.residuals


# Checkpoints


def trained(model, fusion, rank, steps):
    """Steps of SGD with momentum; its optimizer is kept beside the model."""
    if not hasattr(model, "optimizer"):
        model.optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    for step in steps:
        backward(model, step, rank)
        model.optimizer.step()


@pytest.mark.parametrize("world", [2, 3])
def test_a_resumed_run_is_the_straight_one(ranks, world, tmp_path):
    """Bitwise, with a frozen plan, also on a model built afresh, whose DDP first has one bucket with all parameters."""

    def run(rank):
        for options in ({"mode": "bucket"}, {"sparsifier": "randomk"}, {"mode": "interleaved", "wire": "bf16"}):
            straight, first, second = (DDP(Net(), bucket_cap_mb=0.05) for _ in range(3))
            trained(straight, force(quiet().attach(straight), **options), rank, range(12))
            fusion = force(quiet().attach(first), **options)
            trained(first, fusion, rank, range(7))
            path = tmp_path / f"{rank}.pt"
            torch.save([first.state_dict(), first.optimizer.state_dict(), fusion.state_dict()], path)
            model, optimizer, state = torch.load(path, weights_only=True)
            resumed = quiet(density=0.05, **options).attach(second)
            second.load_state_dict(model)
            second.optimizer = torch.optim.SGD(second.parameters(), 1e-3, momentum=0.9)
            second.optimizer.load_state_dict(optimizer)
            resumed.load_state_dict(state)
            assert resumed.plan.hash == fusion.plan.hash
            trained(second, resumed, rank, range(7, 12))
            assert all(map(torch.equal, straight.parameters(), second.parameters())), options

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_another_number_of_ranks_applies_what_is_pending(ranks, world, tmp_path):
    def save(rank):
        model = DDP(Net())
        fusion = force(quiet().attach(model))
        for step in range(3):
            backward(model, step, rank)
        torch.save(fusion.state_dict(), tmp_path / f"{rank}.pt")
        return pending(fusion, "first.weight", model.module.first.weight)

    mean = sum(ranks(save, 4)) / 4
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(4)]

    def load(rank):
        model = DDP(Net())
        fusion = quiet(mode="layerwise", density=0.05).attach(model)
        with pytest.raises(ValueError, match=f"one of 4 ranks, and here are {world}: give load_state_dict the list"):
            fusion.load_state_dict(states[0])
        with pytest.raises(ValueError, match=r"3 states of ranks \[0, 1, 2\], and there were 4 ranks"):
            fusion.load_state_dict(states[:3])
        fusion.load_state_dict(states)
        assert fusion.plan.ranks == world and fusion.plan.mode == "layerwise"
        return summed(pending(fusion, "first.weight", model.module.first.weight)) / world

    for found in ranks(load, world):
        assert (found - mean).norm() <= 1e-6 * mean.norm()


@pytest.mark.parametrize("world", [4, 5])
def test_a_plan_that_would_not_help_here_is_not_kept(ranks, world):
    """A density of 0.3 is worth something on 2 ranks only. What is pending goes with the first step."""

    def save(rank):
        model = DDP(Net())
        fusion = force(quiet(density=0.3).attach(model), density=0.3)
        backward(model, 0, rank)
        return fusion.state_dict()

    states = ranks(save, 2)

    def load(rank):
        model, said = DDP(Net()), []
        fusion = SparseFusion(density=0.3, mode="layerwise", report=said.append).attach(model)
        fusion.load_state_dict(states)
        backward(model, 1, rank)
        assert fusion.plan.mode == "dense" and not fusion.state_dict()["residuals"]
        return said

    assert "layerwise would send more than dense" in ranks(load, world)[0][-1]


@pytest.mark.parametrize("world", [2, 3])
def test_a_plan_without_a_parameter_is_not_kept(ranks, world):
    """It was frozen when the plan was made."""

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
        with pytest.raises(RuntimeError, match="the plan has no 'last.weight'"):
            backward(fresh, 12, rank)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ_are_told_apart(ranks, world):
    """Other options, or states of other steps: an error on every rank when the next step begins."""

    def run(rank):
        known = Fabric(tuple(Curve.fit(name, world, POINTS) for name in ("all_reduce", "all_gather")), {})
        for options in ({"density": 0.01 * (1 + rank)}, {"fabric": None if rank else known}):
            model = DDP(Net())
            quiet(**options).attach(model)
            with pytest.raises(ValueError, match=r"ranks of SparseFusion .* were asked something else than rank 0"):
                backward(model, 0, rank)
        model = DDP(Net())
        fusion = force(quiet(density=0.05, mode="layerwise").attach(model))
        for step in range(2):
            backward(model, step, rank)
            if step == (rank == 1):
                state = fusion.state_dict()
        states = [None] * world
        dist.all_gather_object(states, state)
        with pytest.raises(
            ValueError, match="states of different runs or steps: rank 0's of step 1, rank 1's of step 2"
        ):
            fusion.load_state_dict(states)
        fusion.load_state_dict(state)
        with pytest.raises(ValueError, match=r"were asked something else than rank 0: \(2, .* instead of \(1, "):
            backward(model, 2, rank)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_an_undecided_run_does_not_begin_again(ranks, monkeypatch, world):
    """Saved while plans take turns, after a warm-up that was half over: nothing is watched again."""
    monkeypatch.setattr(trial, "ROUNDS", 2)

    def run(rank):
        said = []
        for steps in (9, 20):  # within the warm-up, within the turns
            saved, fresh = DDP(Net()), DDP(Net())
            fusion = SparseFusion(0.02, density_warmup=10, report=said.append).attach(saved)
            for step in range(steps):
                backward(saved, step, rank)
            state = fusion.state_dict()
            assert state["plan"] is None and state["candidates"]
            resumed = SparseFusion(0.02, density_warmup=10, report=said.append).attach(fresh)
            resumed.load_state_dict(state)
            for step in range(steps, 17 + longest_trial()):
                backward(fresh, step, rank)
            assert resumed._decided and resumed.state_dict()["sparse_since"] == 5
        return said

    said = ranks(run, world)[0]
    assert sum("Predicted:" in text for text in said) == 2 == sum("for steps took" in text for text in said)


@pytest.mark.parametrize("world", [2, 3])
def test_planning_anew_interrupts_a_warm_up(ranks, world):
    def run(rank):
        model, plain = DDP(Net(), bucket_cap_mb=0.1), DDP(Net(), bucket_cap_mb=0.1)
        fusion = quiet(density=0.02, mode="layerwise", density_warmup=50).attach(model)
        for step in range(8):
            backward(model, step, rank), backward(plain, step, rank)
        assert fusion._session.density_ratio > 1
        fusion.replan()
        for step in (8, 9):
            backward(model, step, rank), backward(plain, step, rank)
        assert fusion._session.density_ratio == 1 and not fusion._session.sends_all
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        for step in range(10, 14):
            backward(model, step, rank)
        assert fusion.plan.mode == "layerwise" and fusion.state_dict()["sparse_since"] == 5  # it goes on where it was

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_states_of_something_else_are_refused(ranks, world):
    def run(rank):
        model = DDP(Net())
        fusion = force(quiet().attach(model))
        backward(model, 0, rank)
        state = fusion.state_dict()
        wrong = {**state, "residuals": {"first.weight": torch.zeros(3)}}
        for bad, why in (
            ({}, "not a state of SparseFusion"),
            ({**state, "rank": 1 - rank if rank < 2 else 0}, "the state of rank"),
            (wrong, "a state with 3 numbers of 'first.weight'; here it has 6400"),
            ({**state, "step": 9, "plan": "{}"}, "not a plan of sparsefusion"),
        ):
            with pytest.raises(ValueError, match=why):
                fusion.load_state_dict(bad)
        after = fusion.state_dict()
        assert after["step"] == 1 and after["plan"] == state["plan"]
        assert all(torch.equal(after["residuals"][name], state["residuals"][name]) for name in state["residuals"])

    ranks(run, world)


# Attaching


@pytest.mark.parametrize("world", [1, 2])
def test_what_does_not_fit_is_refused_by_name(ranks, world):
    class Embedded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(5, 3, sparse=True)

    def run(rank):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        hooked, ours = DDP(Net()), DDP(Net())
        hooked.register_comm_hook(None, allreduce_hook)
        fusion = quiet().attach(ours)
        builtin = DDP(Net())
        builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        for target, why in (
            (hooked, "has the communication hook allreduce_hook"),
            (builtin, "this DDP takes no communication hook: register_comm_hook"),
            (
                DDP(Net(), skip_all_reduce_unused_params=True, find_unused_parameters=True),
                "skip_all_reduce_unused_params",
            ),
            (ours, "another SparseFusion is attached"),
            (Net(), "attaches to torch's DistributedDataParallel, Megatron-Core's, or a DeepSpeed engine; this is Net"),
            (DDP(Embedded()), "words has sparse=True"),
        ):
            with pytest.raises(ValueError, match=why):
                quiet().attach(target)
        with pytest.raises(ValueError, match="attached already"):
            fusion.attach(DDP(Net()))
        fusion.detach()
        for action in (lambda: fusion.plan, fusion.detach, fusion.state_dict, fusion.replan):
            with pytest.raises(ValueError, match="not attached"):
                action()
        fusion.attach(ours)
        backward(ours, 0, rank)

    ranks(run, world)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"density": 0}, "density=0 must be above 0"),
        ({"density": 1.5}, "at most 1"),
        ({"mode": "sparse"}, "mode='sparse' is none of dense, fp16"),
        ({"sparsifier": "top"}, "sparsifier='top' is none of topk"),
        ({"wire": "fp8"}, "wire='fp8' is none of fp32"),
        ({"density_warmup": -1}, "density_warmup=-1 must be a number of steps"),
        ({"budget": "money"}, "budget='money' is none of bytes, elements"),
    ],
)
def test_wrong_options(options, why):
    with pytest.raises(ValueError, match=why):
        SparseFusion(**options)


@pytest.mark.parametrize("world", [2, 3])
def test_a_static_graph_and_checkpointed_activations(ranks, world):
    """With both of them DDP hands gradients over when it likes; what is sent does not depend on it."""

    class Checkpointed(Net):
        def forward(self, x, spare=False):
            return checkpoint(super().forward, x, spare, use_reentrant=False)

    def run(rank):
        models = [DDP(Net(), bucket_cap_mb=0.05), DDP(Checkpointed(), bucket_cap_mb=0.05, static_graph=True)]
        for model in models:
            force(quiet().attach(model), mode="interleaved")
        for step in range(5):
            for model in models:
                backward(model, step, rank)
            for p, q in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(p.grad, q.grad)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_what_ddp_ignores_is_left_alone(ranks, world):
    def run(rank):
        net = Net()
        net._ddp_params_and_buffers_to_ignore = ["spare.bias"]
        model = DDP(net, bucket_cap_mb=0.05)
        fusion = quiet(mode="layerwise", density=0.05).attach(model)
        for step in range(7):
            backward(model, step, rank)
        names = [name for buffer in fusion.plan.buffers for name in buffer.names]
        assert fusion.plan.mode == "layerwise" and sorted([*names, "spare.bias"]) == sorted(
            dict(net.named_parameters())
        )
        assert same_on_all_ranks([p.grad for p in model.parameters() if p is not net.spare.bias])

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_frozen_after_ddp_was_built(ranks, world):
    """DDP goes on reducing it."""

    def run(rank):
        model = DDP(Net(), bucket_cap_mb=0.05, find_unused_parameters=True)
        for p in model.module.first.parameters():
            p.requires_grad_(False)
        fusion = quiet(mode="layerwise", density=0.05).attach(model)
        for step in range(7):
            backward(model, step, rank)
        model.module.second.weight.requires_grad_(False)
        fusion.replan()
        for step in range(7, 14):
            backward(model, step, rank)
        names = {name for buffer in fusion.plan.buffers for name in buffer.names}
        assert fusion.plan.mode == "layerwise" and names == set(dict(model.module.named_parameters()))
        assert same_on_all_ranks([p.grad for p in model.parameters() if p.requires_grad])

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_a_fabric_without_these_ranks_is_refused_by_all(ranks, world):
    def run(rank):
        curve = Curve.fit("all_reduce", world, POINTS)
        with pytest.raises(ValueError, match="all_gather"):
            quiet(fabric=Fabric((curve,), {})).attach(DDP(Net()))

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_an_error_of_the_planning_rank_is_everyones(ranks, world):
    def run(rank):
        def report(text):
            raise OSError("no paper")

        model = DDP(Net())
        SparseFusion(0.02, mode="layerwise", report=report).attach(model)
        for step in range(4):
            backward(model, step, rank)
        with pytest.raises(RuntimeError, match=f"rank 0 of {world}: OSError: no paper"):
            backward(model, 4, rank)

    ranks(run, world)


# Planning while it runs


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_modes_watch_five_steps_then_send_what_they_say(ranks, monkeypatch, world):
    """Where already the smallest message is slow; and the training's random numbers stay its own."""
    monkeypatch.setattr(observation, "SLOW_S", 0.0)

    def run(rank):
        said = []
        for mode in ("layerwise", "bucket", "selective", "interleaved"):
            model = DDP(Net(), bucket_cap_mb=0.05)
            fusion, random = SparseFusion(0.02, mode=mode, report=said.append).attach(model), torch.get_rng_state()
            for step in range(5):
                assert fusion.plan.mode == "dense"
                backward(model, step, rank)
            assert fusion.plan.mode == mode and fusion.plan.sent_numbers[2] == sum(
                p.numel() for p in model.parameters()
            )
            assert len(set(ranks_hashes(fusion.plan.hash))) == 1 and torch.equal(random, torch.get_rng_state())
            counter = fusion._session.reducer.counter
            counter.reset()
            backward(model, 5, rank)
            dense, sparse, _ = fusion.plan.sent_numbers
            assert counter.nbytes == 4 * dense + 8 * sparse
        return said

    found = ranks(run, world)
    assert [len(said) for said in found] == [4] + [0] * (world - 1)
    assert found[0][0].startswith(f"sparsefusion: {world} ranks, 8 gradients of 44,300 numbers")


def ranks_hashes(mine):
    """Every rank's."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_auto_decides_the_same_everywhere(ranks, monkeypatch, world):
    monkeypatch.setattr(trial, "ROUNDS", 2)

    def run(rank):
        model, said = DDP(Net()), []
        fusion = SparseFusion(0.02, report=said.append).attach(model)
        for step in range(5 + longest_trial()):
            backward(model, step, rank)
        assert fusion._decided and len(set(ranks_hashes(fusion.plan.hash))) == 1
        assert same_on_all_ranks([p.grad for p in model.parameters()])
        return fusion.plan.mode, set(fusion.plan.predicted)

    modes, predicted = zip(*ranks(run, world), strict=True)
    assert len(set(modes)) == 1
    assert all(each == {"dense", "fp16", "layerwise", "bucket", "selective", "interleaved"} for each in predicted)


@pytest.mark.parametrize("world", [2, 4])
def test_a_density_that_cannot_help_stays_dense(ranks, world):
    def run(rank):
        said = []
        fusion = SparseFusion(1.1 / world if world > 1 else 1, mode="layerwise", report=said.append).attach(DDP(Net()))
        return fusion.plan.mode, fusion._decided, said

    found = ranks(run, world)
    assert all(mode == "dense" and decided for mode, decided, _ in found)
    assert "would send more than dense" in found[0][2][0]


@pytest.mark.parametrize("world", [2, 4])
def test_density_falls_to_its_own(ranks, world):
    def run(rank):
        model, sent = DDP(Net()), []
        fusion = SparseFusion(0.01, mode="layerwise", density_warmup=10, report=lambda text: None).attach(model)
        for step in range(20):
            fusion._session.reducer.counter.reset()
            backward(model, step, rank)
            sent.append(fusion._session.reducer.counter.nbytes)
        return sent, sum(p.numel() for p in model.parameters())

    for sent, total in ranks(run, world):
        own = sent[-1]
        assert own == sent[15] < 8 * (0.01 * total + 8)
        first = next(step for step in range(5, 20) if sent[step])
        assert all(a > b for a, b in zip(sent[first:10], sent[first + 1 : 11], strict=True))
        if world == 2:  # a quarter is less than half
            assert first == 5 and abs(sent[5] / (8 * 0.25 * total) - 1) < 0.01


@pytest.mark.parametrize("world", [2, 3])
def test_subgroups(ranks, world):
    """Data parallelism over a part of the world."""

    def run(rank):
        groups = [dist.new_group(list(range(world))), dist.new_group(list(range(world, 2 * world)))]
        group, mine = groups[rank // world], rank % world
        model = DDP(Net(), process_group=group)
        force(quiet().attach(model))
        for step in range(2):
            backward(model, step, rank)
        gradient = model.module.second.weight.grad
        first = gradient.clone()
        dist.broadcast(first, rank - mine, group=group)
        assert torch.equal(first, gradient)
        return gradient

    found = ranks(run, 2 * world)
    assert not torch.equal(found[0], found[-1])
