"""LoRA adapters of a model: adding them, their initial values, and merging them into the weights.

An adapter stands beside a linear layer that Hugging Face's model has under a name such as
backbone.layers.0.mixer.in_proj. In a hybrid model, each layer that uses a shared block has adapters of its own for it, as in
PEFT. See `layers.low_rank` for how they are split.
"""

import logging
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import Field, layout
from megatron_ssm.layers.low_rank import Adapters, LowRank
from megatron_ssm.parallel.ranks import Ranks

from .initialization import draw

if TYPE_CHECKING:
    from .model import Model


# transformers multiplies by the weight of this layer itself, so that it ignores an adapter until it is merged.
NOT_TRAINED = "dt_proj"
# In these families, PEFT raises an error for adapters of out_proj, because fused kernels of transformers ignore them.
_FUSED_OUT_PROJ = ("mamba", "mamba2", "falcon_mamba")

log = logging.getLogger("megatron_ssm")


@dataclass(frozen=True)
class Lora:
    """The adapters of a model. modules: Hugging Face's names of the linear layers that have one.

    rank: r in PEFT's configuration. alpha: lora_alpha. rank_stabilized: use_rslora; the product of an adapter is multiplied
    by alpha / rank, or with it by alpha / sqrt(rank).
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    rank_stabilized: bool = False

    @property
    def scale(self) -> float:
        """The factor of every adapter's product."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


@dataclass(frozen=True)
class Target:
    """A linear layer that may have an adapter. module: Hugging Face's name. owner: our module that holds the adapter.

    weights: the fields of its weight; several if we divide it into parts.
    """

    module: str
    owner: str
    weights: tuple[Field, ...]

    @property
    def name(self) -> str:
        """The last part of Hugging Face's name."""
        return self.module.rpartition(".")[2]

    def fields(self, rank: int) -> list[Field]:
        """The layout of the adapter's A and B, under PEFT's names."""
        first, ours = self.weights[0], f"{self.owner}.lora.{self.name}."
        split, inputs, names = first.split, first.shape[1], f"base_model.model.{self.module}.lora_"
        columns: dict[str, Any] = dict(split=1, units=first.units) if split == 1 else {}
        down = Field(ours + "down", names + "A.weight", (rank, inputs), **columns)
        ups = [
            replace(
                field, name=f"{ours}up.{self.part(field)}", hf=names + "B.weight", shape=(field.shape[0], rank),
                split=split if split == 0 else None, units=field.units if split == 0 else None, init="bias",
            )
            for field in self.weights
        ]  # fmt: skip
        return [down, *ups]

    def part(self, field: Field) -> str:
        """The name of a part of the weight."""
        return field.name.rpartition(".")[2]


def lora_targets(config: Config) -> dict[str, Target]:
    """{Hugging Face's name: target} of every linear layer that may have an adapter."""
    by_module: dict[str, list[Field]] = {}
    for field in layout(config):
        module = field.hf.removesuffix(".weight")
        if field.hf.endswith(".weight") and len(field.shape) == 2 and not field.heads:
            by_module.setdefault(module, []).append(field)
    found = []
    for module, fields in by_module.items():
        owner = fields[0].name.split(".")
        if owner[0] == "shared":
            found += [Target(*names, tuple(fields)) for names in _uses(config, module, int(owner[1]))]
        elif owner[0] == "layers" and owner[2] == "mixer" or owner[3:] == ["linear"]:
            found.append(Target(module, ".".join(owner[:3]), tuple(fields)))
    return {target.module: target for target in found}


def _uses(config: Config, module: str, block: int) -> Iterable[tuple[str, str]]:
    """(Hugging Face's name, our module) of a linear layer of a shared block, in each layer that uses the block."""
    first = config.hybrid_layers[block]
    for layer in config.hybrid_layers[block :: config.shared_copies]:
        yield module.replace(f"layers.{first}.", f"layers.{layer}.", 1), f"layers.{layer}.use"


def lora_fields(config: Config, lora: Lora | None) -> list[Field]:
    """The layout of all adapters, in addition to that of the model."""
    if lora is None:
        return []
    targets = lora_targets(config)
    return [field for module in lora.modules for field in targets[module].fields(lora.rank)]


def find_modules(config: Config, targets: Iterable[str]) -> tuple[str, ...]:
    """Hugging Face's names of the linear layers that `targets` name, in the model's order.

    targets: the last parts of such names (in_proj, q_proj, ...), or whole names. ValueError for one that the model does not
    have, or if there is none.
    """
    known = {name: target for name, target in lora_targets(config).items() if target.name != NOT_TRAINED}
    wanted, names = set(targets), {target.name for target in known.values()}
    unknown = wanted - set(known) - names
    if unknown or not wanted:
        shown = ", ".join(sorted(unknown)) or "(none)"
        raise ValueError(
            f"LoRA targets {shown}: a {config.family} model has the linear layers {', '.join(sorted(names))}"
        )
    return tuple(name for name, target in known.items() if name in wanted or target.name in wanted)


def add_lora(model: "Model", rank: int, alpha: float, targets: Iterable[str], seed: int = 0) -> None:
    """Add LoRA adapters to a model in place; afterwards only they are trained.

    rank, alpha: see `Lora`. targets: see `find_modules`. A is drawn from `seed`, as in PEFT uniformly in +-1/sqrt(inputs),
    with the same values on any number of ranks, and B is zero, so that the model computes what it computed before. All ranks
    use the same arguments; sends nothing. The first rank logs a line if PEFT will not load such adapters.

    ValueError for a target that the model does not have, for a model that has adapters, and for a quantized model.
    """
    lora = Lora(rank, alpha, find_modules(model.config, targets))
    attach_lora(model, lora)
    for field, parameter in adapter_parameters(model):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {field.name}".encode()))
        with torch.no_grad():
            parameter.copy_(draw(model.config, field, generator)[field.piece(model.ranks.rank, model.ranks.size)])
    groups = (model.ranks.group, *model.copy_groups)
    if all(group is None or group.rank() == 0 for group in groups):
        _tell_what_peft_refuses(model.config.family, lora.modules)


def _tell_what_peft_refuses(family: str, modules: Iterable[str]) -> None:
    if family in _FUSED_OUT_PROJ and any(module.endswith(".out_proj") for module in modules):
        log.warning(
            f"PEFT does not load adapters of out_proj into {family} models: leave this target out, or merge the adapters "
            "(merge_lora) and save the model"
        )


def attach_lora(model: "Model", lora: Lora) -> None:
    """Add adapters with uninitialized values, and freeze the other parameters; errors as `add_lora`."""
    model.check_exact_weights("adapted")
    if model.lora is not None:
        raise ValueError(f"the model already has LoRA adapters of rank {model.lora.rank}: merge_lora or load it again")
    if lora.rank < 1 or not 0 < lora.alpha < math.inf:
        raise ValueError(f"LoRA rank {lora.rank} must be at least 1, and alpha {lora.alpha} positive and finite")
    targets = lora_targets(model.config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in lora.modules:
        target = targets[module]
        owner: Any = model.get_submodule(target.owner)
        if owner.lora is None:
            owner.lora = Adapters()
        owner.lora[target.name] = _low_rank(target, lora, model)
    model.lora = lora
    model.attach_fields()


def _low_rank(target: Target, lora: Lora, model: "Model") -> LowRank:
    """The module of an adapter, with this rank's shapes."""
    ranks: Ranks = model.ranks
    down, *ups = target.fields(lora.rank)
    rows = {target.part(field): field.local_shape(ranks.rank, ranks.size)[0] for field in ups}
    repeated = [field for field in ups if field.split == 0 and field.copies(ranks.size) > 1]
    shared: dict[str, Any] = {}
    if repeated:
        shared = dict(shared=[target.part(field) for field in repeated], pieces=repeated[0].units)
    inputs = down.local_shape(ranks.rank, ranks.size)[1]
    split = target.weights[0].split
    return LowRank(split, lora.rank, inputs, rows, lora.scale, ranks, model.dtype, model.device, **shared)


def adapter_parameters(model: "Model") -> list[tuple[Field, torch.nn.Parameter]]:
    """(field, parameter) of A and B of every adapter, in the layout's order; none if there are no adapters."""
    parameters = dict(model.named_parameters())
    return [(field, parameters[field.name]) for field in lora_fields(model.config, model.lora)]


@torch.no_grad()
def merge_lora(model: "Model") -> None:
    """Add the adapters' products to the weights of the layers, remove them, and train all parameters again. Sends nothing.

    ValueError, with the model unchanged, if layers that share a block have adapters for it: their products differ. Such a
    model generates with its adapters.
    """
    if model.lora is None:
        raise ValueError("the model has no LoRA adapters to merge")
    targets, weights = lora_targets(model.config), dict(model.named_parameters())
    names = [field.name for module in model.lora.modules for field in targets[module].weights]
    if repeated := [name for name in names if name.startswith("shared.") and _is_reused(model.config, name)]:
        raise ValueError(
            f"{repeated[0]} is shared by several layers with adapters of their own, so these cannot be merged"
        )
    for module in model.lora.modules:
        target = targets[module]
        owner: Any = model.get_submodule(target.owner)
        product = owner.lora[target.name].product()
        parts = [weights[field.name] for field in target.weights]
        for part, rows in zip(parts, product.split([len(part) for part in parts]), strict=True):
            part.add_(rows)
    remove_lora(model)


def _is_reused(config: Config, name: str) -> bool:
    """Whether several layers use the block of a field called shared.BLOCK.…"""
    return len(config.hybrid_layers[int(name.split(".")[1]) :: config.shared_copies]) > 1


def remove_lora(model: "Model") -> None:
    """Remove the adapters, and train all parameters again."""
    owners: list[Any] = [module for module in model.modules() if "lora" in module._modules]
    for owner in owners:
        owner.lora = None
    model.lora = None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".use.idle." not in name)
