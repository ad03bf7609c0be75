"""The sparse all-reduce: against sums of dense tensors, with everything that is not applied in the residuals."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from fused import quiet, same_on_all_ranks, sum_over_ranks
from sparsefusion.gradients.reducer import Reducer
from sparsefusion.planning.plan import Unit, value_bytes
from sparsefusion.selection.indices import index_bytes

SIZES = {"a": 3000, "b": 70_001, "c": 1, "d": 512}


def units(density):
    """A unit for each gradient, but for c and d, which share one."""
    return [
        Unit(("a",), 3000, max(1, int(density * 3000))),
        Unit(("b",), 70_001, max(1, int(density * 70_001))),
        Unit(("c", "d"), 513, max(1, int(density * 513))),
    ]


def drawn(step, rank, dtype=torch.float32):
    """Gradients with heavy tails; those of a whole column of b, as a matrix of 64 columns, are large on every rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = {name: torch.randn(numel, generator=generator).pow_(3).to(dtype) for name, numel in SIZES.items()}
    made["b"][5::64] += 30
    return made


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_what_is_applied_and_what_is_left_are_all_gradients(ranks, world, wire):
    """Over five steps: the means that are applied, times the ranks, and all residuals are the sum of all gradients."""
    if world == 8 and wire != "fp32":
        pytest.skip("one format is enough")

    def run(rank):
        reducer = Reducer(dist.group.WORLD, wire=wire, exchange="sparse_all_reduce")
        applied = {name: torch.zeros(numel, dtype=torch.float64) for name, numel in SIZES.items()}
        given = {name: torch.zeros(numel, dtype=torch.float64) for name, numel in SIZES.items()}
        for step in range(5):
            gradients = drawn(step, rank)
            for name, gradient in gradients.items():
                given[name] += gradient
            reducer.start(units(0.02), gradients).wait()
            assert same_on_all_ranks(gradients.values())
            k = sum(unit.k for unit in units(0.02))
            assert sum(int(g.count_nonzero()) for g in gradients.values()) <= world * -(-k // world)
            for name, gradient in gradients.items():
                applied[name] += gradient
        for name in SIZES:
            left = sum_over_ranks(reducer.feedback.residuals[name])
            wanted = sum_over_ranks(given[name])
            assert (world * applied[name] + left - wanted).abs().max() < 2e-5 * wanted.abs().max().clamp(min=1), name

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_largest_sums_are_applied(ranks, world):
    """If every rank sends all that an owner can take, each owner applies the largest of its sums: half of all elements."""

    def run(rank):
        gradients = {"b": drawn(0, rank, torch.float64)["b"]}
        total = sum_over_ranks(gradients["b"])
        reducer = Reducer(dist.group.WORLD, "topk", exchange="sparse_all_reduce")
        reducer.start([Unit(("b",), 70_001, 70_001)], gradients).wait()
        assert (gradients["b"] - total / world).abs().max() < 1e-13 * total.abs().max()
        assert not sum_over_ranks(reducer.feedback.residuals["b"]).any()

    ranks(run, world)


@pytest.mark.parametrize("world", [4, 8, 16])
def test_bytes_do_not_grow_with_the_ranks(ranks, world):
    """2 (P - 1) messages of ceil(k / P) elements, as counted; at 16 ranks at most twice those of 4."""

    def run(rank):
        gradients, k = {"b": drawn(0, rank)["b"]}, 1400
        reducer = Reducer(dist.group.WORLD, exchange="sparse_all_reduce")
        reducer.start([Unit(("b",), 70_001, k)], gradients).wait()
        return reducer.counter.sent, dict(reducer.counter.calls)

    found, most, share = ranks(run, world), -(-1400 // world), -(-70_001 // world)
    message = value_bytes("fp32", most) + index_bytes(most, share)
    assert found == [(2 * (world - 1) * message, {"all_to_all": 1, "all_gather": 1})] * world
    assert 2 * (world - 1) * message < 2 * 1400 * 6.1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_all_ranks_and_no_residual(ranks, value):
    def run(rank):
        gradients = {"b": drawn(0, rank)["b"]}
        if rank == 1:
            gradients["b"][100:40_000] = value  # more than a message holds
        reducer = Reducer(dist.group.WORLD, exchange="sparse_all_reduce")
        reducer.start([Unit(("b",), 70_001, 700)], gradients).wait()
        assert not gradients["b"].isfinite().all()
        assert reducer.feedback.residuals["b"].isfinite().all()

    ranks(run, 2)


def test_training_with_it_follows_the_dense_run(ranks):
    """Where all-gathers would send more than dense gradients, auto chooses it; the loss falls as that of a dense run."""

    def run(rank, world=4):
        losses = {}
        for density in (0.3, 1.0):  # 0.3 x 4 ranks x 8 bytes > 2 x 4 bytes
            torch.manual_seed(0)
            model = DDP(torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)))
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            fusion = quiet(density=density, mode="layerwise").attach(model) if density < 1 else None
            for step in range(60):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
                loss = (model(x) - x[:, :4].sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses[density] = loss.item()
            if fusion:
                assert fusion.plan.exchange == "sparse_all_reduce" and fusion.plan.buffers
                assert fusion.counter.calls["all_to_all"] > 50
                assert same_on_all_ranks(model.parameters())
        return losses

    for losses in ranks(run, 4):
        assert losses[0.3] < 1.2 * losses[1.0] + 0.05
