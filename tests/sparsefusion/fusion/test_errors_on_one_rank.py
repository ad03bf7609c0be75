"""What fails on one rank only is an error on every rank; oracle: the error that each rank raises before a short timeout."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from fused import Net, backward, force_plan, quiet, same_on_all_ranks
from sparsefusion.fabric.cost_model import Fabric
from sparsefusion.fabric.curve import Curve
from sparsefusion.planning.plan import WIRES

POINTS = [(1 << i, 1e-3, 1e-3) for i in range(10, 20)]  # bytes, seconds
MODES = (
    *({"mode": mode} for mode in ("fp16", "layerwise", "bucket", "selective", "interleaved", "offload")),
    *({"mode": "bucket", "wire": wire} for wire in WIRES),
    {"mode": "layerwise", "sparsifier": "randomk"},
    {"mode": "layerwise", "whole": [name for name, _ in Net().named_parameters()]},  # all of them dense
)


class Scale:
    """A loss scale of 4, unless it is told to fail."""

    problem: object = None

    def __call__(self):
        if isinstance(self.problem, Exception):
            raise self.problem
        return 4.0 if self.problem is None else self.problem


def attached(model, scale, mode, **options):
    """A SparseFusion that is past its first steps, and sends by a plan of this mode."""
    fusion = quiet(mode="fp16" if mode == "fp16" else "auto", loss_scale=scale, **options.pop("fusion", {}))
    fusion.attach(model)
    if mode == "fp16":
        fusion._session.compare_ranks()
        return fusion
    return force_plan(fusion, mode=mode, **options)


@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_scale_that_fails_on_one_rank_fails_on_all(ranks, world):
    """In every mode; residuals are restored, and training can continue."""

    def run(rank):
        for options in MODES:
            model, scale = DDP(Net(), bucket_cap_mb=0.1), Scale()
            fusion = attached(model, scale, **options)
            backward(model, 0, rank)
            before = fusion.state_dict()["residuals"]
            for problem, why in (
                (KeyError("no scale"), r"KeyError\('no scale'\)"),
                (0.0, r"ValueError\('it returned 0.0, which is not above 0'\)"),
                (math.nan, r"ValueError\('it returned nan, which is not above 0'\)"),
                ("large", r"ValueError\(.could not convert string to float: 'large'.\)"),
            ):
                scale.problem = problem if rank == world - 1 else None
                step = fusion.state_dict()["step"]
                with pytest.raises(
                    ValueError, match=rf"^step {step}: loss_scale\(\) failed: {why} \(rank {world - 1}\)"
                ):
                    backward(model, step, rank)
                scale.problem = None
                after = fusion.state_dict()["residuals"]
                assert before.keys() == after.keys(), options
                assert all(torch.equal(before[name], after[name]) for name in before), options
            backward(model, 5, rank)
            gradients = [p.grad for p in model.parameters()]
            assert same_on_all_ranks(gradients) and all(g.isfinite().all() for g in gradients), options
            scale.problem = KeyError("everywhere")
            with pytest.raises(
                ValueError, match=r"^step 6: loss_scale\(\) failed: KeyError\('everywhere'\)$"
            ) as raised:
                backward(model, 6, rank)
            assert raised.value.__cause__ is scale.problem

    ranks(run, world, timeout=30)


@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_scale_that_fails_when_residuals_are_flushed(ranks, world):
    """The dense steps of a new profile: in the first one residuals need the scale, and in later ones nothing does."""

    def run(rank):
        model, scale = DDP(Net(), bucket_cap_mb=0.1), Scale()
        fusion = attached(model, scale, "layerwise")
        backward(model, 0, rank)
        before = fusion.state_dict()["residuals"]
        fusion.replan()
        scale.problem = KeyError("no scale") if rank == 1 else None
        with pytest.raises(ValueError, match=r"^step 1: loss_scale\(\) failed: KeyError\('no scale'\) \(rank 1\)"):
            backward(model, 1, rank)
        after = fusion.state_dict()["residuals"]
        assert before and before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        scale.problem = None
        backward(model, 2, rank)
        assert not fusion.state_dict()["residuals"]
        scale.problem = KeyError("no scale") if rank == 1 else None
        backward(model, 3, rank)
        assert same_on_all_ranks([p.grad for p in model.parameters()])
        assert all(p.grad.isfinite().all() for p in model.parameters())

    ranks(run, world, timeout=30)


@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_scale_that_fails_in_join(ranks, world):
    """Ranks without data raise the error as well; in join() they raise it outside of a backward pass."""

    def run(rank):
        model, scale = DDP(Net(), bucket_cap_mb=0.1), Scale()
        attached(model, scale, "layerwise")
        with pytest.raises(ValueError, match=r"^step 1: loss_scale\(\) failed: KeyError"), model.join():
            for step in range(1 + bool(rank)):
                scale.problem = KeyError("no scale") if (step, rank) == (1, 1) else None
                backward(model, step, rank)

    ranks(run, world, timeout=30)


def divided(world):
    """The calling rank's data group and model group, where two ranks share a model."""
    parts = [[rank for rank in range(world) if rank % 2 == part] for part in (0, 1)]
    return dist.new_subgroups_by_enumeration(parts)[0], dist.new_subgroups(2)[0]


@pytest.mark.parametrize("world", [4, 6])
@pytest.mark.parametrize("mode", ["fp16", "layerwise"])
def test_a_loss_scale_that_fails_in_one_part_of_a_divided_model(ranks, world, mode):
    def run(rank):
        data, model_group = divided(world)
        model, scale = DDP(Net(), process_group=data), Scale()
        attached(model, scale, mode, fusion={"model_group": model_group})
        backward(model, 0, rank)
        scale.problem = KeyError("no scale") if rank == 2 else None
        with pytest.raises(ValueError, match=r"^step 1: loss_scale\(\) failed: KeyError\('no scale'\) \(rank "):
            backward(model, 1, rank)
        scale.problem = None
        backward(model, 2, rank)
        assert all(p.grad.isfinite().all() for p in model.parameters())

    ranks(run, world, timeout=30)


def fabric(world, *operations):
    """A fabric that was measured for these operations."""
    return Fabric(tuple(Curve.fit(name, world, POINTS) for name in operations), {})


@pytest.mark.parametrize("world", [2, 3])
def test_what_one_rank_refuses_to_attach_all_refuse(ranks, world):
    """Then none of them is attached: the model reduces its gradients itself, and can be attached."""

    def run(rank):
        is_last = rank == world - 1

        def copied(parameter):
            if is_last:
                raise KeyError("no such mark")
            return True

        def refused(why, model, fusion):
            with pytest.raises(ValueError, match=rf"^{why} \(rank {world - 1}\)"):
                fusion.attach(model)
            plain = DDP(Net(), find_unused_parameters=True)
            for each in (plain, model):
                backward(each, 0, rank)
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
            attached = force_plan(quiet().attach(model))
            backward(model, 1, rank)
            assert attached.state_dict()["residuals"]

        def ddp(**options):
            return DDP(Net(), find_unused_parameters=True, **options)

        known = fabric(world, "all_reduce", *(() if is_last else ("all_gather",)))
        refused(".*all_gather.*", ddp(), quiet(fabric=known))
        by_mark = quiet(mode="layerwise", density=0.05, model_group=dist.group.WORLD, copied=copied)
        refused("KeyError: 'no such mark'", ddp(), by_mark)
        skips = ddp(skip_all_reduce_unused_params=is_last)
        with pytest.raises(ValueError, match=rf"skip_all_reduce_unused_params.* \(rank {world - 1}\)"):
            quiet().attach(skips)
        model, other = ddp(), ddp()
        fusion = quiet()
        if is_last:
            model._sparsefusion = fusion
        with pytest.raises(ValueError, match=rf"^another SparseFusion is attached.* \(rank {world - 1}\)"):
            quiet().attach(model)
        fusion = quiet().attach(other)  # an attached one stays so
        if is_last:
            del model._sparsefusion
        with pytest.raises(ValueError, match="^this SparseFusion is attached already"):
            fusion.attach(model)
        assert fusion.plan.mode == "dense"

    ranks(run, world, timeout=30)


@pytest.mark.parametrize("world", [4, 6])
def test_what_one_part_of_a_divided_model_refuses_all_refuse(ranks, world):
    def run(rank):
        data, model_group = divided(world)
        known = fabric(world // 2, "all_reduce", *(() if rank == 2 else ("all_gather",)))
        model = DDP(Net(), process_group=data)
        with pytest.raises(ValueError, match="all_gather"):
            quiet(fabric=known, model_group=model_group).attach(model)
        quiet(model_group=model_group).attach(model)
        backward(model, 0, rank)

    ranks(run, world, timeout=30)


@pytest.mark.parametrize("world", [4, 6])
def test_a_model_group_that_some_replicas_were_not_given(ranks, world):
    def run(rank):
        data, model_group = divided(world)
        model = DDP(Net(), process_group=data)
        given = None if rank in (2, 3) else model_group
        with pytest.raises(ValueError, match="asked something else than rank 0: .*no model_group.*a model_group of 2 "):
            quiet(model_group=given).attach(model)
        quiet(model_group=model_group).attach(model)
        backward(model, 0, rank)

    ranks(run, world, timeout=30)
