"""Sparse gradients through torch's DDP; oracles: DDP itself, and the plain sums of every rank's gradients."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as DDP

from commfabric.collectives.counted import begin_all_gather
from fused import Net, backward, batch, force_plan, plan, quiet, residual_of, same_on_all_ranks, sum_over_ranks
from sparsefusion import SPARSIFIERS
from sparsefusion.gradients.error_feedback import ErrorFeedback, Selection
from sparsefusion.gradients.exchanges import SparseMessage
from sparsefusion.gradients.reducer import Reducer
from sparsefusion.gradients.session import Session
from sparsefusion.planning.plan import WIRES, Plan, Unit

SPARSE = ("layerwise", "bucket", "selective", "interleaved", "offload")


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_dense_mode_has_ddps_bits(ranks, world, view, batched):
    """With new, accumulated (which DDP scales differently) and unused gradients, and bfloat16; also after `detach()`."""

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


def conservation_error(rank, world, steps=5, dtype=torch.float32, changes=None, **options):
    """The largest relative error, over parameters, of applied means + residuals against the sum of all gradients."""
    ours, reference = DDP(Net(dtype), bucket_cap_mb=0.1), Net(dtype)
    fusion = force_plan(quiet().attach(ours), **options)
    given, applied = {}, {}
    for step in range(steps):
        if changes and step in changes:
            force_plan(fusion, **options | changes[step])
        backward(reference, step, rank, dtype=dtype), backward(ours, step, rank, dtype=dtype)
        assert same_on_all_ranks([p.grad for p in ours.parameters()])
        for (name, p), (_, q) in zip(reference.named_parameters(), ours.module.named_parameters(), strict=True):
            given[name] = given.get(name, 0) + p.grad.double()
            applied[name] = applied.get(name, 0) + q.grad.double()
    worst = 0.0
    if dtype == torch.bfloat16:  # means of dense gradients are rounded to bfloat16, as the framework's are
        given = {name: total for name, total in given.items() if total.numel() >= 1000}
    for name, total in given.items():
        expected = sum_over_ranks(total)
        error = world * applied[name] + sum_over_ranks(residual_of(fusion, name, total)) - expected
        worst = max(worst, (error.norm() / expected.norm()).item())
    return worst


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_means_and_residuals_add_up_to_all_gradients(ranks, world):
    def run(rank):
        for mode in SPARSE:
            for wire in WIRES:
                assert conservation_error(rank, world, mode=mode, wire=wire) < 1e-6, (mode, wire)
        for sparsifier in SPARSIFIERS:
            assert conservation_error(rank, world, sparsifier=sparsifier) < 1e-6, sparsifier
        assert conservation_error(rank, world, dtype=torch.float64) < 1e-13
        assert (
            conservation_error(rank, world, dtype=torch.bfloat16) < 1e-6
        )  # what is rounded off a mean is in the residual

    ranks(run, world)


@pytest.mark.full
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_means_and_residuals_add_up_when_plans_change(ranks, world, data):
    """Property: plans, formats and densities change between steps; residuals of gradients that become dense are flushed."""
    names = [name for name, _ in Net().named_parameters()]
    plans = st.fixed_dictionaries({
        "mode": st.sampled_from(SPARSE), "density": st.sampled_from([0.01, 0.1, 0.3]), "wire": st.sampled_from(WIRES),
        "sparsifier": st.sampled_from(SPARSIFIERS), "early": st.booleans(),
        "whole": st.sets(st.sampled_from(names)) | st.just(set(names)),
    })  # fmt: skip
    changes = data.draw(st.dictionaries(st.integers(0, 7), plans, max_size=4))

    def run(rank):
        return conservation_error(rank, world, steps=8, changes=changes)

    assert max(ranks(run, world)) < 1e-5


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_residuals_are_flushed_when_all_gradients_become_dense(ranks, world):
    def run(rank):
        ours, reference = DDP(Net(), bucket_cap_mb=0.1), Net()
        fusion, total = force_plan(quiet().attach(ours)), 0
        for step in range(4):
            if step == 3:
                fusion._session.plan = plan(sizes := fusion._session.sizes, world, whole=sizes)
            backward(reference, step, rank), backward(ours, step, rank)
            total = (
                total + reference.second.weight.grad.double() * world - ours.module.second.weight.grad.double() * world
            )
        assert not fusion.state_dict()["residuals"]
        return sum_over_ranks(total).norm() / sum_over_ranks(reference.second.weight.grad).norm()

    assert max(ranks(run, world)) < 1e-5


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_offload_and_interleaved_have_the_bits_of_selective(ranks, monkeypatch, world, view):
    """Also if dense gradients are sent before their bucket is complete, and after accumulation without messages."""
    sent_early, gradient_ready = [], Session.gradient_ready

    def counted(session, *arguments):
        before = len(session._reductions)
        gradient_ready(session, *arguments)
        sent_early.append(len(session._reductions) - before)

    monkeypatch.setattr(Session, "gradient_ready", counted)

    def run(rank):
        models = [DDP(Net(), bucket_cap_mb=0.1, gradient_as_bucket_view=view) for _ in range(4)]
        for model, mode in zip(models, ("selective", "offload", "interleaved", "interleaved"), strict=True):
            force_plan(quiet().attach(model), mode=mode, early=model is models[-1], whole={"first.bias", "second.bias"})
        for step in range(4):
            for model in models:
                with model.no_sync():
                    backward(model, step, rank)
                model(batch(step + 100, rank), True).square().mean().backward()
            for others in zip(*(model.parameters() for model in models), strict=True):
                assert all(torch.equal(others[0].grad, p.grad) for p in others)
        return sum(sent_early)

    assert min(ranks(run, world)) >= 3  # not in the first step, in which all gradients are in one bucket


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_parameters_stay_equal_on_all_ranks(ranks, world):
    """Bit for bit over 12 steps, with accumulation, parameter groups, AdamW, autocast, and clipping of the mean."""

    def run(rank):
        rest = zip(("fp32", "int8", "bf16", "fp16", "int8"), SPARSIFIERS, strict=False)
        for mode, options in [*zip(SPARSE, rest, strict=True), *((mode, None) for mode in ("dense", "fp16", "auto"))]:
            model = DDP(Net(), bucket_cap_mb=0.1)
            fusion = quiet(mode=mode).attach(model)
            if options:
                force_plan(fusion, mode=mode, wire=options[0], sparsifier=options[1])
            groups = [{"params": [p], "lr": 1e-3 * (1 + i % 2)} for i, p in enumerate(model.parameters())]
            optimizer = torch.optim.AdamW(groups)
            for step in range(12):
                optimizer.zero_grad()
                with model.no_sync():
                    model(batch(step, rank)).square().mean().backward()
                with torch.autocast("cpu", torch.bfloat16):
                    model(batch(step + 100, rank), spare=True).float().square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            assert same_on_all_ranks(model.parameters()) and all(p.isfinite().all() for p in model.parameters())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_unused_parameters_keep_their_residuals(ranks, world):
    """DDP does not apply the mean of a parameter that no rank used, so its residual is not sent, even in a dense step."""

    def run(rank):
        for options in ({"mode": "layerwise"}, {"mode": "bucket"}, {"sparsifier": "randomk"}, {"flushed": True}):
            flushed = options.pop("flushed", False)
            model = DDP(Net(), bucket_cap_mb=0.1, find_unused_parameters=True)
            fusion = force_plan(quiet().attach(model), **options)
            backward(model, 0, rank)
            before = residual_of(fusion, "spare.weight", model.module.spare.weight)
            if flushed:
                fusion._session.plan = replace(fusion.plan, mode="dense", buffers=())
            backward(model, 1, rank, spare=False)
            assert model.module.spare.weight.grad is None
            assert before.any() and torch.equal(before, residual_of(fusion, "spare.weight", model.module.spare.weight))
            backward(model, 2, rank, spare=rank == 0)  # used by one rank: its mean is applied on all
            assert model.module.spare.weight.grad.any() and same_on_all_ranks([model.module.spare.weight.grad])

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("k", [100, 40_000])
def test_unused_parameters_do_not_compete_for_k(ranks, world, k):
    """Each rank leaves another parameter unused, whose residual is the largest. Some ranks have fewer than 40,000 others."""
    sizes = {"a": 1000, "b": 20_000, "c": 30_000}

    def run(rank):
        generator = torch.Generator().manual_seed(rank)
        gradients = {name: torch.randn(n, generator=generator) for name, n in sizes.items()}
        dormant = "bca"[rank]
        gradients[dormant].zero_()
        given = torch.cat([*gradients.values()])
        for sparsifier in ("dgc", "topk"):
            reducer = Reducer(dist.group.WORLD, sparsifier)
            reducer.feedback.residuals[dormant] = torch.full((sizes[dormant],), 1e6)
            means = {name: gradient.clone() for name, gradient in gradients.items()}
            reducer.start([Unit(tuple(sizes), sum(sizes.values()), k)], means).wait()
            sent = torch.zeros_like(given)
            indices = given.abs().topk(k).indices
            sent[indices] = given[indices]
            assert torch.cat([*means.values()]).double().allclose(sum_over_ranks(sent) / world, atol=1e-6)
            assert reducer.feedback.residuals[dormant].eq(1e6).all()
            left = torch.cat([reducer.feedback.residuals[name] for name in sizes if name != dormant])
            assert left.eq(0).sum() == min(k, len(left))

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mode", ["layerwise", "bucket", "fp16", "dense"])
def test_join_with_uneven_data(ranks, world, mode):
    """In DDP's join(), means are over all ranks, and ranks that have no more data keep their residuals."""

    def run(rank):
        ours = DDP(Net(), bucket_cap_mb=0.1)
        fusion = quiet(mode=mode).attach(ours)
        if mode in SPARSE:
            force_plan(fusion, mode=mode)
        given, applied = {}, {name: 0 for name, _ in ours.module.named_parameters()}
        with ours.join():
            for step in range(2 + rank):
                backward(ours, step, rank)
                applied = {name: applied[name] + world * p.grad.double() for name, p in ours.module.named_parameters()}
        reference = Net()
        for step in range(2 + rank):
            backward(reference, step, rank)
            given = {name: given.get(name, 0) + p.grad.double() for name, p in reference.named_parameters()}
        for name, gradient in given.items():
            total, left = sum_over_ranks(gradient), sum_over_ranks(residual_of(fusion, name, gradient))
            assert bool(left.any()) == (mode in SPARSE and gradient.numel() >= 1000), name
            if rank == world - 1:
                assert (applied[name] + left - total).norm() <= (1e-3 if mode == "fp16" else 1e-5) * total.norm(), name

    ranks(run, world)


# Gradients that are not finite


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_are_an_error_on_every_rank(ranks, world, bad):
    def run(rank):
        wires = [{"mode": mode, "wire": wire} for mode in ("layerwise", "bucket") for wire in WIRES]
        for options in [{"mode": mode} for mode in SPARSE[2:]] + [{"sparsifier": name} for name in SPARSIFIERS] + wires:
            model = DDP(Net(), bucket_cap_mb=0.1)
            fusion = force_plan(quiet().attach(model), **options)
            backward(model, 0, rank)
            if rank == world - 1:
                model.module.second.weight.register_hook(lambda g: g.index_fill(0, torch.tensor(7), bad))
            with pytest.raises(FloatingPointError, match=r"step 1: the gradient of \S+ is not finite"):
                backward(model, 1, rank)
            assert all(residual.isfinite().all() for residual in fusion.state_dict()["residuals"].values())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_ddp_can_continue_after_an_error(ranks, world, how):
    """After an error in the first step, which static graphs treat specially, and in a later one."""

    def run(rank):
        model = DDP(Net(), bucket_cap_mb=0.05, **{how: True})
        fusion = force_plan(quiet().attach(model))
        for step in range(6):
            if step in (0, 3):
                factor = math.nan if rank == 0 else 1
                wrong = model.module.second.weight.register_hook(lambda g, factor=factor: g * factor)
                with pytest.raises(FloatingPointError, match=f"step {step}: the gradient of second.weight"):
                    backward(model, step, rank)
                wrong.remove()
                continue
            backward(model, step, rank)
            assert same_on_all_ranks(p.grad for p in model.parameters())
            assert all(p.grad.isfinite().all() for p in model.parameters())
        assert fusion.state_dict()["step"] == 6

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_nonfinite_gradients_are_an_error_on_ranks_without_data(ranks, world):
    """In join(), where these ranks run no backward pass of their own."""

    def run(rank):
        model = DDP(Net(), bucket_cap_mb=0.05)
        force_plan(quiet().attach(model))
        with pytest.raises(FloatingPointError, match="step 1: the gradient of second.weight"), model.join():
            for step in range(1 + bool(rank)):
                if step:
                    model.module.second.weight.register_hook(lambda g: g * math.nan)
                backward(model, step, rank)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_nonfinite_dense_step_keeps_residuals(ranks, world):
    def run(rank):
        model = DDP(Net(), bucket_cap_mb=0.1)
        fusion = force_plan(quiet(mode="layerwise").attach(model))
        backward(model, 0, rank)
        fusion.replan()
        before = fusion.state_dict()["residuals"]
        if rank == 0:
            model.module.second.weight.register_hook(lambda g: g * math.nan)
        with pytest.raises(FloatingPointError, match="step 1: the gradient of .* is not finite on some rank"):
            backward(model, 1, rank)
        after = fusion.state_dict()["residuals"]
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_dense_steps_without_residuals_are_not_checked(ranks, world):
    """Nor is the first step of a resumed run, nor a dense step after sparse ones in which a parameter was never used."""

    def with_nan(model, step, rank):
        bad = model.module.first.weight.register_hook(lambda g: g * math.nan)
        backward(model, step, rank, spare=False)
        bad.remove()
        assert model.module.first.weight.grad.isnan().all()

    def run(rank):
        first, second = (DDP(Net(), find_unused_parameters=True) for _ in range(2))
        fusion = quiet(mode="dense").attach(first)
        backward(first, 0, rank)
        resumed = quiet(mode="dense").attach(second)
        resumed.load_state_dict(fusion.state_dict())
        with_nan(second, 1, rank)
        fusion.detach()
        fusion = force_plan(quiet(mode="layerwise").attach(first))
        backward(first, 1, rank, spare=False)
        assert "spare.weight" in fusion.state_dict()["residuals"]
        fusion.replan()
        backward(first, 2, rank, spare=False)
        assert not fusion.state_dict()["residuals"]
        with_nan(first, 3, rank)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_skipped_steps_change_nothing(ranks, world):
    """With a GradScaler: a run with three overflows has the residuals and parameters of one without these batches.

    Before one of them, residuals have been flushed into a step that sends all.
    """

    def run(rank):
        models = [DDP(Net(), bucket_cap_mb=0.1) for _ in range(2)]
        found = []
        for model, overflows in zip(models, ((2, 4, 6), ()), strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
            fusion = force_plan(quiet(loss_scale=scaler.get_scale).attach(model))
            sparse, whole = fusion.plan, replace(fusion.plan, mode="dense", buffers=())
            optimizer, batches = torch.optim.SGD(model.parameters(), 0.1), iter(range(100))
            for step in range(10 if overflows else 7):
                optimizer.zero_grad()
                wrong = step in overflows
                done = step - sum(each < step for each in overflows)
                fusion._session.plan = whole if done in (3, 4) else sparse  # batch 3 follows the overflow of step 4
                loss = model(batch(99 if wrong else next(batches), rank), True).square().mean()
                scaler.scale(loss * math.inf if wrong and rank == 0 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
            found.append((list(model.parameters()), fusion.state_dict()["residuals"]))
        (parameters, residuals), (expected, others) = found
        assert all(map(torch.equal, parameters, expected))
        assert residuals.keys() == others.keys() and all(torch.equal(residuals[n], others[n]) for n in others)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_on_nonfinite(ranks, world):
    """skip-known, without a loss scale: the residuals stay as they were. raise: an error, also with a loss scale."""

    def run(rank):
        for options in ({"on_nonfinite": "skip-known"}, {"on_nonfinite": "raise", "loss_scale": lambda: 1.0}):
            model = DDP(Net(), bucket_cap_mb=0.1)
            fusion = force_plan(quiet(**options).attach(model))
            backward(model, 0, rank)
            before = fusion.state_dict()["residuals"]
            if rank == 0:
                model.module.second.weight.register_hook(lambda g: g * math.inf)
            if options["on_nonfinite"] == "raise":
                with pytest.raises(FloatingPointError, match="step 1: the gradient of second.weight"):
                    backward(model, 1, rank)
                continue
            backward(model, 1, rank)
            assert not model.module.second.weight.grad.isfinite().all()
            after = fusion.state_dict()["residuals"]
            assert before and all(torch.equal(before[name], after[name]) for name in before)

    ranks(run, world)


def divided(world):
    """The calling rank's data group and model group, where two ranks share a model."""
    parts = [[rank for rank in range(world) if rank % 2 == part] for part in (0, 1)]
    return dist.new_subgroups_by_enumeration(parts)[0], dist.new_subgroups(2)[0]


@pytest.mark.parametrize("world", [4, pytest.param(6, marks=pytest.mark.full)])
def test_parts_of_a_divided_model_skip_steps_together(ranks, world):
    """A gradient that is not finite in one part is an error in all parts; with a loss scale, all of them skip the step."""

    def run(rank):
        data, model_group = divided(world)
        for scale in (None, lambda: 1.0):
            model = DDP(Net(), process_group=data)
            fusion = quiet(loss_scale=scale, model_group=model_group)
            force_plan(fusion.attach(model))
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


@pytest.mark.parametrize("world", [4, pytest.param(6, marks=pytest.mark.full)])
def test_parts_of_a_divided_model_compare_options(ranks, world):
    """One rank was given another density or mode, or some ranks were not given the model group."""

    def run(rank):
        data, model_group = divided(world)
        for odd, option in ([2], {"density": 0.02}), ([2], {"mode": "fp16"}), ([2, 3], {"model_group": None}):
            model = DDP(Net(), process_group=data)
            fusion = quiet(**{"model_group": model_group} | (option if rank in odd else {}))
            with pytest.raises(ValueError, match="arguments differ across ranks"):
                fusion.attach(model)
            quiet(model_group=model_group).attach(model)  # none of the ranks was attached

    ranks(run, world)


class Column(torch.autograd.Function):
    """Identity; in backward a sum over the ranks that share the model."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Uneven(torch.nn.Module):
    """Six layers, of which one part of the model has ten times as many columns."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(group.rank())
        self.group, columns = group, 30 * (1 + 9 * group.rank())
        self.up = torch.nn.ModuleList(torch.nn.Linear(32, columns) for _ in range(6))
        self.down = torch.nn.ModuleList(torch.nn.Linear(columns, 32, bias=False) for _ in range(6))

    def forward(self, x, spare):
        """(batch, 32) -> (batch, 32)."""
        for up, down in zip(self.up, self.down, strict=True):
            part = down(up(Column.apply(x, self.group)).tanh())
            total = part.detach().clone()
            dist.all_reduce(total, group=self.group)
            x = x + part + (total - part.detach())
        return x


@pytest.mark.parametrize("world", by_default((4,), (4, 6)))
@pytest.mark.parametrize("mode", ["fp16", "layerwise"])
def test_parts_with_different_buckets_do_not_deadlock(ranks, world, mode):
    """Their backward passes have other all-reduces between buckets; also after `replan()` and `load_state_dict()`."""

    def run(rank):
        data, model_group = divided(world)
        model = DDP(
            Uneven(model_group), process_group=data, bucket_cap_mb=0.05, broadcast_buffers=False,
            find_unused_parameters=True,
        )  # fmt: skip
        fusion = quiet(mode=mode, density=0.05, model_group=model_group).attach(model)
        for step in range(7):
            backward(model, step, rank // 2)
        fusion.load_state_dict(fusion.state_dict())
        backward(model, 7, rank // 2)
        fusion.replan()
        for step in range(8, 15):
            backward(model, step, rank // 2)
        assert fusion.plan.mode == mode
        assert all(map(torch.isfinite, (p.grad.norm() for p in model.parameters())))

    ranks(run, world)


@pytest.mark.parametrize("world", [4, pytest.param(6, marks=pytest.mark.full)])
def test_residuals_that_some_replicas_do_not_use_are_flushed_later(ranks, world):
    """With a loss scale and a divided model: every rank takes part in the checks of the same steps."""

    def run(rank):
        data, model_group = divided(world)
        model = DDP(Net(), process_group=data, find_unused_parameters=True)
        fusion = quiet(loss_scale=lambda: 1.0, model_group=model_group)
        force_plan(fusion.attach(model))
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
def test_means_are_checked_before_a_framework_overwrites_them(ranks, world):
    """Two atoms share one memory, as in ZeRO 1. The first one overflows, so all residuals must be restored."""

    def run(rank):
        session = Session(
            Reducer(dist.group.WORLD),
            {"a": 9, "b": 9},
            "cpu",
            can_wait_for_buffer=False,
            loss_scale=lambda: 1.0,
            skips_nonfinite_steps=True,
        )
        session.plan = Plan("dense", "dgc", 0.01, "fp32", world)
        session.restore(0, {name: torch.full((9,), 1.0 + rank) for name in "ab"})
        memory = torch.empty(9)
        for name, value in (("a", math.inf if rank == 0 else 1.0), ("b", 1.0)):
            memory.fill_(value)
            session.reduce({name: memory}, [memory], lambda: dist.all_reduce(memory)).wait()
            assert memory[0] == (math.inf if name == "a" else world + sum(range(1, world + 1)))
        with pytest.raises(RuntimeError, match="step 0 has begun"):
            session.finish_skipped_step()
        session.end_step()
        session.finish_skipped_step()
        assert all(torch.equal(r, torch.full((9,), 1.0 + rank)) for r in session.reducer.feedback.residuals.values())
        with pytest.raises(RuntimeError, match="a step ended without a gradient"):
            session.end_step()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_unit_of_several_dtypes(ranks, world):
    def run(rank):
        dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64, "d": torch.float16}
        reducer = Reducer(dist.group.WORLD)
        unit, given, applied = Unit(tuple(dtypes), 4000, 100), dict.fromkeys(dtypes, 0), dict.fromkeys(dtypes, 0)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            gradients = {name: torch.randn(1000, generator=generator).to(dtype) for name, dtype in dtypes.items()}
            if (step, rank) == (2, 1):  # this rank does not use it, and still sends the same dtype
                gradients["c"].zero_()
            given = {name: given[name] + g.double() for name, g in gradients.items()}
            reducer.start([unit], gradients).wait()
            applied = {name: applied[name] + world * g.double() for name, g in gradients.items()}
        for name in dtypes:
            error = applied[name] + sum_over_ranks(reducer.feedback.residuals[name]) - sum_over_ranks(given[name])
            assert error.norm() <= 1e-6 * sum_over_ranks(given[name]).norm(), name

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_indices_of_several_large_units(ranks, world):
    """205,000 elements in three units; one element of the last unit is selected. Oracle: the largest elements."""
    sizes = {"a": 69_000, "b": 70_001, "c": 65_999}

    def run(rank):
        every = [torch.randn(205_000, generator=torch.Generator().manual_seed(each)) for each in range(world)]
        for wire in WIRES:
            units = [Unit((name,), n, k) for (name, n), k in zip(sizes.items(), (700, 69, 1), strict=True)]
            gradients = dict(zip(sizes, every[rank].clone().split([*sizes.values()]), strict=True))
            Reducer(dist.group.WORLD, "topk", wire).start(units, gradients).wait()
            for unit, *parts in zip(units, *(x.split([*sizes.values()]) for x in every), strict=True):
                mean = torch.zeros(unit.numel)
                for part in parts:
                    largest = part.abs().topk(unit.k).indices
                    mean[largest] += part[largest] / world
                found = gradients[unit.names[0]]
                assert not found[mean == 0].any(), (wire, unit.names)
                assert found.allclose(mean, rtol=0.02, atol=0.02), (wire, unit.names)

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_units_that_are_together_too_large_for_32_bit_indices(ranks, world):
    """Only indices and values are made: the gradients would need 16 GB."""
    most = 2**31 - 1

    def run(rank):
        indices = [[0, 1, most - 1], [most - 2, most - 1], [1]]
        selected = [
            Selection(Unit((str(n),), numel, len(at)), torch.ones(len(at)), torch.tensor(at, dtype=torch.int32) - rank)
            for n, (at, numel) in enumerate(zip(indices, (most, most, 2), strict=True))
        ]
        selected[0].indices.clamp_(0)
        message = SparseMessage(selected, "fp32", world)
        (received,) = begin_all_gather(message.encode()[0], dist.group.WORLD).wait()
        _, parts = message.decode(received)
        assert [[p.tolist() for _, p in of_ranks] for of_ranks in parts] == [
            [[max(0, place - each) for place in at] for each in range(world)] for at in indices
        ]

    ranks(run, world)


def test_small_residuals_survive_in_scaled_float16_gradients():
    """Residuals far below float16's smallest number are flushed into gradients that a loss scale has made larger."""
    feedback, gradient = ErrorFeedback(), torch.ones(10, dtype=torch.float16)
    feedback.residuals["a"] = torch.full((10,), 1e-8)
    feedback.flush({"a": gradient}, scale=2.0**20)
    assert gradient.allclose(torch.tensor(1 + 1e-8 * 2**20).half()) and not feedback.residuals
