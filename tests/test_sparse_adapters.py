"""Sparse gradients in Megatron-Core and DeepSpeed, on CPU; oracles: their own reductions, and plain sums of gradients.

Megatron's DDP asks CUDA for a device: here it is told the CPU.
"""

import os
import sys
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fused import Net, batch, force, pending, plan, quiet, same_on_all_ranks, summed
from sparsefusion import SparseFusion

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # and seconds, once here instead of in every forked rank
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

MICRO = 2  # batches that are added up in a step
ZERO = [(0, "fp32", False), (0, "bf16", False), (1, "fp32", False), (1, "fp32", True), (1, "bf16", True)]


def flush(fusion):
    """From now on all is sent."""
    session = fusion._session
    session.plan = replace(session.plan, mode="dense", buffers=())


def reference(rank, steps):
    """{name: sum of this rank's gradients} over steps of MICRO batches."""
    net, total = Net(), {}
    for step in range(steps):
        net.zero_grad()
        for micro in range(MICRO):
            net(batch(MICRO * step + micro, rank), True).square().mean().backward()
        for name, p in net.named_parameters():
            total[name] = total.get(name, 0) + p.grad.double()
    return total


def timelines(monkeypatch) -> list:
    """Those that this rank plans from, from now on."""
    seen, planned = [], SparseFusion._planned

    def noting(self, timeline, costs):
        seen.append(timeline)
        return planned(self, timeline, costs)

    monkeypatch.setattr(SparseFusion, "_planned", noting)
    return seen


# Megatron


def megatron(monkeypatch, average=False, net=None, dtype=torch.float32, **options):
    """A Megatron DDP module around Net; `options`: its config's."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        use_cpu_initialization=True,
        calculate_per_token_loss=not average,
    )
    net = net or Net(dtype)
    net.config = config
    ddp = DistributedDataParallelConfig(bucket_size=15_000, grad_reduce_in_fp32=dtype == torch.float32, **options)
    return DistributedDataParallel(config, ddp, net)


def megatron_step(ddp, step, rank, dtype=torch.float32, spare=True):
    """Gradients of MICRO batches."""
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        ddp(batch(MICRO * step, rank, dtype), spare).square().mean().backward()
    ddp(batch(MICRO * step + 1, rank, dtype), spare).square().mean().backward()
    ddp.finish_grad_sync()


def main_grads(ddp):
    """{name: gradient} where Megatron's optimizers read them."""
    return {name: p.main_grad for name, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_megatron(ranks, world, overlap, distributed, monkeypatch):
    """Dense: its own bits. Sparse: nothing lost, and of its mean or, per token, its sum. Detached: its own bits again."""

    def run(rank):
        options = dict(overlap_grad_reduce=overlap, use_distributed_optimizer=distributed)
        for average in (True, False):
            plain, ours = (megatron(monkeypatch, average, **options) for _ in range(2))
            fusion = quiet(mode="dense").attach(ours)
            for step in range(4):
                if step == 3:
                    fusion.detach()
                megatron_step(plain, step, rank), megatron_step(ours, step, rank)
                for p, q in zip(plain.module.parameters(), ours.module.parameters(), strict=True):
                    assert torch.equal(p.main_grad, q.main_grad)
            ours = megatron(monkeypatch, average, **options)
            mode = {"mode": "interleaved", "early": True} if average else {"mode": "bucket"}
            fusion = force(quiet().attach(ours), **mode)
            applied = dict.fromkeys(dict(ours.module.named_parameters()), 0)
            for step in range(4):
                megatron_step(ours, step, rank)
                assert same_on_all_ranks(main_grads(ours).values())
                for name, p in ours.module.named_parameters():
                    applied[name] = applied[name] + p.main_grad.double() * (world if average else 1)
                if step == 2 and not distributed:
                    flush(fusion)
            for name, total in reference(rank, 4).items():
                left = pending(fusion, name, total) * (1 if average else 1 / world)
                error = applied[name] + summed(left) - summed(total)
                assert error.norm() <= 1e-6 * summed(total).norm(), name

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_megatron_in_bfloat16_with_unused_parameters(ranks, world, monkeypatch):
    """Dense: its own bits. Sparse: alike, and nothing is lost but what bf16 rounds."""

    def run(rank):
        bf16, total, applied = torch.bfloat16, {}, {}
        plain, ours, sparse = (megatron(monkeypatch, True, dtype=bf16) for _ in range(3))
        quiet(mode="dense").attach(ours)
        fusion = force(quiet().attach(sparse))
        for step in range(4):
            for each in (plain, ours, sparse):
                megatron_step(each, step, rank, bf16, spare=step != 1)
            assert same_on_all_ranks(main_grads(sparse).values())
            for (name, theirs), mine, few in zip(
                main_grads(plain).items(), main_grads(ours).values(), main_grads(sparse).values(), strict=True
            ):
                assert theirs.dtype == bf16 and torch.equal(theirs, mine)
                total[name] = total.get(name, 0) + world * theirs.double()
                applied[name] = applied.get(name, 0) + world * few.double()
        for name, gradient in total.items():
            left = summed(pending(fusion, name, gradient))
            assert (applied[name] + left - gradient).norm() <= 2e-2 * gradient.norm(), name
        assert any(not torch.equal(applied[name], total[name]) for name in total)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("average, distributed", [(True, False), (False, False), (True, True)])
def test_megatron_in_halves(ranks, world, average, distributed, monkeypatch):
    """fp16: all of it, rounded, also of a sum."""

    def run(rank):
        options = dict(average=average, use_distributed_optimizer=distributed)
        ours = megatron(monkeypatch, **options)
        quiet(mode="fp16").attach(ours)
        megatron_step(ours, 0, rank)
        assert same_on_all_ranks(main_grads(ours).values())
        for name, gradient in reference(rank, 1).items():
            expected = summed(gradient) / (world if average else 1)
            assert 1e-5 * expected.norm() < (main_grads(ours)[name] - expected).norm() <= 1e-3 * expected.norm(), name

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_megatron_skips_a_step_without_a_trace(ranks, world, monkeypatch):
    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=True)
        fusion = force(quiet(loss_scale=lambda: 8.0).attach(ddp))
        megatron_step(ddp, 0, rank)
        before = fusion.state_dict()["residuals"]
        wrong = ddp.module.second.weight.register_hook(lambda g: g * (float("inf") if rank == 0 else 1))
        megatron_step(ddp, 1, rank)
        wrong.remove()
        assert not main_grads(ddp)["second.weight"].isfinite().all()
        after = fusion.state_dict()["residuals"]
        assert before and before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)

    ranks(run, world)


@pytest.mark.parametrize("tp, dp", [(2, 2), (1, 3), pytest.param(2, 3, marks=pytest.mark.full)])
def test_parts_of_megatrons_model_plan_alike(ranks, tp, dp, monkeypatch):
    """Without being told: Megatron's DDP knows the ranks over which the model is divided. Here all of it is copied."""

    def run(rank):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        ddp = megatron(monkeypatch, True)
        fusion = quiet(mode="layerwise", density=0.05).attach(ddp)
        for step in range(7):
            megatron_step(ddp, step, rank // tp)
        assert fusion.plan.mode == "layerwise" and same_on_all_ranks(main_grads(ddp).values())
        ddp.module.second.weight.register_hook(lambda g: g * (float("nan") if rank == 0 else 1))
        with pytest.raises(FloatingPointError, match="second.weight" if rank % tp == 0 else "of another rank"):
            megatron_step(ddp, 7, rank // tp)

    ranks(run, tp * dp)


@pytest.mark.parametrize("world", [2, 4])
def test_what_megatron_skips_elsewhere_is_refused(ranks, world, monkeypatch):
    """A stage of a pipeline, and with a loss scale experts, without which they stay with Megatron."""

    def run(rank):
        net = Net()
        net.last.weight.allreduce = False  # as experts' are marked
        ddp = megatron(monkeypatch, True, net=net)
        scaled, skips = {"loss_scale": lambda: 1.0}, {"on_nonfinite": "skip-known"}
        for options in (scaled, skips, scaled | {"on_nonfinite": "raise"}):
            with pytest.raises(
                ValueError, match="a loss scale, or skipped steps, does not work with Megatron's experts"
            ):
                quiet(**options).attach(ddp)
        fusion = force(quiet().attach(ddp))
        megatron_step(ddp, 0, rank)
        assert same_on_all_ranks(main_grads(ddp).values()) and "last.weight" not in fusion.state_dict()["residuals"]
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        with pytest.raises(ValueError, match="Megatron's pipeline parallelism"):
            quiet().attach(megatron(monkeypatch, True))

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_megatron_resumes_bitwise(ranks, world, overlap, monkeypatch):
    """Also where Megatron starts all bucket groups at the end, as in a module's first step."""

    def run(rank):
        straight, resumed = (megatron(monkeypatch, True, overlap_grad_reduce=overlap) for _ in range(2))
        fusion = force(quiet().attach(straight), mode="bucket")
        for step in range(3):
            megatron_step(straight, step, rank)
        again = quiet(density=0.05, mode="bucket").attach(resumed)
        again.load_state_dict(fusion.state_dict())
        for step in range(3, 6):
            megatron_step(straight, step, rank), megatron_step(resumed, step, rank)
            for p, q in zip(straight.module.parameters(), resumed.module.parameters(), strict=True):
                assert torch.equal(p.main_grad, q.main_grad)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_megatron_keeps_what_was_pending_when_an_error_ends_a_dense_step(ranks, world, monkeypatch):
    """Of which some buckets had been sent: then it goes with the next step."""

    def run(rank):
        ddp = megatron(monkeypatch, True)
        fusion = force(quiet().attach(ddp))
        megatron_step(ddp, 0, rank)
        before = fusion.state_dict()["residuals"]
        flush(fusion)
        kind, last = type(ddp.bucket_groups[0]), ddp.bucket_groups[-1]
        start = kind.start_grad_sync

        def failing(group, *arguments):
            if group is last:
                raise KeyError("in the middle")
            start(group, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(kind, "start_grad_sync", failing)
            with pytest.raises(KeyError, match="in the middle"):
                megatron_step(ddp, 1, rank)
        after = fusion.state_dict()["residuals"]
        assert before and before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
        megatron_step(ddp, 2, rank)
        assert not fusion.state_dict()["residuals"] and same_on_all_ranks(main_grads(ddp).values())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("option", ["check_for_large_grads", "reduce_scatter_with_fp32_accumulation"])
def test_options_of_megatron_that_would_be_left_out_are_refused(ranks, world, option, monkeypatch):
    def run(rank):
        ddp = megatron(monkeypatch, True)
        setattr(ddp.ddp_config, option, True)
        with pytest.raises(ValueError, match=f"does not work with Megatron's {option}"):
            quiet().attach(ddp)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_megatron_goes_on_after_an_error(ranks, world, overlap, monkeypatch):
    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=overlap)
        fusion = force(quiet().attach(ddp), mode="interleaved")
        megatron_step(ddp, 0, rank)
        wrong = ddp.module.second.weight.register_hook(lambda g: g * (float("nan") if rank == 0 else 1))
        with pytest.raises(FloatingPointError, match="step 1: the gradient of second.weight"):
            megatron_step(ddp, 1, rank)
        wrong.remove()
        megatron_step(ddp, 2, rank)
        assert same_on_all_ranks(main_grads(ddp).values())
        assert all(p.main_grad.isfinite().all() for p in ddp.module.parameters()) and fusion.state_dict()["step"] == 3

    ranks(run, world)


def with_early_units(ddp, ranks):
    """An attached SparseFusion whose plan has the order in which Megatron's gradients are ready; vectors leave early."""
    fusion = force(quiet().attach(ddp))
    sizes = dict(reversed(fusion._session.sizes.items()))
    fusion._session.plan = plan(sizes, ranks, mode="interleaved", early=True)
    return fusion


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("where", ["first", "second"])
@pytest.mark.parametrize("forced", [False, True])
def test_a_backward_of_megatron_that_ends_in_the_middle(ranks, world, where, forced, monkeypatch):
    """What it has sent, early or in a bucket, is not taken for the next one's: an error, and attaching again mends it."""

    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=True)
        fusion = with_early_units(ddp, world)
        for step in range(2):
            megatron_step(ddp, step, rank)

        def fail(gradient):
            raise KeyError("in the middle")

        wrong = getattr(ddp.module, where).weight.register_hook(fail)
        with pytest.raises(KeyError, match="in the middle"):
            ddp.zero_grad_buffer()
            ddp(batch(4, rank), True).square().mean().backward()
        wrong.remove()
        with pytest.raises(RuntimeError, match="comes again in step 2: a backward ended in the middle"):
            megatron_step(ddp, 3, rank)
        fusion.detach()
        if forced:
            with_early_units(ddp, world)
        else:  # which begins with Megatron's own reduction
            quiet().attach(ddp)
        megatron_step(ddp, 4, rank)
        assert same_on_all_ranks(main_grads(ddp).values())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_megatron_sends_the_first_gradients_before_a_bucket_is_complete(ranks, world, monkeypatch):
    """SSFusion-I's l': what is early leaves before the last bucket of its buffer is handed over."""

    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=True)
        session = with_early_units(ddp, world)._session
        events, start, hand_over = [], session.reducer.start, session.reduce

        def started(units, gradients, *others):
            events.append(("start", set(gradients)))
            return start(units, gradients, *others)

        def handed_over(gradients, *others):
            events.append(("bucket", set(gradients)))
            return hand_over(gradients, *others)

        monkeypatch.setattr(session.reducer, "start", started)
        monkeypatch.setattr(session, "reduce", handed_over)
        for step in range(3):
            events.clear()
            megatron_step(ddp, step, rank)
        for buffer in session.plan.buffers:
            early = {name for unit in buffer.units if unit.early for name in unit.names}
            buckets = [i for i, (what, names) in enumerate(events) if what == "bucket" and names & set(buffer.names)]
            assert early and events.index(("start", early)) < buckets[-1]

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_planned_to_leave_before_megatron_hands_it_over(ranks, world, overlap, monkeypatch):
    """Without overlap all comes when backward is over: then all gradients are ready at once."""

    def run(rank):
        seen = timelines(monkeypatch)
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=overlap)
        quiet(mode="layerwise").attach(ddp)
        for step in range(5):
            megatron_step(ddp, step, rank)
        if rank == 0:
            assert not seen[0].waits and (len({tensor.ready for tensor in seen[0].tensors}) == 1) != overlap

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("distributed", [False, True])
def test_megatron_plans_from_what_it_hands_over(ranks, world, distributed, monkeypatch):
    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=True, use_distributed_optimizer=distributed)
        fusion = quiet(mode="layerwise", density=0.05).attach(ddp)
        for step in range(7):
            megatron_step(ddp, step, rank)
        names = [name for buffer in fusion.plan.buffers for name in buffer.names]
        assert fusion.plan.mode == "layerwise" and sorted(names) == sorted(dict(ddp.module.named_parameters()))
        assert same_on_all_ranks(main_grads(ddp).values())

    ranks(run, world)


# DeepSpeed


@pytest.fixture(scope="module")
def deepspeed():
    """The package, which compiles nothing."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    package = pytest.importorskip("deepspeed")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    package.utils.logger.setLevel("ERROR")
    return package


def engine(deepspeed, stage, kind="fp32", overlap=False, **more):
    """An engine around Net, with SGD."""
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


def engine_step(made, step, rank, kind="fp32", spare=True):
    """One update, of MICRO batches."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    for micro in range(MICRO):
        made.backward(made(batch(MICRO * step + micro, rank, dtype), spare).float().square().mean())
        made.step()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage, kind, overlap", ZERO)
def test_deepspeed(ranks, world, deepspeed, stage, kind, overlap):
    """Dense: its own bits, with accumulation and clipping. Sparse: alike on all ranks. Detached: its own bits again."""

    def run(rank):
        plain, ours = (engine(deepspeed, stage, kind, overlap) for _ in range(2))
        fusion = quiet(mode="dense").attach(ours)
        for step in range(4):
            if step == 3:
                fusion.detach()
            for made in (plain, ours):
                engine_step(made, step, rank, kind, spare=step != 1)
            assert all(map(torch.equal, plain.module.parameters(), ours.module.parameters()))
        fusion = force(quiet().attach(ours), mode="bucket")
        before = [p.detach().clone() for p in ours.module.parameters()]
        for step in range(4):
            engine_step(ours, step, rank, kind)
        assert same_on_all_ranks(ours.module.parameters()) and fusion.state_dict()["step"] == 4
        assert fusion.state_dict()["residuals"]
        return any(not torch.equal(p, q) for p, q in zip(ours.module.parameters(), before, strict=True))

    assert all(ranks(run, world))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage, overlap", [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("mode", ["auto", "layerwise"])
def test_deepspeed_plans_from_what_it_hands_over(ranks, world, deepspeed, stage, overlap, mode, monkeypatch):
    """A parameter larger than a bucket, too, and one that is never used, which is not ready later than the others."""

    def run(rank):
        seen = timelines(monkeypatch)
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
        assert fusion._candidates or fusion._decided
        assert same_on_all_ranks(made.module.parameters())
        if mode == "layerwise":
            names = [name for buffer in fusion.plan.buffers for name in buffer.names]
            assert fusion.plan.mode == mode and sorted(names) == sorted(dict(made.module.named_parameters()))
        if rank == 0:
            ready = {tensor.name: tensor.ready for tensor in seen[0].tensors}
            assert max(ready.values()) == max(r for name, r in ready.items() if "spare" not in name) < seen[0].step

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage, kind", [(0, "bf16"), (1, "bf16"), (1, "fp32")])
def test_deepspeed_skips_what_is_not_finite_in_any_dtype(ranks, world, deepspeed, stage, kind):
    """Nothing is left of such a step. Where DeepSpeed does not skip it, or if that is asked for, it is an error."""

    def run(rank):
        plain, made, strict, applies = (
            engine(deepspeed, *how) for how in ((stage, kind), (stage, kind), (stage, kind), (0, "fp32"))
        )
        fusion = force(quiet().attach(made))
        force(quiet(on_nonfinite="raise").attach(strict)), force(quiet().attach(applies))
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
        for each, dtype in ((strict, kind), (applies, "fp32")):
            step = 0
            engine_step(each, step, rank, dtype)
            step = 1
            with pytest.raises(FloatingPointError, match="step 1: the gradient of second.weight is not finite"):
                engine_step(each, step, rank, dtype)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_what_deepspeed_does_not_look_at_is_refused(ranks, world, deepspeed):
    """ZeRO 0 reduces all gradients, and skips a step by those that its optimizer has."""

    def run(rank):
        made = engine(deepspeed, 0, "bf16")
        made.optimizer.fp16_groups[0] = [p for p in made.optimizer.fp16_groups[0] if p is not made.module.last.bias]
        with pytest.raises(ValueError, match="which skips steps without having looked at last.bias"):
            quiet().attach(made)
        made = engine(deepspeed, 0, "bf16")
        made.module.nothing = torch.nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))  # which it leaves out, too
        quiet().attach(made)
        made = engine(deepspeed, 0)
        made.optimizer.param_groups[0]["params"].pop()
        quiet().attach(made)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeeds_communication_data_type(ranks, world, deepspeed, stage):
    """A narrower one is DeepSpeed's own in dense steps; a wider one would be left out where SparseFusion sends."""

    def run(rank):
        plain, ours, wide = (
            engine(deepspeed, stage, kind, communication_data_type=sent)
            for kind, sent in (("fp32", "bf16"), ("fp32", "bf16"), ("bf16", "fp32"))
        )
        with pytest.raises(ValueError, match="communication_data_type torch.float32 of torch.bfloat16 gradients"):
            quiet().attach(wide)
        fusion = quiet(mode="dense").attach(ours)
        for step in range(2):
            engine_step(plain, step, rank), engine_step(ours, step, rank)
            assert all(map(torch.equal, plain.module.parameters(), ours.module.parameters()))
        force(fusion)
        engine_step(ours, 2, rank)
        assert same_on_all_ranks(ours.module.parameters())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeed_in_halves(ranks, world, deepspeed, stage):
    """fp16: all of it, rounded."""

    def run(rank):
        plain, ours = (engine(deepspeed, stage, gradient_clipping=0.0) for _ in range(2))
        quiet(mode="fp16").attach(ours)
        engine_step(plain, 0, rank), engine_step(ours, 0, rank)
        assert same_on_all_ranks(ours.module.parameters())
        for p, q, start in zip(*(each.parameters() for each in (plain.module, ours.module, Net())), strict=True):
            step = (p - start).norm()
            assert 0 < (p - q).norm() <= 1e-3 * step

    ranks(run, world)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("flushed", [False, True])
def test_deepspeed_loses_nothing(ranks, world, deepspeed, stage, flushed):
    """Without clipping SGD's updates are the applied means; in the second step a parameter is not used."""

    def run(rank):
        made = engine(deepspeed, stage, gradient_clipping=0.0)
        fusion = force(quiet().attach(made))
        start = {name: p.detach().double().clone() for name, p in made.module.named_parameters()}
        given = {}
        for step in range(4):  # gradients depend on the parameters, so they are taken on a copy of these
            net = Net()
            net.load_state_dict(made.module.state_dict())
            for micro in range(MICRO):
                (net(batch(MICRO * step + micro, rank), step != 1).square().mean() / MICRO).backward()
            given = {n: given.get(n, 0) + (0 if p.grad is None else p.grad.double()) for n, p in net.named_parameters()}
            if step == 3 and flushed:
                flush(fusion)
            engine_step(made, step, rank, spare=step != 1)
        assert flushed == (not fusion.state_dict()["residuals"])
        for name, p in made.module.named_parameters():
            applied = (start[name] - p.detach().double()) / 0.01 * world
            total = summed(given[name])
            assert (applied + summed(pending(fusion, name, total)) - total).norm() <= 1e-4 * total.norm(), name

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeed_resumes_bitwise(ranks, world, deepspeed, stage):
    def run(rank):
        straight, resumed = (engine(deepspeed, stage) for _ in range(2))
        fusion = force(quiet().attach(straight), mode="bucket")
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
        fusion, _ = force(quiet().attach(made)), quiet(mode="fp16").attach(whole)
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
def test_what_deepspeed_reduces_elsewhere_is_refused(ranks, world, deepspeed, kind, more, why):
    def run(rank):
        with pytest.raises(ValueError, match=f"SparseFusion does not work with DeepSpeed's {why}"):
            quiet().attach(engine(deepspeed, 1, kind, **more))

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_parameters_unfrozen_after_attach_are_refused_by_name(ranks, world, stage, deepspeed):
    """DeepSpeed reduces them; a SparseFusion that is attached afterwards knows them, and nothing of this one is left."""

    def run(rank):
        made = engine(deepspeed, stage)
        made.module.first.bias.requires_grad_(False)
        fusion = force(quiet().attach(made))
        engine_step(made, 0, rank)
        made.module.first.bias.requires_grad_(True)
        with pytest.raises(
            ValueError, match="a gradient of 'first.bias', which had none when SparseFusion was attached"
        ):
            engine_step(made, 1, rank)
        fusion.detach()
        if stage:  # DeepSpeed does not go on from the middle of a ZeRO 1 reduction
            return
        made.zero_grad()
        force(quiet().attach(made))
        engine_step(made, 2, rank)
        assert same_on_all_ranks(made.module.parameters())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_coalesced_reductions_are_refused(ranks, world, deepspeed):
    def run(rank):
        made = engine(deepspeed, 1)
        fusion = quiet().attach(made)
        with pytest.raises(NotImplementedError, match="coalesce_grad_reduction"):
            made.coalesce_grad_reduction()
        fusion.detach()
        assert made.coalesce_grad_reduction()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_stages_that_divide_gradients_are_refused(ranks, world, deepspeed):
    def run(rank):
        with pytest.raises(ValueError, match="ZeRO stage 2 divides gradients over the ranks"):
            quiet().attach(engine(deepspeed, 2))

    ranks(run, world)
