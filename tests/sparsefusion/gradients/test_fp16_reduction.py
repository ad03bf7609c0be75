"""Gradients in float16; oracle: torch's DDP, its fp16 hook, and means in float64."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from fused import Net, attach_fp16, backward, batch, quiet, same_on_all_ranks
from sparsefusion.gradients.fp16_reduction import Fp16Scale

NUMEL = sum(p.numel() for p in Net().parameters())


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_fp16_is_at_least_as_exact_as_torchs_hook(ranks, world):
    """The same bits in the first step on 2 ranks, where the division is exact; otherwise the error is no larger."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def run(rank):
        plain, ours = (DDP(Net(), bucket_cap_mb=0.1) for _ in range(2))
        plain.register_comm_hook(None, fp16_compress_hook)
        exact = DDP(Net(), bucket_cap_mb=0.1)
        attach_fp16(ours)
        for step in range(3):
            backward(plain, step, rank), backward(ours, step, rank), backward(exact, step, rank)
            theirs, found, means = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (plain, ours, exact))
            assert step or world == 3 or torch.equal(theirs, found)
            assert (found - means).norm() <= (1 + 1e-6) * (theirs - means).norm()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_fp16_keeps_small_gradients(ranks, world):
    """Gradients far below float16's smallest number, 6e-8, from the second step on; those of the first step underflow."""

    def run(rank):
        plain, ours = (DDP(Net(), bucket_cap_mb=0.1) for _ in range(2))
        fusion = attach_fp16(ours)
        for step, times in enumerate((1e-9, 1e-9, 1e-6, 1e3, 1e-9, 1e-9)):
            backward(plain, step, rank)
            ours.zero_grad()
            (times * ours(batch(step, rank), True).square().mean()).backward()
            assert same_on_all_ranks([p.grad for p in ours.parameters()])
            assert math.log2(fusion._session.reducer.fp16_scale.value).is_integer()
            for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
                error = (q.grad.double() / times - p.grad).norm() / p.grad.double().norm()
                assert error <= 1e-3 if step in (1, 2, 3, 5) else error > 0.01, (step, error)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_fp16_sends_buckets_that_overflow_again(ranks, world):
    def run(rank):
        plain, ours, alone = DDP(Net(), bucket_cap_mb=0.1), DDP(Net(), bucket_cap_mb=0.1), Net()
        attach_fp16(ours)
        for model in (plain.module, ours.module, alone) if rank == 0 else ():
            model.first.bias.register_hook(lambda g: g * 1e30)
        for step in range(3):
            for model in (plain, ours, alone):
                backward(model, step, rank)
            assert same_on_all_ranks([p.grad for p in ours.parameters()])
            for p, q, one in zip(plain.parameters(), ours.parameters(), alone.parameters(), strict=True):
                dist.all_reduce(one.grad.abs_())  # the sum of magnitudes, which bounds the rounding errors
                assert ((q.grad - p.grad).abs() <= 2**-11 * one.grad + 1e-6).all()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_nonfinite_means_are_an_error_in_fp16_but_not_in_dense(ranks, world):
    def run(rank):
        for mode in ("dense", "fp16"):
            model = DDP(Net())
            quiet(mode=mode).attach(model) if mode == "dense" else attach_fp16(model)
            if rank == 0:
                model.module.first.bias.register_hook(lambda g: g * math.inf)
            if mode == "dense":
                backward(model, 0, rank)
            else:
                with pytest.raises(FloatingPointError, match="step 0: the gradient of first.bias"):
                    backward(model, 0, rank)

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_float16_gradients_that_are_not_finite(ranks, world):
    """Inf on one rank; then a sum that overflows float16 on 3 ranks; then finite gradients. All ranks have the same bits."""

    def run(rank):
        model, alone = DDP(Net(torch.float16), bucket_cap_mb=0.1), Net(torch.float16)
        attach_fp16(model, on_nonfinite="skip-known")
        times = {}
        for each in (model.module, alone):
            each.first.bias.register_hook(lambda g: times["first"](g))
        for step, first in enumerate(
            (lambda g: g * math.inf if rank == 0 else g, lambda g: torch.full_like(g, 65504.0), lambda g: g)
        ):
            times["first"] = first
            for each in (model, alone):
                backward(each, step, rank, dtype=torch.float16)
            gradients = [p.grad for p in model.parameters()]
            finite = [g.isfinite().all().item() for g in gradients]
            assert all(finite) == (step == 2 or (step == 1 and world == 2))  # a third of 65504 is rounded up
            seen = [None] * world
            dist.all_gather_object(seen, [finite, [g.nan_to_num() for g in gradients]])
            assert all(each[0] == finite for each in seen)
            assert all(all(map(torch.equal, seen[0][1], each[1])) for each in seen)
            for own, found, there in zip(alone.parameters(), gradients, finite, strict=True):
                mean, most = own.grad.double(), own.grad.double().abs()
                dist.all_reduce(mean), dist.all_reduce(most)
                assert not there or ((found - mean / world).abs() <= 2**-10 * most + 1e-6).all()

    ranks(run, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_buckets_are_sent_again_only_if_they_overflow(ranks, world):
    """Not if gradients grow by 1000, or with a constant large loss scale. A skipped step does not change the scale."""

    def run(rank):
        plain, model, now = DDP(Net(), bucket_cap_mb=0.1), DDP(Net(), bucket_cap_mb=0.1), {}
        fusion = attach_fp16(model, loss_scale=lambda: now["loss_scale"])
        for each in (plain, model):
            each.module.first.bias.register_hook(lambda g: g * now["times"])
        scale = fusion._session.reducer.fp16_scale
        for loss_scale, times, again in (
            (1.0, 1.0, False),
            (1.0, 1.0, False),
            (1.0, 1000.0, False),
            (1.0, math.inf, True),
            (1.0, 1.0, False),
            (2.0**30, 1.0, True),
            (2.0**30, 1.0, False),
            (2.0**31, 1.0, False),
        ):
            before, now["loss_scale"], now["times"] = scale.value, loss_scale, times
            fusion.counter.reset()
            for each in (plain, model):
                each.zero_grad()
                (loss_scale * each(batch(0, rank), True).square().mean()).backward()
            assert scale.value == before or times != math.inf
            assert (fusion.counter.nbytes > 2 * NUMEL) == again
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                assert times == math.inf or (q.grad - p.grad).norm() <= 1e-2 * p.grad.norm()

    ranks(run, world)


def test_fp16_scale():
    """With a loss scale it may be below 1, but no smaller than necessary. 0 and Inf are accepted."""
    scale = Fp16Scale()
    for most, loss_scale, expected in (
        (1.0, 2.0**20, 16.0),
        (31.0, 2.0**20, 1.0),
        (4095.0, 2.0**20, 1.0),
        (10486.0, 2.0**20, 0.25),
        (1e30, 2.0**20, 2.0**-20),
        (1e30, 1e6, 2.0**-19),
        (1e30, 1.0, 1.0),
        (10486.0, 0.5, 1.0),
        (10486.0, 0.0, 1.0),
        (10486.0, math.inf, 1.0),
        (1e300, 2.0**80, 2.0**-64),
        (math.inf, 2.0**80, 2.0**-64),
        (0.0, 1.0, 1.0),
        (0.0, 1.0, 2.0**24),
        (1e-30, 1.0, 2.0**64),
        (0.0, 1.0, 2.0**64),
    ):
        scale.follow(most, loss_scale)
        assert scale.value == expected, (most, loss_scale)


class Parts(torch.nn.Module):
    """Of a divided model: a parameter that each part has, and one of its own."""

    def __init__(self):
        super().__init__()
        self.copied, self.own = (torch.nn.Parameter(torch.zeros(n)) for n in (1000, 10))

    def forward(self, x, y):
        return (self.copied * x).sum() + (self.own * y).sum()


@pytest.mark.parametrize("world", [4, pytest.param(6, marks=pytest.mark.full)])
def test_copies_on_the_parts_of_a_model_stay_equal(ranks, world):
    """Gradients are so small that the scale matters, and those of one part overflow in one step."""

    def run(rank):
        halves = [dist.new_group([*range(each, world, 2)]) for each in range(2)]
        pairs = [dist.new_group([each, each + 1]) for each in range(0, world, 2)]
        model = DDP(Parts(), process_group=halves[rank % 2])
        attach_fp16(model, model_group=pairs[rank // 2])
        for step, own in enumerate((1.0, 1.0, 1e10, 1.0, 1.0)):
            generator = torch.Generator().manual_seed(10 * step + rank // 2)
            x = 1e-4 * torch.randn(1000, generator=generator) * torch.randn(1000, generator=generator).exp()
            model.zero_grad()
            model(x, torch.full((10,), own if rank % 2 else 1e-3)).backward()
            other = model.module.copied.grad.clone()
            dist.broadcast(other, rank // 2 * 2, group=pairs[rank // 2])
            assert torch.equal(other, model.module.copied.grad), step
            mean = torch.zeros(1000, dtype=torch.float64)
            mean += x
            dist.all_reduce(mean, group=halves[rank % 2])
            assert (model.module.copied.grad - mean / (world // 2)).norm() <= 1e-3 * mean.norm()
            assert model.module.own.grad.allclose(torch.tensor(own if rank % 2 else 1e-3), rtol=1e-3)

    ranks(run, world)
