"""A small model and its batches, and plans for it, for the tests of sparse gradients."""

from dataclasses import replace

import torch
import torch._dynamo  # DDP would import it in each forked rank, for seconds
import torch.distributed as dist

from sparsefusion import SparseFusion
from sparsefusion.fusion.plan_selection import PlanSelection
from sparsefusion.planning.plan import Buffer, Plan, Unit

MICRO = 2  # micro-batches in a step of Megatron and DeepSpeed


class Net(torch.nn.Module):
    """44,300 parameters in matrices and vectors. The layer `spare` may be left unused."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(32, 200), torch.nn.Linear(200, 150)
        self.spare, self.last = torch.nn.Linear(150, 40), torch.nn.Linear(150, 10)
        self.to(dtype)

    def forward(self, x, spare=False):
        """(batch, 32) -> (batch, 10)."""
        x = self.second(self.first(x).tanh()).tanh()
        out = self.last(x)
        return out + self.spare(x).sum() if spare else out


def batch(step, rank, dtype=torch.float32):
    """The batch (8, 32) of a rank in a step."""
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def backward(model, step, rank, spare=True, dtype=torch.float32):
    """Compute the gradients of one batch."""
    model.zero_grad()
    model(batch(step, rank, dtype), spare).square().mean().backward()


def plan(sizes, ranks, mode="layerwise", density=0.05, sparsifier="dgc", wire="fp32", early=False, whole=None):
    """A plan of two buffers, in the order of a backward pass.

    The parameters in `whole` (by default those below 1,000 elements) are dense. The others are sparse: each on its own,
    or in mode bucket those of a buffer together.
    """
    names = list(sizes)[::-1]
    halves = names[: len(names) // 2], names[len(names) // 2 :]

    def units(names):
        rest = [name for name in names if (sizes[name] >= 1000 if whole is None else name not in whole)]
        dense = [Unit((name,), sizes[name], early=early) for name in names if name not in rest]
        if mode == "bucket" and rest:
            numel = sum(sizes[name] for name in rest)
            return (Unit(tuple(rest), numel, max(1, int(density * numel))), *dense)
        sparse = [Unit((n,), sizes[n], max(1, int(density * sizes[n])), mode == "offload") for n in rest]
        return (*sparse, *dense)

    return Plan(mode, sparsifier, density, wire, ranks, tuple(Buffer(units(half)) for half in halves))


def quiet(**options):
    """A SparseFusion that reports nothing."""
    return SparseFusion(report=lambda text: None, **options)


def attach_fp16(target, **options):
    """Attach a SparseFusion of mode fp16."""
    return quiet(mode="fp16", **options).attach(target)


def force_plan(fusion, **options):
    """Put a `plan` with these options in force, without profiling."""
    session = fusion._session
    fusion._selection.stop()
    session.plan, fusion._selection.is_final, fusion._selection.sparse_since = (
        plan(session.sizes, session.reducer.group.size(), **options),
        True,
        0,
    )
    session.reducer.feedback.sparsifier, session.reducer.wire = session.plan.sparsifier, session.plan.wire
    return fusion


def same_on_all_ranks(tensors) -> bool:
    """Whether every rank has the same bits of each tensor."""
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, tensor.detach()):
            return False
    return True


def residual_of(fusion, name, like):
    """This rank's residual of a parameter, in float64; zeros if there is none."""
    residual = fusion.state_dict()["residuals"].get(name)
    return torch.zeros(like.shape, dtype=torch.float64) if residual is None else residual.double().view(like.shape)


def sum_over_ranks(tensor):
    """The sum of a tensor over all ranks, in float64."""
    total = tensor.double().clone()
    dist.all_reduce(total)
    return total


def force_dense(fusion):
    """From now on the framework itself averages all gradients."""
    session = fusion._session
    session.plan = replace(session.plan, mode="dense", buffers=())


def record_timelines(monkeypatch) -> list:
    """A list to which this rank adds each timeline that it makes plans from, from now on."""
    timelines, make_candidates = [], PlanSelection.make_candidates

    def recording(self, timeline, costs):
        timelines.append(timeline)
        return make_candidates(self, timeline, costs)

    monkeypatch.setattr(PlanSelection, "make_candidates", recording)
    return timelines
