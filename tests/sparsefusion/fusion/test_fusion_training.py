"""Sparse gradients beside tensor parallelism; oracles: the uninterrupted run, the other replicas, dense training."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # noqa: F401  (DDP would import it in each forked rank, for seconds)
import torch.distributed as dist
from chosen import by_default

import tiny
from commfabric.foundation.command_line import Failure
from megatron_ssm.train.pending_gradients import PendingFile, has_pending, read_pending
from megatron_ssm.train.trainer import Trainer
from sparsefusion.fusion import trial

MODELS = {
    "mamba": dict(model_type="mamba"),
    "mamba2 groups": dict(mamba_num_groups=2),
    "falcon": dict(model_type="falcon_mamba"),
    "zamba": tiny.ZAMBA,
    "zamba2 untied": tiny.ZAMBA2_UNTIED,
}
MORE = ("mamba2 groups", "falcon", "zamba")


def trainer(tp, **changes):
    """The trainer of the calling rank; by default it sends a twentieth of the elements of every tensor."""
    run = tiny.options(**{"gradient_mode": "layerwise", "gradient_density": 0.05, "global_batch_size": 12, **changes})
    return tiny.trainer_on(tp, run)


def are_equal(model, group):
    """Whether the replicas have the same parameters, bit for bit."""
    for parameter in model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, group=group, group_src=0)
        if not torch.equal(first, parameter.detach()):
            return False
    return True


@pytest.mark.full
@pytest.mark.parametrize(
    "tp, dp", [(2, 2), pytest.param(1, 2, marks=pytest.mark.full), pytest.param(1, 3, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", by_default(("mamba",), ("mamba", "zamba2 untied", *MORE)))
def test_every_family_learns_and_replicas_stay_equal(ranks, tp, dp, name):
    def run(rank):
        made = trainer(tp, **MODELS[name])
        losses = tiny.curve(made, 14)[0]
        assert made.fusion.plan.mode == "layerwise" and are_equal(made.model, made.groups.data)
        dense, sparse, total = made.fusion.plan.sent_elements
        assert dense == 0 and sparse < 0.2 * total
        return losses

    dense = tiny.curve(tiny.trainer(tiny.options(**{"global_batch_size": 12, **MODELS[name]})), 14)[0]
    for losses in ranks(run, tp * dp):
        assert torch.allclose(losses[:5], dense[:5], rtol=1e-8)  # the profiled steps are dense
        assert losses[-3:].mean() < losses[:3].mean() - 0.3 * (dense[:3].mean() - dense[-3:].mean())


@pytest.mark.full
@pytest.mark.parametrize("tp, dp", [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "mode", ["auto", *(pytest.param(m, marks=pytest.mark.full) for m in ("bucket", "interleaved"))]
)
def test_parts_of_a_model_have_the_same_plan_and_equal_copies(ranks, monkeypatch, tp, dp, mode):
    """Bit for bit: some parameters have copies on all tensor-parallel ranks, and others on some of them."""
    monkeypatch.setattr(trial, "ROUNDS", 1)

    def run(rank):
        made = trainer(tp, gradient_mode=mode, **MODELS["zamba2 untied"])
        step = 0
        while step < 8 or not made.fusion.state_dict()["plan"]:
            tiny.curve(made, step + 1, start=step)
            step += 1
            if step == 6:
                dense = (made.fusion.state_dict()["candidates"] or {}).get("dense")
        assert are_equal(made.model, made.groups.data)
        plan = made.fusion.plan
        sparse = {name for buffer in plan.buffers for unit in buffer.units for name in unit.names if unit.k}
        return tiny.pieces(made), (step, plan.mode, sparse, dense)

    pieces, plans = zip(*ranks(run, tp * dp, timeout=120), strict=True)
    fields = tiny.trainer(tiny.options(**MODELS["zamba2 untied"])).model.config.fields()
    for replica in range(dp):
        tiny.assembled(pieces[replica * tp : (replica + 1) * tp], fields, tp)
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.parametrize(
    "tp, dp", [pytest.param(1, 3, marks=pytest.mark.full), pytest.param(2, 2, marks=pytest.mark.full), (1, 2)]
)
def test_resuming_is_bitwise(ranks, tmp_path, tp, dp):
    def run(rank):
        straight = trainer(tp)
        tiny.curve(straight, 12)
        PendingFile.of(straight).write(tmp_path)
        torch.save([straight.model.state_dict(), straight.optimizer.state_dict()], tmp_path / f"{rank}.pt")
        rest = tiny.curve(straight, 18, start=12)
        resumed = trainer(tp)
        model, optimizer = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        resumed.model.load_state_dict(model)
        resumed.optimizer.load_state_dict(optimizer)
        read_pending(tmp_path, resumed)
        assert torch.equal(tiny.curve(resumed, 18, start=12), rest)
        assert all(map(torch.equal, straight.model.parameters(), resumed.model.parameters()))

    ranks(run, tp * dp)
    assert has_pending(tmp_path)


def write_residuals(ranks, directory, replicas):
    """Train 8 steps on so many replicas, and write their residuals to a directory. Returns {name: mean residual}."""

    def save(rank):
        made = trainer(1)
        tiny.curve(made, 8)
        PendingFile.of(made).write(directory)
        return made.fusion.state_dict()["residuals"]

    found = ranks(save, replicas)
    return {name: sum(each[name] for each in found) / replicas for name in found[0]}


@pytest.mark.parametrize("dp", [3, pytest.param(2, marks=pytest.mark.full)])
def test_another_number_of_replicas_takes_the_mean_residual(ranks, tmp_path, dp):
    pending = write_residuals(ranks, tmp_path, 5 - dp)

    def load(rank):
        made = trainer(1)
        read_pending(tmp_path, made)
        return made.fusion.state_dict()["residuals"]

    for residuals in ranks(load, dp):
        assert residuals.keys() == pending.keys()
        for name, residual in residuals.items():
            assert torch.allclose(residual, pending[name], rtol=1e-12, atol=1e-15)


def test_pending_gradients_wait_for_a_gradient():
    used, unused = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    used.grad = torch.ones(2, 3)
    made = SimpleNamespace(
        pending_gradients={"used": torch.full((6,), 2.0), "unused": torch.full((6,), 5.0)},
        named_parameters=lambda: [("used", used), ("unused", unused)],
        _gradients=lambda: [(each, each.grad) for each in (used, unused) if each.grad is not None],
    )

    def add():
        for name in Trainer._add_pending_gradients(made):
            del made.pending_gradients[name]

    for expected in (3, 1):
        add()
        assert used.grad.eq(expected).all() and unused.grad is None and list(made.pending_gradients) == ["unused"]
        used.grad = torch.ones(2, 3)
    unused.grad = torch.ones(2, 3)
    add()
    assert unused.grad.eq(6).all() and not made.pending_gradients


@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_dense_run_applies_pending_gradients(ranks, tmp_path, dp):
    """Once, and also on one replica, which sends nothing."""
    pending = write_residuals(ranks, tmp_path, 3)

    def gradients(rank, resumed):
        made, found = trainer(1, gradient_mode="dense", clip_grad=0), []
        if resumed:
            read_pending(tmp_path, made)
        parameters = {name.removeprefix("module."): p for name, p in made.loss.named_parameters()}
        made.optimizer.register_step_pre_hook(
            lambda *_: found.append({name: p.grad.flatten().clone() for name, p in parameters.items()})
        )
        tiny.curve(made, 1)
        assert not made.pending_gradients
        return found[0]

    def run(rank):
        ours, plain = gradients(rank, True), gradients(rank, False)
        for name in pending:
            assert torch.allclose(ours[name] - plain[name], pending[name], rtol=1e-9, atol=1e-12), name

    ranks(run, dp)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 4])
def test_pending_gradients_of_another_run_are_refused(ranks, tmp_path, world):
    def run(rank):
        made = trainer(1, global_batch_size=8)
        with pytest.raises(ValueError, match="has pending gradients of 0 tensor-parallel ranks"):
            read_pending(tmp_path, made)
        dist.barrier()
        made.fusion._session.reducer.feedback.residuals = {"none": torch.ones(3)}
        PendingFile.of(made).write(tmp_path)
        dist.barrier()
        with pytest.raises(
            ValueError, match="cannot resume from .*a state with 3 elements of 'none'; here it has none"
        ):
            read_pending(tmp_path, trainer(1, gradient_mode="dense", global_batch_size=8))
        if world == 4:
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
            divided = trainer(2, global_batch_size=8)
            with pytest.raises(ValueError, match="pending gradients of 1 tensor-parallel ranks, which 2 cannot take"):
                read_pending(tmp_path, divided)
        dist.barrier()
        path = tmp_path / f"pending-tensor-0-of-1-replica-{rank}-of-{world}.pt"
        if rank == 1:
            whole, ones = path.read_bytes(), torch.ones(3).numpy().tobytes()
            assert ones in whole
            path.write_bytes(
                whole[:100] if world == 2 else whole.replace(ones, b"\x01" + ones[1:])
            )  # cut off, or one bit
        with pytest.raises(ValueError, match=f"cannot resume from .*replica-1-of-{world}.pt is missing or damaged"):
            read_pending(tmp_path, made)

    ranks(run, world)


@pytest.mark.parametrize(
    "tp, dp", [pytest.param(1, 3, marks=pytest.mark.full), (2, 2), pytest.param(1, 2, marks=pytest.mark.full)]
)
def test_nonfinite_gradients_end_training_on_every_rank(ranks, tp, dp):
    """Also on the ranks of other parts of the model, whose gradients are finite."""

    def run(rank):
        made = trainer(tp, max_skipped_steps=0)
        tiny.curve(made, 6)
        if rank == 1:
            next(made.model.parameters()).register_hook(lambda g: g * float("nan"))
        name = "model.*" if rank % tp == 1 % tp else "a parameter of another rank"
        with pytest.raises(
            Failure, match=f"step 7: the gradient of {name} is not finite on some rank, so training stops"
        ):
            tiny.curve(made, 7, start=6)

    ranks(run, tp * dp)
