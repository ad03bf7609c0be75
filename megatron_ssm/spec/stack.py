"""A model as data: a stack of layers, each a list of residual units, each with one or several operators.

    unit: x + r * post(sum_i o_i * operator_i(i_i * pre(x + side(x, e))))

pre and post are norms or nothing; side is a block that several units may share, whose second input e are the embeddings;
r, i and o are constants. A family makes a `Stack` from a config.json. Models, checkpoints, caches and sizes are made from
the stack alone. docs/concepts/putting-a-model-together.md has a picture.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .fields import Field, divide_either_way, divides, norm_field
from .sizes import AttentionSizes, RecurrenceSizes, Sizes, Workload


class Spec:
    """The base class of specifications: frozen dataclasses of the sizes and constants of an operator.

    Attributes:
        history: The number of earlier tokens that its convolution reads.
        recurrence: The sizes of its recurrence, by which schedules over context ranks are chosen; or None.
        attention: The sizes of its attention, likewise; or None.
        experts: The number of its routed experts.
    """

    history: Any = 0
    recurrence: Any = None
    attention: Any = None
    experts: Any = 0

    def fields(self) -> Iterator[Field]:
        """Its parameters, named as in the operator, and as in the files of families that do not rename them."""
        yield from ()

    def check_ranks(self, size: int) -> None:
        """ValueError, with the numbers, if it cannot be split over `size` tensor-parallel ranks.

        By default `Field.units` (heads, groups) must be a multiple of the ranks, or the ranks a multiple of it.
        """
        for each in self.fields():
            if each.units is not None:
                divide_either_way(each.units, size, f"units of {each.name}")

    def in_granules(self, granule: int, ranks: int) -> "Spec":
        """A copy that is split into multiples of `granule` wherever equal parts would not be multiples of it. The default
        returns self.
        """
        return self

    def sizes(self, work: Workload) -> Sizes:
        """Its work, memory and messages on one rank."""
        return Sizes()

    def build(self, place: Any) -> Any:
        """The operator with uninitialized parameters. place: a `layers.operator.Place`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Norm:
    """An RMSNorm over the hidden size.

    hf: The name of the weight in checkpoint files. offset: The number that is added to the weight.
    """

    name: str
    hf: str
    eps: float
    offset: float = 0.0

    def field(self, path: str, size: int) -> Field:
        return norm_field(f"{path}{self.name}.weight", self.hf, size, self.offset)


@dataclass(frozen=True)
class Part:
    """An operator of a unit.

    Attributes:
        name: The name of the module.
        spec: The specification of the operator.
        hf: The prefix of its tensors in checkpoint files.
        renamed: Pairs (usual prefix, this family's prefix). In a name that begins with the first, the second replaces `hf` +
            first.
        input_scale, output_scale: The constants i and o of the unit.
    """

    name: str
    spec: Spec
    hf: str
    renamed: tuple[tuple[str, str], ...] = ()
    input_scale: float = 1.0
    output_scale: float = 1.0

    def fields(self, path: str) -> Iterator[Field]:
        """Its parameters. path: the prefix of their names, such as "layers.3."."""
        for each in self.spec.fields():
            hf = self.hf + each.hf
            for usual, theirs in self.renamed:
                if each.hf.startswith(usual):
                    hf = theirs + each.hf.removeprefix(usual)
            apart = tuple(self.hf + name for name in each.apart)
            yield replace(each, name=f"{path}{self.name}.{each.name}", hf=hf, usual=each.usual or each.hf, apart=apart)


@dataclass(frozen=True)
class Side:
    """One invocation of a shared block: `part` has the parameters of this invocation, `shared` is the index of the block."""

    part: Part
    shared: int


@dataclass(frozen=True)
class Unit:
    """A residual unit; see the module's equation. Its operators read one input, and one message sums their outputs."""

    operators: tuple[Part, ...]
    norm: Norm | None = None
    post_norm: Norm | None = None
    side: Side | None = None
    residual_scale: float = 1.0

    @property
    def sizes(self) -> list[Sizes]:
        """The sizes of its operators, and of its invocation of a shared block, on one rank."""
        parts = [*self.operators, *([self.side.part] if self.side else [])]
        return [part.spec.sizes(Workload()) for part in parts]

    def with_blocks_renumbered(self, used: Sequence[int]) -> "Unit":
        """A copy in which the shared blocks are renumbered: block used[i] becomes block i."""
        if self.side is None:
            return self
        return replace(self, side=replace(self.side, shared=used.index(self.side.shared)))

    def fields(self, path: str, hidden: int) -> Iterator[Field]:
        """The parameters of the unit. path: the prefix of the layer, such as "layers.3."."""
        if self.side is not None:
            yield from self.side.part.fields(path)
        for norm in (self.norm, self.post_norm):
            if norm is not None:
                yield norm.field(path, hidden)
        for part in self.operators:
            yield from part.fields(path)


@dataclass(frozen=True)
class DraftHead:
    """A layer that guesses tokens (`model.draft_head`), with the constants of its own norms (see `Norm`).

    hf: the prefix of its tensors in checkpoint files.
    """

    units: tuple[Unit, ...]
    hf: str
    eps: float
    offset: float = 0.0

    def fields(self, hidden: int) -> Iterator[Field]:
        """Its parameters."""
        yield Field("draft_head.fc.weight", f"{self.hf}fc.weight", (hidden, 2 * hidden), 1, 2 * hidden)
        for ours, theirs in DRAFT_NORMS.items():
            yield norm_field(f"draft_head.{ours}.weight", f"{self.hf}{theirs}.weight", hidden, self.offset)
        for unit in self.units:
            yield from unit.fields("draft_head.layer.", hidden)


DRAFT_NORMS = dict(embedding_norm="pre_fc_norm_embedding", hidden_norm="pre_fc_norm_hidden", norm_f="norm")


@dataclass(frozen=True)
class Stack:
    """The sizes, constants and parts of one model.

    Attributes:
        layers: The units of each layer.
        shared: The blocks that units of several layers invoke, with one set of weights each.
        norm_eps, norm_offset: The constants of the final norm (see `Norm`).
        residual_in_fp32: True if the residual stream is at least fp32.
        embedding_scale, logits_scale: Constants that multiply the embeddings and the logits.
        draft_head: The draft head that checkpoints of the family may have; has_draft_head: True if this model has it.
        draws, draws_std: The initialization of a new model (see `model.initialization`): {value of `Field.init`: the value
            that this family uses instead}, and the standard deviation of normal initializations. An empty draws initializes
            as state-spaces' Mamba does.
        raw: The config.json from which the stack was read. unknown, unknown_note: its unknown fields, and a line about them.

    In checkpoint files:
        embeddings, final_norm, head: The names of these tensors.
        root: The prefix of most names. modules: The prefix that transformers' module names have instead of root; "" if it is
            root.
        aliases: Pairs (prefix, other prefixes that files may have instead).
        skipped: Pairs (prefix, description) of tensors that are not loaded.
        apart: True if tensors that a file may store merged (such as those of all experts) are written one by one, False if
            merged; None: the family's default.
        recut: Groups of names. Only the concatenation of a group along dim 0 is fixed; files may split it differently.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[tuple[Unit, ...], ...]
    norm_eps: float
    tie_embeddings: bool
    norm_offset: float = 0.0
    residual_in_fp32: bool = False
    shared: tuple[Part, ...] = ()
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    embeddings: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    root: str = "model."
    modules: str = ""
    aliases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    apart: bool | None = field(default=None, compare=False)
    recut: tuple[tuple[str, ...], ...] = ()
    draft_head: DraftHead | None = None
    has_draft_head: bool = False
    eos_token_ids: tuple[int, ...] = ()
    draws: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    draws_std: float = field(default=0.02, compare=False, repr=False)
    raw: dict = field(default_factory=dict, compare=False, repr=False)
    unknown: tuple[str, ...] = field(default=(), compare=False, repr=False)
    unknown_note: str = field(default="", compare=False, repr=False)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def units(self) -> Iterator[tuple[str, Unit]]:
        """(path of its layer, such as "layers.3.", unit) of every unit."""
        for index, layer in enumerate(self.layers):
            for unit in layer:
                yield f"layers.{index}.", unit

    @property
    def operators(self) -> Iterator[tuple[str, Spec]]:
        """(path, specification) of each operator and of each invocation of a shared block."""
        for path, unit in self.units:
            if unit.side is not None:
                yield path + unit.side.part.name, unit.side.part.spec
            for part in unit.operators:
                yield path + part.name, part.spec

    @property
    def kinds(self) -> list[tuple[int, int]]:
        """One pair for each set of layers with equal sizes: (index of its first layer, number of layers), the largest set
        first.
        """
        groups: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault(repr([unit.sizes for unit in layer]), []).append(index)
        return sorted(((indices[0], len(indices)) for indices in groups.values()), key=lambda kind: -kind[1])

    def with_layers(self, indices: Sequence[int]) -> "Stack":
        """This stack with some of its layers only, and with the shared blocks that they invoke."""
        layers = [self.layers[index] for index in indices]
        used = sorted({unit.side.shared for layer in layers for unit in layer if unit.side is not None})
        return replace(
            self, layers=tuple(tuple(unit.with_blocks_renumbered(used) for unit in layer) for layer in layers),
            shared=tuple(replace(self.shared[index], name=str(number)) for number, index in enumerate(used)),
        )  # fmt: skip

    @property
    def history(self) -> int:
        """The largest number of earlier tokens that any convolution of the model reads."""
        return max((spec.history for _, spec in self.operators), default=0)

    @property
    def attentions(self) -> list[AttentionSizes]:
        """The sizes of each attention, in order."""
        return [spec.attention for _, spec in self.operators if spec.attention is not None]

    @property
    def recurrences(self) -> list[RecurrenceSizes]:
        """The sizes of each recurrence, in order."""
        return [spec.recurrence for _, spec in self.operators if spec.recurrence is not None]

    def uses(self, shared: int) -> list[str]:
        """The paths of the invocations of a shared block."""
        return [path + unit.side.part.name for path, unit in self.units if unit.side and unit.side.shared == shared]

    def fields(self) -> tuple[Field, ...]:
        """Every parameter of the model, in the order of its files."""
        hidden, vocab = self.hidden_size, self.vocab_size
        fields = [Field("embeddings.weight", self.embeddings, (vocab, hidden), split=0, init="embedding")]
        for part in self.shared:
            fields.extend(part.fields("shared."))
        for path, unit in self.units:
            fields.extend(unit.fields(path, hidden))
        fields.append(norm_field("norm_f.weight", self.final_norm, hidden, self.norm_offset))
        if not self.tie_embeddings:
            fields.append(Field("lm_head.weight", self.head, (vocab, hidden), split=0))
        if self.has_draft_head and self.draft_head is not None:
            fields.extend(self.draft_head.fields(hidden))
        if self.apart is not None:
            fields = [replace(each, written_apart=self.apart) if each.apart else each for each in fields]
        return tuple(fields)

    def in_granules(self, granule: int, ranks: int) -> "Stack":
        """A copy for quantized matrices: ranks split them only between blocks of `granule` numbers."""

        def changed(unit: Unit) -> Unit:
            parts = (replace(part, spec=part.spec.in_granules(granule, ranks)) for part in unit.operators)
            return replace(unit, operators=tuple(parts))

        return replace(self, layers=tuple(tuple(changed(unit) for unit in layer) for layer in self.layers))

    def with_draft_head(self) -> "Stack":
        """This stack with the draft head of its checkpoints; ValueError if they have none."""
        head = self.draft_head
        if head is None:
            raise ValueError(
                f"draft_head=True: config.json of this {self.family} model declares no supported draft head (one layer that "
                "shares the model's embeddings)"
            )
        return replace(self, has_draft_head=True, skipped=tuple(each for each in self.skipped if each[0] != head.hf))

    def names_in_files(self, hf: str) -> Iterator[str]:
        """The names that a tensor may have in checkpoints: its own name first, then the names in `aliases`; each with and
        without `root`.
        """
        spellings = [hf]
        for start, others in self.aliases:
            if hf.startswith(start):
                spellings += [other + hf.removeprefix(start) for other in others]
        for name in spellings:
            yield name
            yield name.removeprefix(self.root)

    def module_of(self, hf: str) -> str:
        """transformers' name of the module that owns the tensor whose name in files is `hf`."""
        module = hf.removesuffix(".weight")
        return self.modules + module.removeprefix(self.root) if self.modules and hf.startswith(self.root) else module

    def check_ranks(self, size: int, experts: int = 1) -> None:
        """ValueError, with the numbers, if this model cannot be split over `size` tensor-parallel ranks.

        experts: the expert-parallel ranks, over which its experts must divide.
        """
        for kind, ranks in {"tensor": size, "expert": experts}.items():
            if ranks < 1:
                raise ValueError(f"{ranks} {kind}-parallel ranks: there must be at least 1")
        counts = {spec.experts for _, spec in self.operators if spec.experts}
        if experts > 1 and not counts:
            raise ValueError(f"{experts} expert-parallel ranks: this {self.family} model has no experts")
        for count in counts:
            divides(count, experts, "experts", "expert-parallel ranks")
        specs = {spec: None for _, spec in self.operators} | {part.spec: None for part in self.shared}
        for spec in specs:
            spec.check_ranks(size)
        if self.has_draft_head:
            divides(2 * self.hidden_size, size, "inputs of the draft head")

    def to_dict(self, dtype: str, raw: dict | None = None) -> dict:
        """The config.json of a checkpoint of this model whose tensors are stored as `dtype` ('float32', ...).

        raw: The whole config.json of the source checkpoint. None: `self.raw`, which has only the fields of the language
        model.
        """
        kept = {
            k: v
            for k, v in (self.raw if raw is None else raw).items()
            if k not in ("torch_dtype", "dtype", "_name_or_path")
        }
        return {**kept, "dtype": dtype}

    @property
    def elements(self) -> int:
        """The number of elements of the model's parameters."""
        return sum(math.prod(each.shape) for each in self.fields())

    @property
    def active_elements(self) -> int:
        """The number of elements without those of the experts that a token does not choose."""
        return round(sum(each.used * math.prod(each.shape) for each in self.fields()))
