"""LoRA adapters as data: which linear layers of a stack may have one, and their parameters.

An adapter stands beside a linear layer that Hugging Face's model has under a name such as
backbone.layers.0.mixer.in_proj. In a hybrid model, each layer that uses a shared block has adapters of its own for it, as in
PEFT. See `operators.low_rank` for how they are split.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_ssm.stack.fields import Field
from megatron_ssm.stack.stack import Stack

# transformers multiplies by the weight of this layer itself, so that it ignores an adapter until it is merged.
NOT_TRAINED = "dt_proj"


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

    @property
    def key(self) -> str:
        """The name of the layer in its operator: the adapter's name in its `Adapters`."""
        usual = self.weights[0].usual or self.weights[0].hf
        return usual.removesuffix(".weight").rpartition(".")[2]

    def fields(self, rank: int) -> list[Field]:
        """The layout of the adapter's A and B, under PEFT's names."""
        first, ours = self.weights[0], f"{self.owner}.lora.{self.key}."
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


def lora_targets(config: Stack) -> dict[str, Target]:
    """{Hugging Face's name: target} of every linear layer that may have an adapter."""
    by_module: dict[str, list[Field]] = {}
    for field in config.fields():
        module = config.module_of(field.hf)
        is_linear = field.hf.endswith(".weight") and len(field.shape) == 2 and not field.heads
        if is_linear and field.adaptable:
            by_module.setdefault(module, []).append(field)
    found = []
    for module, fields in by_module.items():
        owner = fields[0].name.split(".")
        if owner[0] == "shared":
            found += [Target(*names, tuple(fields)) for names in _uses(config, module, int(owner[1]))]
        elif owner[0] == "layers" and not _is_adapter(fields[0]):
            found.append(Target(module, ".".join(owner[:3]), tuple(fields)))
    return {target.module: target for target in found}


def _is_adapter(field: Field) -> bool:
    """Return True if a field belongs to an adapter that is part of the model itself."""
    names = field.name.split(".")
    return names[3] == "idle" or names[4:5] in (["down"], ["up"])


def _uses(config: Stack, module: str, block: int) -> Iterable[tuple[str, str]]:
    """(Hugging Face's name, our module) of a linear layer of a shared block, in each layer that uses the block."""
    uses = config.uses(block)
    first = uses[0].split(".")[1]
    for use in uses:
        yield module.replace(f"layers.{first}.", f"layers.{use.split('.')[1]}.", 1), use


def lora_fields(config: Stack, lora: Lora | None) -> list[Field]:
    """The layout of all adapters, in addition to that of the model."""
    if lora is None:
        return []
    targets = lora_targets(config)
    return [field for module in lora.modules for field in targets[module].fields(lora.rank)]


def find_modules(config: Stack, targets: Iterable[str]) -> tuple[str, ...]:
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
