"""Attaching sparse gradients to torch's DDP, and planning while it trains; oracles: DDP's own steps, counted bytes."""

import copy
import gc
import io
import math
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.curve import Curve
from fused import Net, backward, force_plan, quiet, same_on_all_ranks
from sparsefusion import MODES, SparseFusion
from sparsefusion.fusion import cost_measurement, trial
from sparsefusion.planning.compression import CompressionSettings

POINTS = [(1 << i, 1e-3, 1e-3) for i in range(10, 20)]  # bytes, seconds


@pytest.mark.parametrize("world", [1, 2])
def test_unsupported_targets_are_refused_by_name(ranks, world):
    class Embedded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(5, 3, sparse=True)

    class Waves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.modes = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    def run(rank):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        from torch.distributed.optim import _apply_optimizer_in_backward

        hooked, ours = DDP(Net()), DDP(Net())
        hooked.register_comm_hook(None, allreduce_hook)
        fusion = quiet().attach(ours)
        builtin = DDP(Net())
        builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        fused = Net()
        _apply_optimizer_in_backward(torch.optim.SGD, fused.parameters(), {"lr": 0.1})
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            without_buckets = DDP(Net())
        for target, why in (
            (hooked, "has the communication hook allreduce_hook"),
            (builtin, "this DDP accepts no communication hook: register_comm_hook"),
            (
                DDP(Net(), skip_all_reduce_unused_params=True, find_unused_parameters=True),
                "skip_all_reduce_unused_params",
            ),
            (
                builtin,
                "this DDP accepts no communication hook: register_comm_hook",
            ),  # again: the first attempt left no hook
            (without_buckets, "has the python reducer"),
            (DDP(fused), "optimizers in its backward"),
            (ours, "another SparseFusion is attached"),
            (
                Net(),
                "attaches to DistributedDataParallel of torch or Megatron-Core, or to a DeepSpeed engine, not to Net",
            ),
            (DDP(Embedded()), "words has sparse=True"),
            (DDP(Waves()), "modes is torch.complex64: SparseFusion needs real gradients"),
        ):
            with pytest.raises(ValueError, match=why):
                quiet().attach(target)
        with pytest.raises(ValueError, match="is already attached"):
            fusion.attach(DDP(Net()))
        fusion.detach()
        for action in (lambda: fusion.plan, fusion.detach, fusion.state_dict, fusion.replan):
            with pytest.raises(ValueError, match="not attached"):
                action()
        fusion.attach(ours)
        backward(ours, 0, rank)

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_copies_of_an_attached_model_are_plain_ddp(ranks, world):
    """Copies of a model that is attached, or was, as an average of weights makes them. They can be attached themselves."""

    def run(rank):
        plain, ours = DDP(Net()), DDP(Net())
        fusion = force_plan(quiet().attach(ours))
        copies = [copy.deepcopy(ours)]
        fusion.detach()
        copies.append(copy.deepcopy(ours))
        for each in (plain, *copies):
            backward(each, 0, rank)
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), each.parameters(), strict=True))
        fusion.attach(ours)
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        for each in (*copies, torch.load(file, weights_only=False)):
            sparse = force_plan(quiet().attach(each))
            backward(each, 1, rank)
            assert world == 1 or sparse.state_dict()["residuals"]

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_a_dropped_model_is_garbage_collected_with_its_fusion(ranks, world):
    def run(rank):
        for detached in (False, True):
            model = DDP(Net())
            fusion = force_plan(quiet().attach(model))
            backward(model, 0, rank)
            if detached:
                fusion.detach()
            left = weakref.ref(model.module), weakref.ref(fusion)
            del model, fusion
            gc.collect()
            assert left[0]() is None and left[1]() is None

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_fsdp_is_refused(ranks, world):
    def run(rank):
        mesh = init_device_mesh("cpu", (world,))
        for target in (fully_shard(Net(), mesh=mesh), FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))):
            with pytest.raises(ValueError, match="not to .*(FullySharded|FSDP).*, whose gradients are sharded over"):
                quiet().attach(target)

    ranks(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_is_reported_where_there_is_nothing_to_choose(ranks, world):
    """In the modes fp16 and dense, and on one rank."""

    def run(rank):
        reports = []
        for mode in ("dense", "fp16") if world > 1 else MODES:
            model = DDP(Net())
            fusion = SparseFusion(mode=mode, report=reports.append).attach(model)
            backward(model, 0, rank)
            assert fusion.plan.mode == (mode if world > 1 else "dense") and fusion.state_dict()["plan"]
        assert not reports

    ranks(run, world)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"density": 0}, "density=0 must be above 0"),
        ({"density": 1.5}, "at most 1"),
        ({"density": "0.01"}, "density='0.01' must be above 0"),
        ({"loss_scale": 1024.0}, "loss_scale=1024.0 must be a function"),
        ({"report": "log.txt"}, "report='log.txt' must be a function"),
        ({"fabric": "fabric.json"}, "fabric='fabric.json' must be a Fabric"),
        ({"model_group": -100}, "model_group=-100 must be a process group that this rank is in"),
        ({"mode": "sparse"}, "unknown mode 'sparse': expected dense, fp16"),
        ({"sparsifier": "top"}, "unknown sparsifier 'top': expected topk"),
        ({"wire": "fp8"}, "unknown wire 'fp8': expected fp32"),
        ({"density_warmup": -1}, "density_warmup=-1 must be a number of steps"),
        ({"density_warmup": math.nan}, "density_warmup=nan must be a number of steps"),
        ({"budget": "money"}, "unknown budget 'money': expected none, paper"),
        ({"on_nonfinite": "hope"}, "unknown on_nonfinite 'hope': expected raise, skip-known"),
    ],
)
def test_wrong_options(options, why):
    with pytest.raises(ValueError, match=why):
        SparseFusion(**options)


def test_density_may_be_any_kind_of_number():
    assert (
        SparseFusion(Fraction(1, 100), density_warmup=np.int64(3))._options.compression
        == SparseFusion(0.01)._options.compression
    )


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_static_graphs_and_activation_checkpointing(ranks, world):
    """With both, DDP hands buckets over in another order; what is sent does not depend on it."""

    class Checkpointed(Net):
        def forward(self, x, spare=False):
            return checkpoint(super().forward, x, spare, use_reentrant=False)

    def run(rank):
        models = [DDP(Net(), bucket_cap_mb=0.05), DDP(Checkpointed(), bucket_cap_mb=0.05, static_graph=True)]
        for model in models:
            force_plan(quiet().attach(model), mode="interleaved")
        for step in range(5):
            for model in models:
                backward(model, step, rank)
            for p, q in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(p.grad, q.grad)

    ranks(run, world)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_parameters_that_ddp_ignores_are_left_alone(ranks, world):
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


class Tied(torch.nn.Module):
    """A weight with two names, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.last.weight, self.scale = self.first.weight, torch.nn.Parameter(torch.ones(32))

    def forward(self, x, spare=False):
        """(batch, 32) -> (batch, 32)."""
        return self.last(self.first(x).tanh() * self.scale)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_parameters_that_ddp_reduces_despite_the_ignore_list(ranks, world):
    """DDP compares names with the module's path before them; those of its own parameters begin with a dot."""

    def run(rank):
        net = Tied()
        net._ddp_params_and_buffers_to_ignore = ["scale", "first.weight"]
        model = DDP(net)
        fusion = quiet(mode="layerwise", density=0.05).attach(model)
        for step in range(7):
            backward(model, step, rank)
        names = {name for buffer in fusion.plan.buffers for name in buffer.names}
        assert names == {"first.bias", "last.weight", "last.bias", "scale"}
        assert same_on_all_ranks([p.grad for p in model.parameters()])

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_failed_attach_leaves_the_model_unattached(ranks, world):
    def run(rank):
        model, divided = DDP(Net()), dist.group.WORLD

        def copied(parameter):
            raise KeyError("no such mark")

        with pytest.raises(KeyError, match="no such mark"):
            quiet(mode="layerwise", density=0.05, model_group=divided, copied=copied).attach(model)
        fusion = force_plan(quiet().attach(model))
        backward(model, 0, rank)
        assert fusion.state_dict()["residuals"] and same_on_all_ranks([p.grad for p in model.parameters()])

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_parameters_frozen_after_ddp_was_built(ranks, world):
    """DDP continues to reduce them."""

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
def test_a_fabric_without_an_operation_is_refused(ranks, world):
    def run(rank):
        curve = Curve.fit("all_reduce", world, POINTS)
        with pytest.raises(ValueError, match="all_gather"):
            quiet(fabric=Fabric((curve,), {})).attach(DDP(Net()))

    ranks(run, world)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_an_error_of_the_planning_rank_is_raised_on_every_rank(ranks, world):
    def run(rank):
        def report(text):
            raise OSError("no paper")

        model = DDP(Net())
        SparseFusion(0.02, mode="layerwise", report=report).attach(model)
        for step in range(4):
            backward(model, step, rank)
        with pytest.raises(OSError, match="^no paper$"):
            backward(model, 4, rank)

    ranks(run, world)


# Planning during training


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_modes_profile_five_steps_and_then_send_what_is_planned(ranks, monkeypatch, world):
    """Also where the smallest message is slow already. The state of torch's random numbers does not change."""
    monkeypatch.setattr(cost_measurement, "SLOW_S", 0.0)

    def run(rank):
        reports = []
        for mode in ("layerwise", "bucket", "selective", "interleaved"):
            model = DDP(Net(), bucket_cap_mb=0.05)
            fusion, random = SparseFusion(0.02, mode=mode, report=reports.append).attach(model), torch.get_rng_state()
            for step in range(5):
                assert fusion.plan.mode == "dense"
                backward(model, step, rank)
            assert fusion.plan.mode == mode and fusion.plan.sent_elements[2] == sum(
                p.numel() for p in model.parameters()
            )
            assert len(set(gathered(fusion.plan.hash))) == 1 and torch.equal(random, torch.get_rng_state())
            counter = fusion._session.reducer.counter
            counter.reset()
            backward(model, 5, rank)
            dense, sparse, _ = fusion.plan.sent_elements
            messages = sum(any(unit.k for unit in buffer.units) for buffer in fusion.plan.buffers)
            assert (
                counter.nbytes == 4 * dense + (4 + 2) * sparse + 4 * messages
            )  # 4 bytes of a message count its indices; each covers less than 65,536 elements
        return reports

    found = ranks(run, world)
    assert [len(reports) for reports in found] == [4] + [0] * (world - 1)
    assert found[0][0].startswith(f"sparsefusion: {world} ranks, 8 gradients of 44,300 elements")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sparsifier, wire", [("randomk", "fp32"), ("topk", "int8")])
def test_costs_are_measured_for_the_sparsifier_and_the_format(ranks, world, sparsifier, wire):
    """They are the same on all ranks. The state of torch's random numbers does not change."""

    def run(rank):
        compression, random = CompressionSettings(0.02, sparsifier, wire), torch.get_rng_state()
        costs = cost_measurement.measure_costs(
            dist.group.WORLD, torch.device("cpu"), torch.bfloat16, 50_000, compression
        )
        assert torch.equal(random, torch.get_rng_state())
        model = DDP(Net())
        fusion = quiet(mode="layerwise", density=0.02, sparsifier=sparsifier, wire=wire).attach(model)
        for step in range(6):
            backward(model, step, rank)
        assert fusion.plan.mode == "layerwise" and set(fusion.state_dict()["residuals"]) == set(fusion._session.sizes)
        return costs.per_message, costs.select(4096), costs.select(50_000), costs.add(1), costs.copy(1)

    found = ranks(run, world)
    assert len(set(found)) == 1 and min(found[0][1:]) > 0 <= found[0][0] < 10


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_planned_bytes_are_those_that_are_sent(ranks, world, wire):
    """Including int8's blocks, which each gradient fills up, however few elements it sends."""

    def run(rank):
        model, compression = DDP(Net()), CompressionSettings(0.01, wire=wire)
        fusion = quiet(mode="layerwise", wire=wire).attach(model)
        for step in range(6):
            fusion.counter.reset()
            backward(model, step, rank)
        counts = [unit.k for buffer in fusion.plan.buffers for unit in buffer.units]
        planned = compression.sent_bytes(sum(counts), 4, sum(map(compression.filled, counts)))
        assert len(counts) == 8 and fusion.counter.nbytes == planned + 4 * len(
            fusion.plan.buffers
        )  # 4 bytes of each message count its indices

    ranks(run, world)


def gathered(mine):
    """The value of every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_auto_decides_the_same_on_all_ranks(ranks, monkeypatch, world):
    monkeypatch.setattr(trial, "ROUNDS", 2)

    def run(rank):
        model, reports = DDP(Net()), []
        fusion = SparseFusion(0.02, report=reports.append).attach(model)
        for step in range(5 + trial.MOST_PLANS * trial.ROUNDS * trial.STEPS):
            backward(model, step, rank)
        assert fusion._selection.is_final and len(set(gathered(fusion.plan.hash))) == 1
        assert same_on_all_ranks([p.grad for p in model.parameters()])
        if rank == 0:  # it is predicted to be no faster than selective, and does not take part in the trial
            assert "offload" in reports[0] and not any("offload" in text for text in reports[1:])
        return fusion.plan.mode, set(fusion.plan.predicted)

    modes, predicted = zip(*ranks(run, world), strict=True)
    assert len(set(modes)) == 1
    assert all(each == set(MODES) - {"auto"} for each in predicted)


@pytest.mark.parametrize("world", [2, 4])
def test_a_density_that_is_too_large_stays_dense(ranks, world):
    def run(rank):
        reports = []
        model = DDP(Net())
        options = dict(mode="layerwise", exchange="all_gather", report=reports.append)
        fusion = SparseFusion(1.1 / world if world > 1 else 1, **options).attach(model)
        for step in range(2):
            backward(model, step, rank)
        return fusion.plan.mode, fusion._selection.is_final, reports

    found = ranks(run, world)
    assert all(mode == "dense" and decided for mode, decided, _ in found)
    assert "dense, as layerwise would not send clearly less" in found[0][2][0]


@pytest.mark.parametrize(
    "density", [0.01, 0.2]
)  # 0.2: less than 2 x 8 bytes of float64 on 2 ranks, but not less than fp16
@pytest.mark.parametrize("world", [2, 3])
def test_auto_does_not_consider_fp16_for_float64(ranks, world, density):
    def run(rank):
        fusion = quiet(density=density).attach(DDP(Net(torch.float64)))
        for step in range(5):
            backward(fusion._target, step, rank, dtype=torch.float64)
        return set(fusion.plan.predicted)

    assert ranks(run, world) == [{"dense", "layerwise", "bucket", "selective", "interleaved", "offload"}] * world


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_auto_reports_why_it_considers_nothing_sparse(ranks, world):
    """The density would help compared with dense gradients, but not compared with float16."""

    def run(rank):
        reports, model = [], DDP(Net())
        fusion = SparseFusion(0.6 / world, exchange="all_gather", report=reports.append).attach(model)
        for step in range(5):
            backward(model, step, rank)
        return reports, set(fusion.plan.predicted)

    found = ranks(run, world)
    assert f"sparse messages would not send clearly less, on {world} ranks" in found[0][0][0]
    assert all(modes == {"dense", "fp16"} for _, modes in found)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_density_warmup(ranks, world):
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
        assert own == sent[15] < 6 * (0.01 * total + 8) + 4
        first = next(step for step in range(5, 20) if sent[step])
        assert all(a > b for a, b in zip(sent[first:10], sent[first + 1 : 11], strict=True))
        if world == 2:  # the first density, a quarter, sends less than dense on 2 ranks
            assert first == 5 and abs(sent[5] / (6 * 0.25 * total) - 1) < 0.01


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_data_parallelism_over_a_part_of_the_world(ranks, world):

    def run(rank):
        groups = [dist.new_group(list(range(world))), dist.new_group(list(range(world, 2 * world)))]
        group, mine = groups[rank // world], rank % world
        model = DDP(Net(), process_group=group)
        force_plan(quiet().attach(model))
        for step in range(2):
            backward(model, step, rank)
        gradient = model.module.second.weight.grad
        first = gradient.clone()
        dist.broadcast(first, rank - mine, group=group)
        assert torch.equal(first, gradient)
        return gradient

    found = ranks(run, 2 * world)
    assert not torch.equal(found[0], found[-1])
