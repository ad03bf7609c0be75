"""LoRA adapters of a model: adding them, their initial values, and merging them into the weights."""

import copy
import logging
import math
from collections.abc import Iterable
from typing import Any

import torch

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.layers.families import FAMILIES
from megatron_ssm.layers.low_rank import Adapters, LowRank
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.spec.fields import Field

from .initialization import draw, field_generator
from .lora import Lora, Target, find_modules, lora_fields, lora_targets
from .model import Model

log = logging.getLogger("megatron_ssm")


def add_lora(model: Model, rank: int, alpha: float, targets: Iterable[str], seed: int = 0) -> None:
    """Add LoRA adapters to a model in place, and freeze all other parameters.

    As in PEFT, A is drawn uniformly in +-1/sqrt(inputs), with the same values on any number of ranks, and B is zero, so the
    outputs of the model do not change; both are at least float32. All ranks use the same arguments. Sends nothing. The first
    rank logs a warning if PEFT does not load such adapters.

    Args:
        model: The model.
        rank: The rank of the adapters (r in PEFT's configuration).
        alpha: The numerator of their scale alpha / rank (lora_alpha).
        targets: Names of linear layers, either whole or their last parts (in_proj, q_proj, ...).
        seed: The seed of A.

    Raises:
        ValueError: The model does not have a target, already has adapters, or is quantized; rank or alpha is out of range.
    """
    lora = Lora(rank, alpha, find_modules(model.config, targets))
    attach_lora(model, lora)
    for field, parameter in adapter_parameters(model):
        values = draw(field, model.config.num_layers, field_generator(field, seed))
        with torch.no_grad():
            parameter.copy_(values[field.piece(model.ranks.rank, model.ranks.size)])
    groups = (model.ranks.group, *model.copy_groups)
    if all(group is None or group.rank() == 0 for group in groups):
        _warn_about_peft(model.config.family, lora.modules)


def _warn_about_peft(family: str, modules: Iterable[str]) -> None:
    unsupported = FAMILIES[family].unsupported_by_peft
    for name in sorted({module.rpartition(".")[2] for module in modules} & set(unsupported)):
        log.warning(
            f"PEFT does not load adapters of {name} into {family} models: leave this target out, or merge the adapters "
            "(merge_lora) and save the model"
        )


def attach_lora(model: Model, lora: Lora) -> None:
    """Add adapters with uninitialized values, and freeze all other parameters. Raises the errors of `add_lora`."""
    model.check_exact_weights("adapted")
    if model.lora is not None:
        raise ValueError(
            f"the model already has LoRA adapters of rank {model.lora.rank}: call merge_lora, or load the model again"
        )
    if lora.rank < 1 or not 0 < lora.alpha < math.inf:
        raise ValueError(f"LoRA rank={lora.rank}, alpha={lora.alpha}: expected rank >= 1 and a positive, finite alpha")
    targets = lora_targets(model.config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in lora.modules:
        target = targets[module]
        owner: Any = model.get_submodule(target.owner)
        if owner.lora is None:
            owner.lora = Adapters()
        owner.lora[target.key] = _low_rank(target, lora, model)
    model.lora = lora
    model.attach_fields()


def _low_rank(target: Target, lora: Lora, model: Model) -> LowRank:
    ranks: Ranks = model.ranks
    down, *ups = target.fields(lora.rank)
    rows = {target.part_name(field): field.local_shape(ranks.rank, ranks.size)[0] for field in ups}
    repeated = [field for field in ups if field.split == 0 and field.copies(ranks.size) > 1]
    shared: dict[str, Any] = {}
    if repeated:
        shared = dict(shared=[target.part_name(field) for field in repeated], pieces=repeated[0].units)
    inputs = down.local_shape(ranks.rank, ranks.size)[1]
    split = target.weights[0].split
    dtype = at_least_fp32(model.dtype)
    return LowRank(split, lora.rank, inputs, rows, lora.scale, ranks, dtype, model.device, **shared)


def adapter_parameters(model: Model) -> list[tuple[Field, torch.nn.Parameter]]:
    """(field, parameter) of A and B of every adapter, in the order of `lora_fields`; [] without adapters."""
    parameters = dict(model.named_parameters())
    return [(field, parameters[field.name]) for field in lora_fields(model.config, model.lora)]


def share_parameters(model: Model) -> Model:
    """A model with the same parameters, ranks and draft head, but modules, tapes and CUDA graphs of its own.

    Adapters that are added to it are not added to `model`, though they freeze the parameters of both. Both can continue the
    rows of one cache. Close it before `model`. Sends nothing.
    """
    shared = (model.config, model.draft_head, *model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(each): each for each in shared})


@torch.no_grad()
def merge_lora(model: Model) -> None:
    """Add the product of each adapter to the weight of its layer, remove the adapters, and unfreeze all parameters.

    Sends nothing.

    Raises:
        ValueError: The model has no adapters; or several layers share a block, so that they have different adapters for one
            weight. The model is unchanged, and can generate with its adapters.
    """
    if model.lora is None:
        raise ValueError("the model has no LoRA adapters to merge")
    targets, weights = lora_targets(model.config), dict(model.named_parameters())
    names = [field.name for module in model.lora.modules for field in targets[module].weights]
    shared = [name for name in names if name.startswith("shared.")]
    if repeated := [name for name in shared if len(model.config.uses(int(name.split(".")[1]))) > 1]:
        raise ValueError(f"{repeated[0]} is shared by several layers with different adapters, so they cannot be merged")
    for module in model.lora.modules:
        target = targets[module]
        owner: Any = model.get_submodule(target.owner)
        product = owner.lora[target.key].product()  # (rows of all parts, columns)
        parts = [weights[field.name] for field in target.weights]
        for part, rows in zip(parts, product.split([len(part) for part in parts]), strict=True):
            part.add_(rows)
    remove_lora(model)


def remove_lora(model: Model) -> None:
    """Remove the adapters, and unfreeze all parameters except the `idle` ones, which are only saved again."""
    owners: list[Any] = [module for module in model.modules() if "lora" in module._modules]
    for owner in owners:
        owner.lora = None
    model.lora = None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".use.idle." not in name)
