"""Sparse gradients in Megatron-Core, on CPU; oracles: its own reductions, and plain sums of gradients.

Megatron's DDP asks CUDA for a device: here it is told the CPU.
"""

import warnings

import pytest
import torch

from fused import (
    MICRO,
    Net,
    attach_fp16,
    batch,
    force_dense,
    force_plan,
    plan,
    quiet,
    record_timelines,
    residual_of,
    same_on_all_ranks,
    sum_over_ranks,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing takes seconds: once here instead of in every forked rank
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig


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


def megatron(monkeypatch, average=False, net=None, dtype=torch.float32, **options):
    """A Megatron DDP module around Net. options: of its configuration."""
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
    """Compute and reduce the gradients of MICRO batches."""
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
    """Dense and detached: Megatron's own bits. Sparse: what is applied and the residuals add up to all gradients."""

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
            fusion = force_plan(quiet().attach(ours), **mode)
            applied = dict.fromkeys(dict(ours.module.named_parameters()), 0)
            for step in range(4):
                megatron_step(ours, step, rank)
                assert same_on_all_ranks(main_grads(ours).values())
                for name, p in ours.module.named_parameters():
                    applied[name] = applied[name] + p.main_grad.double() * (world if average else 1)
                if step == 2 and not distributed:
                    force_dense(fusion)
            for name, total in reference(rank, 4).items():
                left = residual_of(fusion, name, total) * (1 if average else 1 / world)
                error = applied[name] + sum_over_ranks(left) - sum_over_ranks(total)
                assert error.norm() <= 1e-6 * sum_over_ranks(total).norm(), name

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_megatron_in_bfloat16_with_unused_parameters(ranks, world, monkeypatch):
    """Dense: Megatron's own bits. Sparse: equal on all ranks, and exact up to the rounding of bfloat16."""

    def run(rank):
        bf16, total, applied = torch.bfloat16, {}, {}
        plain, ours, sparse = (megatron(monkeypatch, True, dtype=bf16) for _ in range(3))
        quiet(mode="dense").attach(ours)
        fusion = force_plan(quiet().attach(sparse))
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
            left = sum_over_ranks(residual_of(fusion, name, gradient))
            assert (applied[name] + left - gradient).norm() <= 2e-2 * gradient.norm(), name
        assert any(not torch.equal(applied[name], total[name]) for name in total)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("average, distributed", [(True, False), (False, False), (True, True)])
def test_megatron_in_fp16(ranks, world, average, distributed, monkeypatch):
    """All elements are sent, rounded; also where Megatron expects a sum."""

    def run(rank):
        options = dict(average=average, use_distributed_optimizer=distributed)
        ours = megatron(monkeypatch, **options)
        attach_fp16(ours)
        megatron_step(ours, 0, rank)
        assert same_on_all_ranks(main_grads(ours).values())
        for name, gradient in reference(rank, 1).items():
            expected = sum_over_ranks(gradient) / (world if average else 1)
            assert 1e-5 * expected.norm() < (main_grads(ours)[name] - expected).norm() <= 1e-3 * expected.norm(), name

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_megatrons_skipped_steps_change_nothing(ranks, world, monkeypatch):
    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=True)
        fusion = force_plan(quiet(loss_scale=lambda: 8.0).attach(ddp))
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
def test_parts_of_megatrons_model_have_the_same_plan(ranks, tp, dp, monkeypatch):
    """Megatron's DDP knows the ranks over which the model is divided. Here all parameters are copies."""

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


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_pipelines_and_experts_with_a_loss_scale_are_refused(ranks, world, monkeypatch):
    """Without a loss scale, experts are reduced by Megatron."""

    def run(rank):
        net = Net()
        net.last.weight.allreduce = False  # the mark of expert parameters
        ddp = megatron(monkeypatch, True, net=net)
        scaled, skips = {"loss_scale": lambda: 1.0}, {"on_nonfinite": "skip-known"}
        for options in (scaled, skips, scaled | {"on_nonfinite": "raise"}):
            with pytest.raises(
                ValueError, match="a loss scale, or skipped steps, does not work with Megatron's experts"
            ):
                quiet(**options).attach(ddp)
        fusion = force_plan(quiet().attach(ddp))
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
        fusion = force_plan(quiet().attach(straight), mode="bucket")
        for step in range(3):
            megatron_step(straight, step, rank)
        again = quiet(density=0.05, mode="bucket").attach(resumed)
        again.load_state_dict(fusion.state_dict())
        for step in range(3, 6):
            megatron_step(straight, step, rank), megatron_step(resumed, step, rank)
            for p, q in zip(straight.module.parameters(), resumed.module.parameters(), strict=True):
                assert torch.equal(p.main_grad, q.main_grad)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_residuals_are_kept_when_an_error_ends_a_dense_step(ranks, world, monkeypatch):
    """Some buckets of the step had been sent. The residuals are flushed in the next step."""

    def run(rank):
        ddp = megatron(monkeypatch, True)
        fusion = force_plan(quiet().attach(ddp))
        megatron_step(ddp, 0, rank)
        before = fusion.state_dict()["residuals"]
        force_dense(fusion)
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
def test_unsupported_options_of_megatron_are_refused(ranks, world, option, monkeypatch):
    def run(rank):
        ddp = megatron(monkeypatch, True)
        setattr(ddp.ddp_config, option, True)
        with pytest.raises(ValueError, match=f"does not work with Megatron's {option}"):
            quiet().attach(ddp)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_megatron_can_continue_after_an_error(ranks, world, overlap, monkeypatch):
    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=overlap)
        fusion = force_plan(quiet().attach(ddp), mode="interleaved")
        megatron_step(ddp, 0, rank)
        wrong = ddp.module.second.weight.register_hook(lambda g: g * (float("nan") if rank == 0 else 1))
        with pytest.raises(FloatingPointError, match="step 1: the gradient of second.weight"):
            megatron_step(ddp, 1, rank)
        wrong.remove()
        megatron_step(ddp, 2, rank)
        assert same_on_all_ranks(main_grads(ddp).values())
        assert all(p.main_grad.isfinite().all() for p in ddp.module.parameters()) and fusion.state_dict()["step"] == 3

    ranks(run, world)


def attach_with_early_units(ddp, ranks):
    """An attached SparseFusion whose plan has the order in which Megatron's gradients are ready, and sends vectors early."""
    fusion = force_plan(quiet().attach(ddp))
    sizes = dict(reversed(fusion._session.sizes.items()))
    fusion._session.plan = plan(sizes, ranks, mode="interleaved", early=True)
    return fusion


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("where", ["first", "second"])
@pytest.mark.parametrize("forced", [False, True])
def test_an_interrupted_backward_pass_of_megatron(ranks, world, where, forced, monkeypatch):
    """What it has sent is not mixed with the next pass: that is an error, and attaching again clears it."""

    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=True)
        fusion = attach_with_early_units(ddp, world)
        for step in range(2):
            megatron_step(ddp, step, rank)

        def fail(gradient):
            raise KeyError("in the middle")

        wrong = getattr(ddp.module, where).weight.register_hook(fail)
        with pytest.raises(KeyError, match="in the middle"):
            ddp.zero_grad_buffer()
            ddp(batch(4, rank), True).square().mean().backward()
        wrong.remove()
        with pytest.raises(RuntimeError, match="arrived twice in step 2: a backward pass failed"):
            megatron_step(ddp, 3, rank)
        fusion.detach()
        if forced:
            attach_with_early_units(ddp, world)
        else:  # the first step is dense, by Megatron's own reduction
            quiet().attach(ddp)
        megatron_step(ddp, 4, rank)
        assert same_on_all_ranks(main_grads(ddp).values())

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_early_units_are_sent_before_a_bucket_is_complete(ranks, world, monkeypatch):
    """SSFusion-I's l': early units are sent before the last bucket of their buffer is handed over."""

    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=True)
        session = attach_with_early_units(ddp, world)._session
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


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("overlap", [False, True])
def test_profiled_gradients_are_ready_when_megatron_hands_them_over(ranks, world, overlap, monkeypatch):
    """Without overlap, that is after the backward pass, for all gradients at once."""

    def run(rank):
        seen = record_timelines(monkeypatch)
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=overlap)
        quiet(mode="layerwise").attach(ddp)
        for step in range(5):
            megatron_step(ddp, step, rank)
        if rank == 0:
            assert not seen[0].waits_for_atoms and (len({tensor.ready for tensor in seen[0].tensors}) == 1) != overlap

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("distributed", [False, True])
def test_megatron_plans_have_all_parameters(ranks, world, distributed, monkeypatch):
    def run(rank):
        ddp = megatron(monkeypatch, True, overlap_grad_reduce=True, use_distributed_optimizer=distributed)
        fusion = quiet(mode="layerwise", density=0.05).attach(ddp)
        for step in range(7):
            megatron_step(ddp, step, rank)
        names = [name for buffer in fusion.plan.buffers for name in buffer.names]
        assert fusion.plan.mode == "layerwise" and sorted(names) == sorted(dict(ddp.module.named_parameters()))
        assert same_on_all_ranks(main_grads(ddp).values())

    ranks(run, world)


@pytest.mark.parametrize(
    "tp, dp", [pytest.param(1, 2, marks=pytest.mark.full), pytest.param(1, 3, marks=pytest.mark.full), (2, 2)]
)
def test_a_setting_refused_on_one_rank_is_an_error_on_all(ranks, tp, dp, monkeypatch):
    """Also on the other tensor-parallel ranks. Then none of them is attached."""

    def run(rank):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        ddp = megatron(monkeypatch, True)
        ddp.ddp_config.check_for_large_grads = rank == tp * dp - 1
        with pytest.raises(ValueError, match=r"does not work with Megatron's check_for_large_grads \(rank "):
            quiet().attach(ddp)
        ddp.ddp_config.check_for_large_grads = False
        fusion = force_plan(quiet().attach(ddp))
        megatron_step(ddp, 0, rank // tp)
        assert same_on_all_ranks(main_grads(ddp).values()) and fusion.state_dict()["residuals"]

    ranks(run, tp * dp, timeout=30)
