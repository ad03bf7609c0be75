"""LoRA adapters as data: the linear layers of a stack that may have adapters, and the fields of the adapters.

An adapter belongs to one linear layer of Hugging Face's model, such as backbone.layers.0.mixer.in_proj. In a hybrid model,
each layer that invokes a shared block has its own adapters for the block, as in PEFT. `layers.low_rank` describes how
adapters are split over ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_ssm.spec.fields import Field
from megatron_ssm.spec.stack import Stack

# transformers reads the weight of this layer without calling the layer, so it ignores an adapter that is not merged.
NOT_TRAINED = "dt_proj"


@dataclass(frozen=True)
class Lora:
    """The adapters of a model; `rank`, `alpha` and `rank_stabilized` are PEFT's r, lora_alpha and use_rslora.

    modules: Hugging Face's names of the linear layers that have an adapter.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    rank_stabilized: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


@dataclass(frozen=True)
class Target:
    """A linear layer that may have an adapter.

    module: Hugging Face's name of the layer. owner: the path of our module that holds the adapter. weights: the fields of
    the layer's weight; more than one if our model splits the weight into parts.
    """

    module: str
    owner: str
    weights: tuple[Field, ...]

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def key(self) -> str:
        """The name of the layer in its operator, and of the adapter in the `Adapters` of the operator."""
        usual = self.weights[0].usual or self.weights[0].hf
        return usual.removesuffix(".weight").rpartition(".")[2]

    def fields(self, rank: int) -> list[Field]:
        """The fields of A and B, with PEFT's names in checkpoint files. B has one field for each part of the weight."""
        first, ours = self.weights[0], f"{self.owner}.lora.{self.key}."
        split, inputs, names = first.split, first.shape[1], f"base_model.model.{self.module}.lora_"
        columns: dict[str, Any] = dict(split=1, units=first.units) if split == 1 else {}
        down = Field(ours + "down", names + "A.weight", (rank, inputs), **columns)
        ups = [
            replace(
                field, name=f"{ours}up.{self.part_name(field)}", hf=names + "B.weight", shape=(field.shape[0], rank),
                split=split if split == 0 else None, units=field.units if split == 0 else None, init="bias",
            )
            for field in self.weights
        ]  # fmt: skip
        return [down, *ups]

    def part_name(self, field: Field) -> str:
        return field.name.rpartition(".")[2]


def lora_targets(config: Stack) -> dict[str, Target]:
    """{Hugging Face's name: `Target`} of every linear layer that may have an adapter."""
    by_module: dict[str, list[Field]] = {}
    for field in config.fields():
        module = config.module_of(field.hf)
        is_linear = field.hf.endswith(".weight") and len(field.shape) == 2 and not field.heads
        if is_linear and field.adaptable:
            by_module.setdefault(module, []).append(field)
    targets = []
    for module, fields in by_module.items():
        path = fields[0].name.split(".")
        if path[0] == "shared":
            targets += [Target(*names, tuple(fields)) for names in _invocations(config, module, int(path[1]))]
        elif path[0] == "layers" and not _is_built_in_adapter(fields[0]):
            targets.append(Target(module, ".".join(path[:3]), tuple(fields)))
    return {target.module: target for target in targets}


def _is_built_in_adapter(field: Field) -> bool:
    """Return True for a field of an adapter that belongs to the architecture, such as Zamba2's for its shared blocks."""
    names = field.name.split(".")
    return names[3] == "idle" or names[4:5] in (["down"], ["up"])


def _invocations(config: Stack, module: str, block: int) -> Iterable[tuple[str, str]]:
    """(Hugging Face's name, path of our module) of a linear layer of a shared block, for each invocation of the block.

    module: the name for the first invocation.
    """
    paths = config.uses(block)
    layers = [path.split(".")[1] for path in paths]
    for layer, path in zip(layers, paths, strict=True):
        yield module.replace(f"layers.{layers[0]}.", f"layers.{layer}.", 1), path


def lora_fields(config: Stack, lora: Lora | None) -> list[Field]:
    """The fields of all adapters."""
    if lora is None:
        return []
    targets = lora_targets(config)
    return [field for module in lora.modules for field in targets[module].fields(lora.rank)]


def find_modules(config: Stack, targets: Iterable[str]) -> tuple[str, ...]:
    """Hugging Face's names of the linear layers that `targets` name, in the order of the model.

    targets: Whole names, or last parts of names (in_proj, q_proj, ...). ValueError if the model does not have one, or for
    none.
    """
    known = {name: target for name, target in lora_targets(config).items() if target.name != NOT_TRAINED}
    requested, last_parts = set(targets), {target.name for target in known.values()}
    unknown = requested - set(known) - last_parts
    if unknown or not requested:
        shown = ", ".join(sorted(unknown)) or "(none)"
        raise ValueError(
            f"LoRA targets {shown}: a {config.family} model has the linear layers {', '.join(sorted(last_parts))}"
        )
    return tuple(name for name, target in known.items() if name in requested or target.name in requested)
