"""Loop programs: axes, operands indexed by them, and how the partial results of a reduction combine (paper, section 4.1).

A program is a loop nest around a tile. Each axis is a loop or a dimension inside the tile; each operand is a tensor whose
dimensions are axes. The tile computes what one block of every axis contributes to the outputs. Where an output is not
indexed by an axis, the output's monoid combines the contributions of that axis's blocks. Everything is immutable.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .expression_syntax import axis_error, read_text

SPATIAL, REDUCED, SCANNED, WHOLE = "s", "r", "c", "w"
KINDS = {SPATIAL: "spatial", REDUCED: "reduced", SCANNED: "scanned", WHOLE: "whole"}
ORDERS = ("contiguous", "zigzag")
MONOID_NAMES = "sum", "max", "softmax"
KERNELS = {name: ("library", "reference") for name in ("attention", "attention_backward")}  # of tiles with several
ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# {tile, a function in `commir.programs.tiles`: the names of its (inputs, outputs, options)}
TILES = {
    "attention": ("q k v", "out lse", "causal scale"),
    "attention_backward": ("dout out q k v lse delta", "dq dk dv", "causal scale"),
    "selective_scan": ("x dt B C A", "y", ""),
    "gated_delta": ("v g beta q k", "y", ""),
}


@dataclass(frozen=True)
class Axis:
    """A loop of a program, or a dimension inside its tile.

    Attributes:
        name: an identifier.
        size: the number of elements along it.
        kind: "s" spatial (it indexes every output), "r" reduced (some output is reduced over it, in any order), "c" scanned
            (a state passes along it, in order), or "w" whole (a dimension inside the tile, never split).
        order: the elements that a rank holds where ranks share the axis, "contiguous" or "zigzag". With P ranks, zigzag cuts
            the axis into 2P blocks, and rank p holds blocks p and 2P-1-p.
    """

    name: str
    size: int
    kind: str = SPATIAL
    order: str = "contiguous"

    def __post_init__(self) -> None:
        _check_name("axis", self.name)
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"axis {self.name} has size {self.size!r}: expected a whole number of at least 1")
        if self.kind not in KINDS:
            raise ValueError(f"axis {self.name} has unknown kind {self.kind!r}: expected {', '.join(KINDS)}")
        if self.order not in ORDERS:
            raise ValueError(f"axis {self.name} has unknown order {self.order!r}: expected {' or '.join(ORDERS)}")


@dataclass(frozen=True)
class Operand:
    """An input or output tensor with one dimension for each of its axes.

    Attributes:
        name: an identifier.
        axes: the names of its axes, in the order of its dimensions.
        home: the axis along which the caller keeps it sharded over all ranks of the mesh; None: every rank holds it whole.
        groups: (axis, divisor) pairs. Along such an axis the operand has size / divisor elements, each of which serves
            `divisor` consecutive indices (keys and values of grouped-query attention).
        is_wide: kept in at least fp32, as statistics such as lse are.
        has_wide_partials: partial results travel in at least fp32.
        source: the names of the inputs from which the program derives this one before its loops; empty if the caller gives
            it.
        in_tile: the tile reads it. An input that only serves to derive others is not gathered.

    Raises:
        ValueError: the name is no identifier, or an axis occurs twice.
    """

    name: str
    axes: tuple[str, ...]
    home: str | None = None
    groups: tuple[tuple[str, int], ...] = ()
    is_wide: bool = False
    has_wide_partials: bool = False
    source: tuple[str, ...] = ()
    in_tile: bool = True

    def __post_init__(self) -> None:
        _check_name("operand", self.name)
        if len(set(self.axes)) < len(self.axes):
            raise ValueError(f"operand {self.name} has an axis twice: {', '.join(self.axes)}")

    def divisor(self, axis: str) -> int:
        """The number of indices of `axis` that share one element of this operand."""
        return dict(self.groups).get(axis, 1)


@dataclass(frozen=True)
class Result:
    """Outputs whose partial results combine together.

    Attributes:
        monoid: "sum", "max" or "softmax".
        outputs: their names; for softmax a mean and the log of the sum of its weights.
    """

    monoid: str
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.monoid not in MONOID_NAMES:
            expected = ", ".join(MONOID_NAMES)
            raise ValueError(f"{', '.join(self.outputs)}: unknown reduction {self.monoid!r}: expected {expected}")
        if self.monoid == "softmax" and len(self.outputs) != 2:
            rule = "softmax combines two outputs, a mean and the log of its weights' sum"
            raise ValueError(f"{rule}, not {', '.join(self.outputs)}")


@dataclass(frozen=True)
class Scan:
    """How a state passes along an axis, from block to block, by summaries of the blocks.

    Attributes:
        axis: the scanned axis.
        blocks: the axis that numbers its blocks; lowering a schedule sets its size.
        state: the operand that holds what a block contributes from a state of zero.
        decay: the operand by which a block changes the state that enters it: the sum of its step sizes, or a matrix over its
            last two axes.
        carry: the operand that holds the state that enters each block.
        rates: the operand by which a sum of step sizes becomes a decay; "" if `decay` is a matrix.
    """

    axis: str
    blocks: str
    state: str
    decay: str
    carry: str
    rates: str = ""

    @property
    def summaries(self) -> tuple[str, ...]:
        """The operands that a rank computes for its blocks before states pass: state, decay and, if there are any, rates."""
        return (self.state, self.decay, *((self.rates,) if self.rates else ()))


@dataclass(frozen=True)
class Program:
    """A loop program.

    Attributes:
        name: the name in errors and explanations.
        axes: its loops, and the dimensions inside its tile.
        inputs, outputs: its operands.
        results: how partial outputs combine; every output belongs to exactly one of them.
        tile: one of TILES, or an expression such as "a[i, j] * b[j]", which computes the one output.
        options: (name, value) pairs that the tile needs.
        dtype: the dtype of the elements, by which bytes and memory are counted. A plan runs with tensors of any floating
            dtype.
        scan: how a state passes along an axis.
        internal: the operands of the scan.

    Raises:
        ValueError: a name is used twice, or refers to no axis or operand; an operand is kept along a whole axis; a size does
            not divide by a group; there is no input or no output; an output belongs to no result or to several; the kind of
            an axis does not fit the outputs; the operands or options are not those of the tile; or the tile is no valid
            expression.
    """

    name: str
    axes: tuple[Axis, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    results: tuple[Result, ...]
    tile: str
    options: tuple[tuple[str, Any], ...] = ()
    dtype: str = "float32"
    scan: Scan | None = None
    internal: tuple[Operand, ...] = ()
    _axes: dict[str, Axis] = field(init=False, repr=False, compare=False, hash=False)
    _operands: dict[str, Operand] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        _refuse_duplicates("axes", [axis.name for axis in self.axes])
        _refuse_duplicates("operands", [operand.name for operand in (*self.operands, *self.internal)])
        object.__setattr__(self, "options", tuple(sorted(self.options)))
        object.__setattr__(self, "_axes", {axis.name: axis for axis in self.axes})
        object.__setattr__(self, "_operands", {operand.name: operand for operand in (*self.operands, *self.internal)})
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"unknown dtype {self.dtype!r}: expected {', '.join(ITEMSIZES)}")
        for operand in (*self.operands, *self.internal):
            self._check_operand(operand)
        if not self.given or not self.outputs:
            counts = f"{len(self.inputs)} inputs and {len(self.outputs)} outputs"
            raise ValueError(f"{self.name} has {counts}: expected at least one of each, and an input from the caller")
        named = [name for result in self.results for name in result.outputs]
        if sorted(named) != sorted(output.name for output in self.outputs):
            expected = ", ".join(output.name for output in self.outputs)
            raise ValueError(f"the results of {self.name} name {', '.join(named)}: expected each of {expected} once")
        self._check_kinds()
        if self.tile in TILES:
            self._check_tile()
        else:
            self._check_expression()

    def _check_operand(self, operand: Operand) -> None:
        for name in (*operand.axes, *([operand.home] if operand.home else [])):
            if name not in self._axes:
                raise ValueError(f"operand {operand.name} names the axis {name}, which {self.name} does not have")
        if operand.home and (operand.home not in operand.axes or self._axes[operand.home].kind == WHOLE):
            raise ValueError(f"operand {operand.name} is kept along {operand.home}: expected a loop that indexes it")
        for name, divisor in operand.groups:
            if name not in operand.axes or divisor < 1 or self._axes[name].size % divisor:
                raise ValueError(f"operand {operand.name} cannot have groups of {divisor} along axis {name}")

    def _check_kinds(self) -> None:
        """Lowering relies on the kinds of axes, so each must be true of the outputs."""
        outputs = {operand.name: operand.axes for operand in self.outputs}
        for axis in self.axes:
            if rule := axis_error(axis.name, axis.kind, outputs):
                raise ValueError(f"{self.name}: {rule}")
            if axis.kind == SCANNED and (self.scan is None or self.scan.axis != axis.name):
                raise ValueError(f"{self.name}: {axis.name} is scanned, but no scan passes a state along it")

    def _check_tile(self) -> None:
        """The operands and options must be those of the tile, and the scale of attention a positive number.

        Hidden scores are -inf before they are scaled, so 0 or a negative scale would give NaN.
        """
        names = {
            "inputs": [operand.name for operand in self.inputs],
            "outputs": [operand.name for operand in self.outputs],
            "options": list(dict(self.options)),
        }
        for (kind, given), needed in zip(names.items(), map(str.split, TILES[self.tile]), strict=True):
            if sorted(given) != sorted(needed):
                expected = ", ".join(needed) or "none"
                raise ValueError(f"{self.name}: the tile {self.tile} has the {kind} {expected}, not {', '.join(given)}")
        scale = dict(self.options).get("scale", 1.0)
        if not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise ValueError(f"{self.name}: option scale is {scale!r}: expected a positive, finite number")

    def _check_expression(self) -> None:
        if len(self.outputs) != 1:
            names = ", ".join(operand.name for operand in self.outputs) or "none"
            tile = f"the tile {self.tile!r:.80} is an expression, which computes one output"
            raise ValueError(f"{self.name}: {tile}, not {names}")
        for operand in self.inputs:
            if operand.groups or operand.source or not operand.in_tile:
                rule = "must have no groups and no source, and be in the tile"
                raise ValueError(f"{self.name}: the input {operand.name} of an expression {rule}")
        try:
            inputs = {operand.name: operand.axes for operand in self.inputs}
            read_text(self.tile, inputs, [self.outputs[0].name], list(self._axes))
        except ValueError as error:
            raise ValueError(
                f"{self.name}: the tile {self.tile!r:.80} is neither {', '.join(TILES)} nor a valid expression: {error}"
            ) from None

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (*self.inputs, *self.outputs)

    @property
    def given(self) -> tuple[Operand, ...]:
        """The inputs that a caller gives; the program derives the others."""
        return tuple(operand for operand in self.inputs if not operand.source)

    @property
    def points(self) -> float:
        """The number of points of all axes that are computed: half of them under a causal mask. Summaries do not count."""
        internal = {name for operand in self.internal for name in operand.axes}
        internal -= {name for operand in self.operands for name in operand.axes}
        sizes = (axis.size for axis in self.axes if axis.name not in internal)
        return math.prod(sizes) * (0.5 if dict(self.options).get("causal") else 1.0)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The implementations of the tile: "library" (a fused kernel, if there is one) and maybe "reference"."""
        return KERNELS.get(self.tile, ("library",))

    def most_blocks(self, name: str) -> int:
        """The largest number of blocks that an axis can be cut into; the ranks that share it must divide this.

        It is the axis's size in the operand with the fewest elements along it: for heads, the number of key/value heads.
        """
        return self._most_blocks[self.axis(name).name]

    @cached_property
    def _most_blocks(self) -> dict[str, int]:
        return {axis.name: axis.size // max(x.divisor(axis.name) for x in self.operands) for axis in self.axes}

    def axis(self, name: str) -> Axis:
        """The axis of this name. Raises ValueError if there is none."""
        if name not in self._axes:
            raise ValueError(f"{self.name} has no axis {name!r}: expected {', '.join(self._axes)}")
        return self._axes[name]

    def operand(self, name: str) -> Operand:
        """The operand of this name. Raises ValueError if there is none."""
        if name not in self._operands:
            raise ValueError(f"{self.name} has no operand {name!r}: expected {', '.join(self._operands)}")
        return self._operands[name]

    def option(self, name: str) -> Any:
        """The value of an option of the tile. Raises KeyError if there is none."""
        return dict(self.options)[name]

    def shape(self, operand: Operand) -> tuple[int, ...]:
        return tuple(self._axes[name].size // operand.divisor(name) for name in operand.axes)

    def itemsize(self, operand: Operand, is_partial: bool = False) -> int:
        """The bytes of an element of an operand; with is_partial, of a partial result in a message."""
        size = ITEMSIZES[self.dtype]
        return max(4, size) if operand.is_wide or (is_partial and operand.has_wide_partials) else size

    def is_rounded(self, output: Operand) -> bool:
        """Return True if partial results travel in another dtype than that in which they are computed, at least fp32."""
        return self.itemsize(output, is_partial=True) < 4

    def nbytes(self, operand: Operand) -> int:
        return math.prod(self.shape(operand)) * self.itemsize(operand)

    def resized(self, /, **sizes: int) -> "Program":
        """The same program with other sizes of the named axes. Raises ValueError as `Program` does."""
        for name in sizes:
            self.axis(name)
        axes = tuple(replace(axis, size=sizes.get(axis.name, axis.size)) for axis in self.axes)
        return replace(self, axes=axes)

    def with_options(self, /, **options: Any) -> "Program":
        """The same program with other values of its options. Raises ValueError for an option that it lacks."""
        known = dict(self.options)
        if unknown := [name for name in options if name not in known]:
            raise ValueError(f"{self.name} has no option {unknown[0]!r}: expected {', '.join(known) or 'none'}")
        return replace(self, options=tuple((known | options).items()))

    def reduced_axes(self, result: Result) -> tuple[str, ...]:
        """The axes over which partial results of `result` are combined: the loops that do not index its outputs."""
        indexed = {name for output in result.outputs for name in self.operand(output).axes}
        return tuple(axis.name for axis in self.axes if axis.kind != WHOLE and axis.name not in indexed)

    def row_axes(self, result: Result) -> tuple[str, ...]:
        """The leading axes that all outputs of a result share. Each row along them is combined independently of others."""
        shared: list[str] = []
        for names in zip(*(self.operand(output).axes for output in result.outputs), strict=False):
            if len(set(names)) > 1:
                break
            shared.append(names[0])
        return tuple(shared)

    def result_of(self, output: str) -> Result:
        return next(result for result in self.results if output in result.outputs)


def _check_name(kind: str, name: str) -> None:
    """Names must be identifiers, because expressions consist of them."""
    if not name.isidentifier():
        raise ValueError(f"{name!r} cannot be the name of an {kind}: expected an identifier")


def _refuse_duplicates(kind: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two {kind} are called {name}")
