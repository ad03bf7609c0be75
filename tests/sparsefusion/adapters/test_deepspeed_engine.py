"""Sparse gradients in DeepSpeed's engine, on CPU; oracles: its own reductions, and plain sums of gradients."""

import os

import pytest
import torch
import torch.distributed as dist
from deepspeed_package import deepspeed

from fused import (
    MICRO,
    Net,
    attach_fp16,
    batch,
    force_dense,
    force_plan,
    quiet,
    record_timelines,
    residual_of,
    same_on_all_ranks,
    sum_over_ranks,
)
from sparsefusion.fusion import profiling
from sparsefusion.planning.timeline import Load, step_seconds

__all__ = ["deepspeed"]

ZERO = [(0, "fp32", False), (0, "bf16", False), (1, "fp32", False), (1, "fp32", True), (1, "bf16", True)]
NO_NORM = {"zero_optimization": {"stage": 1, "compute_grad_norm": False}, "gradient_clipping": 0.0}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
SKIPPING = [  # (stage, dtype, the same of an engine that does not skip steps)
    (0, "bf16", (0, "fp32", {})), (1, "bf16", (1, "bf16", UNCHECKED)), (1, "fp32", (1, "fp32", NO_NORM))
]  # fmt: skip


def engine(deepspeed, stage, kind="fp32", overlap=False, **more):
    """A DeepSpeed engine around Net, with SGD."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    dtype = {kind: {"enabled": True}} if kind != "fp32" else {}
    config = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": MICRO, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 20_000},
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, **dtype, **more,
    }  # fmt: skip
    net = Net()
    made, *_ = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())
    return made


def engine_step(made, step, rank, kind="fp32", spare=True, between=lambda: None):
    """One update, of MICRO batches. between: called between the last backward pass and the update."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    for micro in range(MICRO):
        made.backward(made(batch(MICRO * step + micro, rank, dtype), spare).float().square().mean())
        if micro == MICRO - 1:
            between()
        made.step()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage, kind, overlap", ZERO)
def test_deepspeed(ranks, world, deepspeed, stage, kind, overlap):
    """Dense mode and a detached engine have DeepSpeed's own bits; sparse updates are the same on all ranks."""

    def run(rank):
        plain, ours = (engine(deepspeed, stage, kind, overlap) for _ in range(2))
        fusion = quiet(mode="dense").attach(ours)
        for step in range(4):
            if step == 3:
                fusion.detach()
            for made in (plain, ours):
                engine_step(made, step, rank, kind, spare=step != 1)
            assert all(map(torch.equal, plain.module.parameters(), ours.module.parameters()))
        fusion = force_plan(quiet().attach(ours), mode="bucket")
        before = [p.detach().clone() for p in ours.module.parameters()]
        for step in range(4):
            engine_step(ours, step, rank, kind)
        assert same_on_all_ranks(ours.module.parameters()) and fusion.state_dict()["step"] == 4
        assert fusion.state_dict()["residuals"]
        return any(not torch.equal(p, q) for p, q in zip(ours.module.parameters(), before, strict=True))

    assert all(ranks(run, world))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage, overlap", [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("mode", ["auto", "layerwise"])
def test_deepspeed_plans_have_the_atoms_of_deepspeed(ranks, world, deepspeed, stage, overlap, mode, monkeypatch):
    """A parameter may be larger than a bucket. One that is never used does not count as ready after the others."""

    def run(rank):
        seen = record_timelines(monkeypatch)
        zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 5000}
        made = engine(deepspeed, stage, zero_optimization=zero)
        fusion = quiet(mode=mode, density=0.05).attach(made)
        for step in range(5):
            assert fusion.plan.mode == "dense"
            engine_step(made, step, rank, spare=False)
        plans = [None] * world
        for step in range(5, 9):
            engine_step(made, step, rank, spare=False)
            dist.all_gather_object(plans, fusion.plan.hash)
            assert len(set(plans)) == 1
        assert fusion._selection.candidates or fusion._selection.is_final
        assert same_on_all_ranks(made.module.parameters())
        if mode == "layerwise":
            names = [name for buffer in fusion.plan.buffers for name in buffer.names]
            assert fusion.plan.mode == mode and sorted(names) == sorted(dict(made.module.named_parameters()))
        if rank == 0:
            ready = {tensor.name: tensor.ready for tensor in seen[0].tensors}
            assert max(ready.values()) == max(r for name, r in ready.items() if "spare" not in name) < seen[0].step

    ranks(run, world)


class FakeClock:
    """A clock that advances only when a test adds to it."""

    now = 0.0

    def perf_counter(self):
        self.now += 1e-6  # no two marks are equal
        return self.now


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_for_deepspeeds_buckets_does_not_count_as_computation(ranks, world, deepspeed, overlap, monkeypatch):
    """Nor does it count twice: the predicted time of a dense step is the measured one."""

    def run(rank):
        clock, seen, optimizer = FakeClock(), record_timelines(monkeypatch), type(engine(deepspeed, 1).optimizer)
        own = optimizer.average_tensor

        def slow(self, *arguments):
            clock.now += 1.0
            own(self, *arguments)

        monkeypatch.setattr(optimizer, "average_tensor", slow)
        monkeypatch.setattr(profiling, "time", clock)
        zero = {"stage": 1, "overlap_comm": overlap, "reduce_bucket_size": 5000}
        made = engine(deepspeed, 1, zero_optimization=zero)
        quiet(mode="layerwise", density=0.05).attach(made)
        for step in range(6):
            engine_step(made, step, rank, spare=False)
        if rank == 0:
            timeline = seen[0]
            ready, count = {tensor.name: tensor for tensor in timeline.tensors}, len(timeline.atoms)
            assert count > 2 and abs(timeline.step - count) < 0.01 and timeline.tensors[-1].ready < 0.01
            loads = [Load(max(ready[name].ready for name in atom), 0, 1.0, 0, 0) for atom in timeline.atoms]
            assert abs(step_seconds(loads, False, timeline.waits_for_atoms) - timeline.step) < 0.01

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage, kind, unchecked", SKIPPING)
def test_deepspeed_skips_nonfinite_steps_in_any_dtype(ranks, world, deepspeed, stage, kind, unchecked):
    """A skipped step changes nothing. Where DeepSpeed does not skip it, or errors are asked for, it is an error."""

    def run(rank):
        plain, made, strict = (engine(deepspeed, stage, kind) for _ in range(3))
        applies = engine(deepspeed, *unchecked[:2], **unchecked[2])
        fusion = force_plan(quiet().attach(made))
        force_plan(quiet(on_nonfinite="raise").attach(strict)), force_plan(quiet().attach(applies))
        for each in (plain, made, strict, applies):
            each.module.second.weight.register_hook(lambda g: g * float("inf") if (step, rank) == (1, 0) else g)
        for step in range(3):
            before, parameters = fusion.state_dict()["residuals"], [p.clone() for p in made.module.parameters()]
            engine_step(plain, step, rank, kind), engine_step(made, step, rank, kind)
            after = fusion.state_dict()["residuals"]
            kept = step and all(torch.equal(before[name], r) for name, r in after.items())
            assert plain.skipped_steps == made.skipped_steps == (step > 0)
            assert all(map(torch.equal, parameters, made.module.parameters())) == bool(kept) == (step == 1)
        assert after and all(r.isfinite().all() for r in after.values())
        assert same_on_all_ranks(made.module.parameters())
        for each, dtype in ((strict, kind), (applies, unchecked[1])):
            step = 0
            engine_step(each, step, rank, dtype)
            step = 1
            with pytest.raises(FloatingPointError, match="step 1: the gradient of second.weight is not finite"):
                engine_step(each, step, rank, dtype)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "stage, kind, options", [(*how[:2], options) for how in SKIPPING for options in ({}, {"on_nonfinite": "raise"})]
)
def test_deepspeed_skips_steps_whose_norm_overflows(ranks, world, deepspeed, stage, kind, options):
    """All gradients are finite, but their squares are not: the skipped step changes nothing, sparse or dense."""

    def run(rank):
        plain, made, unasked, asked = (engine(deepspeed, stage, kind) for _ in range(4))
        fusion, later, between = (force_plan(quiet(**options).attach(each)) for each in (made, unasked, asked))
        for each in (plain, made, unasked, asked):
            each.module.second.weight.register_hook(lambda g: g * 1e25 if (step in (1, 3)) and rank == 0 else g)
        for step in range(6):
            for each in (fusion, later, between) if step in (3, 4) else ():
                force_dense(each) if step == 3 else force_plan(each)
            before, parameters = fusion.state_dict()["residuals"], [p.clone() for p in made.module.parameters()]
            for each in (plain, made, unasked):
                engine_step(each, step, rank, kind)
            engine_step(asked, step, rank, kind, between=between.state_dict)  # DeepSpeed has not skipped it yet
            after = fusion.state_dict()["residuals"]
            assert plain.skipped_steps == made.skipped_steps == (step > 0) + (step > 2)
            skipped = all(map(torch.equal, parameters, made.module.parameters()))
            assert skipped == (step in (1, 3)) and after.keys() and all(r.abs().max() < 1e3 for r in after.values())
            assert not skipped or all(torch.equal(before[name], r) for name, r in after.items())
        assert same_on_all_ranks(made.module.parameters())
        for each, other in ((unasked, later), (asked, between)):
            assert all(map(torch.equal, made.module.parameters(), each.module.parameters()))
            residuals = other.state_dict()["residuals"]
            assert residuals.keys() == after.keys() and all(torch.equal(after[name], residuals[name]) for name in after)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_parameters_outside_of_the_optimizer_are_refused(ranks, world, deepspeed):
    """ZeRO 0 reduces all gradients, but decides about skipping by those of its optimizer."""

    def run(rank):
        made = engine(deepspeed, 0, "bf16")
        made.optimizer.fp16_groups[0] = [p for p in made.optimizer.fp16_groups[0] if p is not made.module.last.bias]
        with pytest.raises(ValueError, match="which skips steps without checking last.bias"):
            quiet().attach(made)
        made = engine(deepspeed, 0, "bf16")
        made.module.nothing = torch.nn.Parameter(
            torch.zeros(0, dtype=torch.bfloat16)
        )  # an empty parameter, which DeepSpeed's optimizer leaves out
        quiet().attach(made)
        made = engine(deepspeed, 0)
        made.optimizer.param_groups[0]["params"].pop()
        quiet().attach(made)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeeds_communication_data_type(ranks, world, deepspeed, stage):
    """A narrower one is used in dense steps. A wider one is refused, because sparse messages would not use it."""

    def run(rank):
        plain, ours, wide = (
            engine(deepspeed, stage, kind, communication_data_type=sent)
            for kind, sent in (("fp32", "bf16"), ("fp32", "bf16"), ("bf16", "fp32"))
        )
        mixed = engine(deepspeed, stage, communication_data_type="fp32")
        mixed.module.last.bfloat16()
        for each in (wide, mixed):
            with pytest.raises(ValueError, match="communication_data_type torch.float32 of torch.bfloat16 gradients"):
                quiet().attach(each)
        fusion = quiet(mode="dense").attach(ours)
        for step in range(2):
            engine_step(plain, step, rank), engine_step(ours, step, rank)
            assert all(map(torch.equal, plain.module.parameters(), ours.module.parameters()))
        force_plan(fusion)
        engine_step(ours, 2, rank)
        assert same_on_all_ranks(ours.module.parameters())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage, nbytes", [(0, 4), (1, 2)])
def test_deepspeeds_torch_autocast(ranks, world, deepspeed, stage, nbytes, monkeypatch):
    """ZeRO 1 sends gradients in autocast's dtype, and ZeRO 0 in their own."""

    def run(rank):
        seen, autocast = record_timelines(monkeypatch), {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        plain, ours = (engine(deepspeed, stage, **autocast) for _ in range(2))
        quiet(mode="layerwise", density=0.05).attach(ours)
        for step in range(8):
            assert step > 5 or all(map(torch.equal, plain.module.parameters(), ours.module.parameters()))
            engine_step(plain, step, rank), engine_step(ours, step, rank)
        assert same_on_all_ranks(ours.module.parameters())
        assert rank or (seen[0].sent_itemsize, seen[0].itemsize) == (nbytes, 4)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeed_in_fp16(ranks, world, deepspeed, stage):
    """All elements are sent, rounded."""

    def run(rank):
        plain, ours = (engine(deepspeed, stage, gradient_clipping=0.0) for _ in range(2))
        attach_fp16(ours)
        engine_step(plain, 0, rank), engine_step(ours, 0, rank)
        assert same_on_all_ranks(ours.module.parameters())
        for p, q, start in zip(*(each.parameters() for each in (plain.module, ours.module, Net())), strict=True):
            step = (p - start).norm()
            assert 0 < (p - q).norm() <= 1e-3 * step

    ranks(run, world)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("flushed", [False, True])
def test_deepspeeds_updates_and_residuals_add_up(ranks, world, deepspeed, stage, flushed):
    """Without clipping, SGD's updates are the applied means. In the second step, a parameter is not used."""

    def run(rank):
        made = engine(deepspeed, stage, gradient_clipping=0.0)
        fusion = force_plan(quiet().attach(made))
        start = {name: p.detach().double().clone() for name, p in made.module.named_parameters()}
        given = {}
        for step in range(4):  # a copy of the parameters, on which the gradients depend
            net = Net()
            net.load_state_dict(made.module.state_dict())
            for micro in range(MICRO):
                (net(batch(MICRO * step + micro, rank), step != 1).square().mean() / MICRO).backward()
            given = {n: given.get(n, 0) + (0 if p.grad is None else p.grad.double()) for n, p in net.named_parameters()}
            if step == 3 and flushed:
                force_dense(fusion)
            engine_step(made, step, rank, spare=step != 1)
        assert flushed == (not fusion.state_dict()["residuals"])
        for name, p in made.module.named_parameters():
            applied = (start[name] - p.detach().double()) / 0.01 * world
            total = sum_over_ranks(given[name])
            assert (applied + sum_over_ranks(residual_of(fusion, name, total)) - total).norm() <= 1e-4 * total.norm(), (
                name
            )

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeed_resumes_bitwise(ranks, world, deepspeed, stage):
    def run(rank):
        straight, resumed = (engine(deepspeed, stage) for _ in range(2))
        fusion = force_plan(quiet().attach(straight), mode="bucket")
        for step in range(3):
            engine_step(straight, step, rank)
        resumed.module.load_state_dict(straight.module.state_dict())
        if stage:
            resumed.optimizer.load_state_dict([straight.optimizer.state_dict()] * world, load_optimizer_states=False)
        again = quiet(density=0.05, mode="bucket").attach(resumed)
        again.load_state_dict(fusion.state_dict())
        for step in range(3, 6):
            engine_step(straight, step, rank), engine_step(resumed, step, rank)
            assert all(map(torch.equal, straight.module.parameters(), resumed.module.parameters()))

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeed_skips_overflowing_steps(ranks, world, deepspeed, stage, monkeypatch):
    """fp16: residuals do not notice steps that DeepSpeed skips (it thinks that no CPU has fp16).

    ZeRO 1's loss scale begins too high; in ZeRO 0 DeepSpeed does not scale the loss at all. One is of one rank's gradient.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda: True)
    dtypes = list(dict.fromkeys([*accelerator.supported_dtypes(), torch.float16]))
    monkeypatch.setattr(accelerator, "supported_dtypes", lambda: dtypes)

    def run(rank):
        options = {"enabled": True, "initial_scale_power": 14, "hysteresis": 1}
        plain, made, whole = (engine(deepspeed, stage, "fp16", fp16=options) for _ in range(3))
        fusion, _ = force_plan(quiet().attach(made)), attach_fp16(whole)
        for each in (plain, made, whole):
            each.module.second.weight.register_hook(lambda g: g * float("inf") if (step, rank) == (12, 0) else g)
        for step in range(16):
            before, skipped = fusion.state_dict()["residuals"], made.skipped_steps
            for each in (plain, made, whole):
                engine_step(each, step, rank, "fp16")
            assert whole.skipped_steps == plain.skipped_steps
            after = fusion.state_dict()["residuals"]
            kept = all(torch.equal(before.get(name, torch.zeros_like(r)), r) for name, r in after.items())
            assert kept == (made.skipped_steps > skipped)
        assert 0 < made.skipped_steps < 16 and plain.skipped_steps and after
        assert same_on_all_ranks([*made.module.parameters(), *whole.module.parameters()])

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "kind, more, why",
    [
        ("bf16", {"data_types": {"grad_accum_dtype": "fp32"}}, "BF16_Optimizer: leave out grad_accum_dtype"),
        ("fp32", {"zero_optimization": {"stage": 1, "contiguous_gradients": False}}, "contiguous_gradients: false"),
    ],
)
def test_settings_with_other_reductions_are_refused(ranks, world, deepspeed, kind, more, why):
    def run(rank):
        with pytest.raises(ValueError, match=f"SparseFusion does not work with DeepSpeed's {why}"):
            quiet().attach(engine(deepspeed, 1, kind, **more))

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_parameters_unfrozen_after_attach_are_refused_by_name(ranks, world, stage, deepspeed):
    """DeepSpeed reduces them. Another SparseFusion that is attached afterwards knows them."""

    def run(rank):
        made = engine(deepspeed, stage)
        made.module.first.bias.requires_grad_(False)
        fusion = force_plan(quiet().attach(made))
        engine_step(made, 0, rank)
        made.module.first.bias.requires_grad_(True)
        with pytest.raises(
            ValueError, match="'first.bias' has a gradient now but had none when SparseFusion was attached"
        ):
            engine_step(made, 1, rank)
        fusion.detach()
        if stage:  # DeepSpeed cannot continue after an error within a ZeRO 1 reduction
            return
        made.zero_grad()
        force_plan(quiet().attach(made))
        engine_step(made, 2, rank)
        assert same_on_all_ranks(made.module.parameters())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_old_versions_are_refused(ranks, world, deepspeed, monkeypatch):
    """When it is attached."""

    def run(rank):
        made = engine(deepspeed, 1)
        monkeypatch.setattr(deepspeed, "__version__", "0.18.9+unknown")
        with pytest.raises(ValueError, match="DeepSpeed's version 0.18.9.unknown: 0.19.4 is the oldest"):
            quiet().attach(made)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_coalesced_reductions_are_refused(ranks, world, deepspeed):
    def run(rank):
        made = engine(deepspeed, 1)
        fusion = quiet().attach(made)
        with pytest.raises(NotImplementedError, match="coalesce_grad_reduction"):
            made.coalesce_grad_reduction()
        fusion.detach()
        assert made.coalesce_grad_reduction()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_zero_2_is_refused(ranks, world, deepspeed):
    def run(rank):
        with pytest.raises(ValueError, match="ZeRO stage 2 shards gradients over the ranks"):
            quiet().attach(engine(deepspeed, 2))

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_setting_refused_on_one_rank_is_an_error_on_all(ranks, world, deepspeed, stage, monkeypatch):
    """Then none of them is attached."""

    def run(rank):
        made = engine(deepspeed, stage)
        with monkeypatch.context() as patched:
            if rank == world - 1:
                patched.setattr(deepspeed, "__version__", "0.18.9")
            with pytest.raises(ValueError, match=rf"version 0.18.9: 0.19.4 is the oldest \(rank {world - 1}\)"):
                quiet().attach(made)
        fusion = force_plan(quiet().attach(made))
        engine_step(made, 0, rank)
        assert same_on_all_ranks(made.module.parameters()) and fusion.state_dict()["residuals"]

    ranks(run, world, timeout=30)
