"""The gradients of a model that is split over ranks, after backward: equal copies, their norm, and clipping.

They are whole on every replica, or divided over the replicas: by an engine, or by torch's `fully_shard`, whose gradients are
DTensors. Everything here works on the part that this rank holds.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.model.model import Model
from megatron_ssm.model.parameters import fields_of

Gradients = Iterable[tuple[nn.Parameter, torch.Tensor]]


def ordered_ddp(
    loss: nn.Module, group: dist.ProcessGroup, *inputs: torch.Tensor, left_out: Iterable[str] = ()
) -> DistributedDataParallel:
    """A module that returns a scalar, in a DDP whose sums are bitwise equal before and after a restart.

    After its first backward pass, DDP rearranges its buckets in the order in which gradients arrive. The position of a value
    in its bucket determines the order in which the ranks' values are added, and so the rounding on more than two ranks.
    There, this function runs a backward pass on `inputs` first. It changes no parameter, and gradients are 0 afterwards.
    All ranks that compute the loss together call it together.

    left_out: The names of parameters of which ranks hold different parts. DDP does not reduce their gradients.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, list(left_out))
    ddp = DistributedDataParallel(loss, process_group=group, gradient_as_bucket_view=True)
    if group.size() > 2:
        ddp(*inputs).backward()
        ddp.zero_grad(set_to_none=False)  # they are views of the buckets
    return ddp


def whole_gradients(model: Model) -> Gradients:
    return ((parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None)


def replicated_parameters(model: Model) -> dict[nn.Parameter, int]:
    """{trained parameter that several tensor-parallel ranks hold: number of its different pieces on all of them}.

    One piece: every rank holds all of it, as of norms and of biases of row-parallel layers. With fewer groups or key/value
    heads than ranks, several ranks hold the same rows of B and C, or of keys and values.
    """
    size = model.ranks.size
    copies = {parameter: field.copies(size) for parameter, field in fields_of(model).items() if parameter.requires_grad}
    return {parameter: size // count for parameter, count in copies.items() if count > 1}


def divided_experts(model: Model) -> list[nn.Parameter]:
    """The parameters of experts, if expert-parallel ranks divide these."""
    if model.place.experts.group is None:
        return []
    return [parameter for parameter, field in fields_of(model).items() if field.by_expert]


@torch.no_grad()
def average_replicated_gradients(model: Model, gradients: Gradients | None = None) -> None:
    """Make the gradients of `replicated_parameters` the same on all ranks that hold them: their mean, in place.

    Each rank computes them from the same numbers, but with another number of threads, or on another processor, it rounds
    differently, and the copies would drift apart; and where ranks have unlike parts of the model, an all-reduce of all
    gradients over the replicas adds in another order. Call it once per optimizer step, after the last backward; with a
    `torch.amp.GradScaler`, before `unscale_`. If a gradient of this rank's own part is not finite on one rank, they become
    NaN on all ranks (if they are frozen: the first gradient), so that each rank's scaler skips the step and lowers its
    scale.

    All-reduces those that all tensor-parallel ranks hold, as one tensor; then those that fewer ranks hold, over these.

    Args:
        model: The model.
        gradients: (parameter, its gradient, or the same part of it on all tensor-parallel ranks); None: `whole_gradients`.
    """
    given = [(p, local_part(gradient)) for p, gradient in (whole_gradients(model) if gradients is None else gradients)]
    if model.ranks.group is None or not given:
        return
    own = torch.stack([gradient.sum(dtype=at_least_fp32(gradient.dtype)) for _, gradient in given]).sum()
    pieces = replicated_parameters(model)
    copies: dict[int, list[torch.Tensor]] = {}
    for parameter, gradient in given:
        if parameter in pieces:
            copies.setdefault(pieces[parameter], []).append(gradient)
    if 1 not in copies:  # what every rank holds is frozen
        zero = model.ranks.all_reduce_exact((0 * own).view(1), model.ranks.group)  # 0, or NaN
        given[0][1].add_(zero.to(given[0][1].dtype))
    for number, parts in copies.items():
        ranks = model.place.ranks_with_same_piece(number)
        flat = torch.cat([part.flatten().to(own.dtype) for part in parts]) + 0 * own
        mean = ranks.all_reduce_exact(flat, ranks.group) / ranks.size
        for part, values in zip(parts, mean.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))


@torch.no_grad()
def average_divided_gradients(
    model: Model, parts: Iterable[tuple[nn.Parameter, slice, torch.Tensor]], divided_over: dist.ProcessGroup | None
) -> None:
    """`average_replicated_gradients` for an engine whose ranks hold parts that differ between tensor-parallel ranks.

    parts: (parameter, the elements of it as a vector, their gradient) on this rank. divided_over: the ranks over which the
    gradients are divided; they all-reduce them first.
    """
    parameters = replicated_parameters(model)
    if model.ranks.group is None or not parameters:
        return
    sizes = [fields_of(model)[parameter].local_shape(*model.place.part) for parameter in parameters]
    flat = torch.zeros(sum(map(math.prod, sizes)), dtype=at_least_fp32(model.dtype), device=model.device)
    whole = dict(zip(parameters, flat.split([*map(math.prod, sizes)]), strict=True))
    held = [(gradient, whole[parameter][part]) for parameter, part, gradient in parts if parameter in whole]
    for gradient, values in held:
        values.copy_(gradient.view_as(values))
    if divided_over is not None:
        dist.all_reduce(flat, group=divided_over)
    average_replicated_gradients(model, whole.items())
    for gradient, values in held:
        gradient.copy_(values.view_as(gradient))


@torch.no_grad()
def grad_norm(
    model: Model, gradients: Gradients | None = None, divided_over: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The 2-norm of the whole model's gradient.

    Each element counts once, however many ranks hold it: of a parameter that c tensor-parallel ranks hold, each rank adds
    1/c of the squares. All-reduces one element over `divided_over` or the mesh of the DTensors, one over the ranks that
    divide the experts, and one over the tensor-parallel ranks.

    Args:
        model: The model.
        gradients: (parameter, the part of its gradient that this rank holds); None: `whole_gradients`.
        divided_over: The ranks over which these parts are divided, of any shapes; None: this rank holds whole gradients, or
            DTensors.

    Returns:
        A scalar tensor, the same on every rank.
    """
    ranks, fields, experts = model.ranks, fields_of(model), set(divided_experts(model))
    total = torch.zeros((), dtype=at_least_fp32(model.dtype), device=model.device)
    of_experts = torch.zeros_like(total)
    sums: dict[Any, torch.Tensor] = {}  # of squares, by the mesh of the gradients; None: plain tensors
    for parameter, gradient in whole_gradients(model) if gradients is None else gradients:
        mesh = getattr(gradient, "device_mesh", None)
        squares = gradient.to(total.dtype).square().sum() / fields[parameter].copies(ranks.size)
        if parameter in experts:
            of_experts += squares
        else:
            sums[mesh] = sums[mesh] + squares if mesh in sums else squares
    for mesh, squares in sums.items():
        total += squares if mesh is None else squares.full_tensor()  # type: ignore[attr-defined]
    if experts:
        total += model.place.experts.all_reduce_exact(of_experts, model.place.experts.group)
    if divided_over is not None:
        dist.all_reduce(total, group=divided_over)
    return ranks.all_reduce_exact(total, ranks.group).sqrt()


@torch.no_grad()
def clip_gradients(model: Model, norm: torch.Tensor, limit: float, gradients: Gradients | None = None) -> None:
    """Scale every gradient by limit / (norm + 1e-6) if norm > limit, as torch and Megatron do.

    Args:
        model: The model.
        norm: The norm of its gradient, of `grad_norm`.
        limit: The largest norm; 0: no limit.
        gradients: See `grad_norm`.
    """
    if limit and norm > limit:
        for _, gradient in whole_gradients(model) if gradients is None else gradients:
            local_part(gradient).mul_((limit / (norm + 1e-6)).to(gradient.dtype))


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank holds, in its memory; another tensor as it is."""
    to_local = getattr(gradient, "to_local", None)
    return gradient if to_local is None else to_local()
