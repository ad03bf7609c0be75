"""Loop programs: axes, operands indexed by them, and how the partial results of a reduction combine (paper, section 4.1).

A program is a loop nest around a tile. Each axis is a loop (or a dimension inside the tile), each operand a tensor whose
dimensions are axes. The tile computes what one block of every axis contributes to the outputs; contributions of different
blocks of an axis by which an output is not indexed are combined by the output's monoid. Everything is immutable.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .checks import check_fields, check_name, check_options, is_among, refuse_duplicates, shown
from .loop_rules import axis_error, read_text
from .tile_rules import TILES, check_tile

SPATIAL, REDUCED, SCANNED, WHOLE = "s", "r", "c", "w"
KINDS = {SPATIAL: "spatial", REDUCED: "reduced", SCANNED: "scanned", WHOLE: "whole"}
ORDERS = ("contiguous", "zigzag")
MONOID_NAMES = "sum", "max", "softmax"
KERNELS = {name: ("library", "reference") for name in ("attention", "attention_backward")}  # of tiles that have several
MOST_ELEMENTS = 2**63  # along an axis: more than a tensor can have
ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Axis:
    """A loop of a program, or a dimension inside its tile.

    kind: "s" (spatial: every output of its own blocks), "r" (some output is reduced over it, in any order), "c" (a scan: a
    state passes along it, in order), "w" (whole: inside the tile, never split). order: which elements a rank holds where
    ranks share the axis, "contiguous" or "zigzag" (with P ranks and 2P blocks, rank p holds blocks p and 2P-1-p).
    """

    name: str
    size: int
    kind: str = SPATIAL
    order: str = "contiguous"

    def __post_init__(self) -> None:
        check_name("an axis", self.name)
        if type(self.size) is not int or not 1 <= self.size < MOST_ELEMENTS:
            whole = "a whole number of at least 1, below 2^63"
            raise ValueError(f"axis {self.name} has size {shown(self.size)}; it must be {whole}")
        if not is_among(self.kind, KINDS):
            raise ValueError(f"axis {self.name} has kind {shown(self.kind)}, none of {', '.join(KINDS)}")
        if not is_among(self.order, ORDERS):
            raise ValueError(f"axis {self.name} has order {shown(self.order)}, none of {', '.join(ORDERS)}")


@dataclass(frozen=True)
class Operand:
    """An input or output tensor, with one dimension per axis.

    axes: names of its axes, in the order of its dimensions. groups: {axis: divisor} as pairs; the dimension has size /
    divisor elements, each of which serves `divisor` consecutive indices of the axis (keys and values under GQA). home: the
    axis along which the caller keeps it sharded over all ranks of the mesh; None: every rank holds it whole. is_wide: it is
    kept in at least fp32 (statistics such as lse). has_wide_partials: partial results travel in at least fp32.
    source: for an input that the program derives from others before the loops, the names of these; otherwise empty.
    in_tile: whether the tile reads it; an input that only serves to derive others is not gathered.

    ValueError: the name is no identifier, an axis is there twice, a divisor is below 1 or belongs to an axis that is not
    the operand's, or a field has another type.
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
        check_name("an operand", self.name)
        check_fields(self, f"operand {self.name}")
        if len(set(self.axes)) < len(self.axes):
            raise ValueError(f"operand {self.name} has an axis twice: {', '.join(self.axes)}")
        for axis, divisor in self.groups:
            if axis not in self.axes:
                raise ValueError(f"operand {self.name} has groups along {axis}, by which it is not indexed")
            if type(divisor) is not int or divisor < 1:
                raise ValueError(
                    f"operand {self.name} has groups of {shown(divisor)} along {axis}; at least 1 is needed"
                )

    def divisor(self, axis: str) -> int:
        """How many indices of `axis` share one element of this operand."""
        return dict(self.groups).get(axis, 1)


@dataclass(frozen=True)
class Result:
    """Outputs whose partial results combine together, by one of MONOID_NAMES.

    ValueError: by something else, or by softmax but not a mean and the log of its weights' sum; or a field has another type.
    """

    monoid: str
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        check_fields(self, "result")
        if self.monoid not in MONOID_NAMES:
            names = ", ".join(MONOID_NAMES)
            raise ValueError(f"{', '.join(self.outputs)}: {self.monoid!r} is none of the reductions {names}")
        if self.monoid == "softmax" and len(self.outputs) != 2:
            raise ValueError(
                f"softmax combines two outputs, a mean and the log of its weights' sum, not {', '.join(self.outputs)}"
            )


@dataclass(frozen=True)
class Scan:
    """How a state passes along an axis: over blocks, by summaries. Names of an axis and of `Program.internal` operands.

    axis: the scanned axis. blocks: an axis that numbers the blocks of it among which states pass; its size is set when a
    schedule is lowered. state: what a block contributes from a state of zero. decay: what else it does to the state that
    enters it: the sum of its step sizes, or a matrix, its last two axes. carry: the state that enters each block. rates: by
    which a sum of step sizes becomes the block's decay; empty for a matrix.
    """

    axis: str
    blocks: str
    state: str
    decay: str
    carry: str
    rates: str = ""

    @property
    def summaries(self) -> tuple[str, ...]:
        """What a rank computes of its blocks before states pass: state, decay and, if there are any, rates."""
        return (self.state, self.decay, *((self.rates,) if self.rates else ()))


@dataclass(frozen=True)
class Program:
    """A loop program.

    inputs, outputs: its operands. results: how partial outputs combine; every output belongs to exactly one. tile: one of
    TILES, or the text of an expression (`loop_rules`), such as "a[i, j] * b[j]", which computes the one output.
    options: what else the tile needs, as (name, value) pairs. dtype: of the elements, for counting bytes and memory; a plan
    runs with tensors of any floating dtype. scan: how a state passes along an axis. internal: the operands that this needs.

    ValueError: a field has another type; a name is no identifier, or is used twice; something names an axis or an operand
    that does not exist; an operand has an axis twice, or is kept along a whole one; a size does not divide by a group; there
    is no output, or no input in the program's dtype; an output belongs to no result or to several; an option is not one
    finite number, string or None; the kind of an axis does not fit the outputs; the operands and options are not those of a
    tile of TILES; or the tile is no expression of the inputs with their axes.
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
        check_name("a program", self.name)
        check_fields(self, f"program {self.name}")
        refuse_duplicates("axis", (axis.name for axis in self.axes))
        refuse_duplicates("operand", (operand.name for operand in (*self.operands, *self.internal)))
        check_options(self.options)
        object.__setattr__(self, "options", tuple(sorted(self.options)))
        object.__setattr__(self, "_axes", {axis.name: axis for axis in self.axes})
        object.__setattr__(self, "_operands", {each.name: each for each in (*self.operands, *self.internal)})
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(ITEMSIZES)}")
        for operand in (*self.operands, *self.internal):
            self._check_operand(operand)
        self._check_given()
        self._check_results()
        self._check_scan()
        self._check_kinds()
        if self.tile in TILES:
            inputs, outputs = ([each.name for each in operands] for operands in (self.inputs, self.outputs))
            check_tile(self.name, self.tile, inputs, outputs, dict(self.options))
        else:
            self._check_expression()

    def _check_operand(self, operand: Operand) -> None:
        for name in (*operand.axes, *([operand.home] if operand.home else [])):
            if name not in self._axes:
                raise ValueError(f"operand {operand.name} names the axis {name}, which {self.name} does not have")
        if operand.home and operand.home not in operand.axes:
            raise ValueError(f"operand {operand.name} is kept along {operand.home}, by which it is not indexed")
        if operand.home and self._axes[operand.home].kind == WHOLE:
            raise ValueError(f"operand {operand.name} is kept along {operand.home}, which is whole in every tile")
        for name, divisor in operand.groups:
            if self._axes[name].size % divisor:
                size = self._axes[name].size
                raise ValueError(
                    f"{operand.name}: axis {name} of {size} does not divide by {divisor} ({size % divisor} left)"
                )
        for name in operand.source:
            if name not in (each.name for each in self.inputs):
                raise ValueError(f"operand {operand.name} is derived from {name}, which is no input of {self.name}")

    def _check_given(self) -> None:
        """There is something to compute, and an input in the program's dtype, which is that of the results."""
        given = [each for each in self.inputs if not each.source]
        if not given or not self.outputs:
            raise ValueError(f"{self.name} needs at least one {'output' if given else 'input that its caller gives'}")
        if ITEMSIZES[self.dtype] < 4 and all(each.is_wide for each in given):
            names = ", ".join(each.name for each in given)
            raise ValueError(
                f"{self.name}: its dtype is {self.dtype}, but all inputs ({names}) are wide, and so at least float32: make "
                f"it float32"
            )

    def _check_results(self) -> None:
        outputs = [output.name for output in self.outputs]
        named = [name for result in self.results for name in result.outputs]
        for name in outputs:
            if named.count(name) != 1:
                raise ValueError(f"output {name} belongs to {named.count(name)} results; it needs one")
        if unknown := [name for name in named if name not in outputs]:
            raise ValueError(f"a result of {self.name} names {unknown[0]}, which is no output")

    def _check_scan(self) -> None:
        if self.scan is None:
            return
        if self.axis(self.scan.axis).kind != SCANNED or self.axis(self.scan.blocks).kind != WHOLE:
            raise ValueError(f"{self.name}: {self.scan.axis} must be scanned, and {self.scan.blocks} whole")
        internal = [each.name for each in self.internal]
        for name in (*self.scan.summaries, self.scan.carry):
            if name not in internal:
                raise ValueError(f"the scan of {self.name} needs {name}, which is no internal operand")
        matrix = self.operand(self.scan.decay)
        if not self.scan.rates and len(set(self.shape(matrix)[-2:])) > 1:
            sizes = ", ".join(f"{axis} {self.axis(axis).size}" for axis in matrix.axes[-2:])
            raise ValueError(f"the scan of {self.name} has no rates, so {matrix.name} must be square, not of {sizes}")

    def _check_kinds(self) -> None:
        """Every kind is true of the outputs, because lowering goes by which axes they have."""
        outputs = {each.name: each.axes for each in self.outputs}
        for axis in self.axes:
            if rule := axis_error(axis.name, axis.kind, outputs):
                raise ValueError(f"{self.name}: {rule}")
            if axis.kind == SCANNED and (self.scan is None or self.scan.axis != axis.name):
                raise ValueError(f"{self.name}: {axis.name} is scanned, but no scan passes a state along it")

    def _check_expression(self) -> None:
        if len(self.outputs) != 1:
            names = ", ".join(each.name for each in self.outputs) or "none"
            tile = f"the tile {self.tile!r:.80} is an expression, which computes one output"
            raise ValueError(f"{self.name}: {tile}, not {names}")
        for each in self.inputs:
            if each.groups or each.source or not each.in_tile:
                rule = "must have no groups and no source, and be in the tile"
                raise ValueError(f"{self.name}: the input {each.name} of an expression {rule}")
        try:
            inputs = {each.name: each.axes for each in self.inputs}
            read_text(self.tile, inputs, [self.outputs[0].name], list(self._axes))
        except ValueError as error:
            raise ValueError(
                f"{self.name}: the tile {self.tile!r:.80} is none of {', '.join(TILES)}, and as an expression: {error}"
            ) from None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The inputs, and then the outputs."""
        return (*self.inputs, *self.outputs)

    @property
    def points(self) -> float:
        """How many points of all axes are computed: half of them under a causal mask. Summaries have no points."""
        internal = {name for each in self.internal for name in each.axes}
        internal -= {name for each in self.operands for name in each.axes}
        sizes = (axis.size for axis in self.axes if axis.name not in internal)
        return math.prod(sizes) * (0.5 if dict(self.options).get("causal") else 1.0)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The implementations of its tile: "library" (a fused kernel, if there is one), and "reference" (plain operations)
        where that is another one.
        """
        return KERNELS.get(self.tile, ("library",))

    def most_blocks(self, name: str) -> int:
        """The most blocks that an axis can be cut into; the number of ranks that share it must divide this.

        It is the axis's size in the operand that has the fewest elements along it: of heads, the number of key/value heads.
        """
        return self._most_blocks[self.axis(name).name]

    @cached_property
    def _most_blocks(self) -> dict[str, int]:
        return {axis.name: axis.size // max(each.divisor(axis.name) for each in self.operands) for axis in self.axes}

    def axis(self, name: str) -> Axis:
        """The axis of this name. ValueError: there is none."""
        if not isinstance(name, str) or name not in self._axes:
            raise ValueError(f"{self.name} has no axis {shown(name)}; it has {', '.join(self._axes)}")
        return self._axes[name]

    def operand(self, name: str) -> Operand:
        """The operand of this name. ValueError: there is none."""
        if not isinstance(name, str) or name not in self._operands:
            raise ValueError(f"{self.name} has no operand {shown(name)}; it has {', '.join(self._operands)}")
        return self._operands[name]

    def option(self, name: str) -> Any:
        """The value of an option of the tile. KeyError: there is none."""
        return dict(self.options)[name]

    def shape(self, operand: Operand) -> tuple[int, ...]:
        """The shape of the whole operand."""
        return tuple(self._axes[name].size // operand.divisor(name) for name in operand.axes)

    def itemsize(self, operand: Operand, is_partial: bool = False) -> int:
        """Bytes of an element; is_partial: of a partial result on the wire."""
        size = ITEMSIZES[self.dtype]
        return max(4, size) if operand.is_wide or (is_partial and operand.has_wide_partials) else size

    def nbytes(self, operand: Operand) -> int:
        """Bytes of the whole operand."""
        return math.prod(self.shape(operand)) * self.itemsize(operand)

    def resized(self, /, **sizes: int) -> "Program":
        """The same program with other sizes of the named axes. ValueError as for a new program."""
        for name in sizes:
            self.axis(name)
        axes = tuple(replace(axis, size=sizes.get(axis.name, axis.size)) for axis in self.axes)
        return replace(self, axes=axes)

    def with_options(self, /, **options: Any) -> "Program":
        """The same program with other values of its options. ValueError: it has no such option, or as for a new program."""
        known = dict(self.options)
        if unknown := [name for name in options if name not in known]:
            raise ValueError(f"{self.name} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
        return replace(self, options=tuple((known | options).items()))

    def reduced_axes(self, result: Result) -> tuple[str, ...]:
        """The axes over which partial results of `result` are combined: loops that do not index its outputs."""
        indexed = {name for output in result.outputs for name in self.operand(output).axes}
        return tuple(axis.name for axis in self.axes if axis.kind != WHOLE and axis.name not in indexed)

    def row_axes(self, result: Result) -> tuple[str, ...]:
        """The leading axes that all outputs of a result share: each row along them is combined independently of others."""
        shared: list[str] = []
        for names in zip(*(self.operand(output).axes for output in result.outputs), strict=False):
            if len(set(names)) > 1:
                break
            shared.append(names[0])
        return tuple(shared)

    def result_of(self, output: str) -> Result:
        """The result to which an output belongs."""
        return next(result for result in self.results if output in result.outputs)
