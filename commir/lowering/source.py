"""`Plan.source`: all that one rank does, as the text of a Python program in these words.

| word | effect |
|---|---|
| `exchange(x, to, source)` | begin to send x, and to receive a block of the same shape |
| `wait(x, ...)` | until they have arrived |
| `gather(x, among, dim)`, `all_to_all(x, among, cut, join)` | the collective among some ranks, in their order |
| `reduce_scatter(monoid, xs, among, cut)`, `all_reduce(monoid, xs, among)` | the same, of partial results |
| `swap(x, peer)` | x of another rank, which gets this rank's |
| `cut(x, dim, number, of)` | a copy of one of the equal blocks along a dimension |
| `part(x, dim, number, of)` | a view of it |
| `tile(inputs, axis=elements)` | what the tile computes from blocks with these elements of the axes, and all of the others |
| `combine(monoid, xs, others)` | combine partial results into xs, in place |
| `neutral(monoid, shapes)` | accumulators before the first tile |
| `derive(name, xs)` | an input that is made of others |
| `summarize(inputs, axis=elements)`, `pass_states(xs)` | the states of a scan |
| `narrow(x)` | x in the dtype of the program |
| `empty(shape)`, `write(x, y)` | a new output of a plan in chunks, and y written into a part of it |

A dimension that digits of the same axis surround is (dimension, their blocks): cutting (1, 2) cuts each half of dimension 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from commir.ir.program import Operand, Result

from . import plan_steps as kinds
from .operand_layouts import Digits, Piece
from .plan_steps import METHODS, Key, Place, Step
from .rank_view import Fixed, RankView
from .tensor_blocks import Sizes, local_sizes

# (axis, {digit: its block}) -> elements of the whole tensor
Elements = Callable[[str, Mapping[Piece, int]], torch.Tensor]
INDENT = "    "


def source_of_steps(
    name: str, digits: Digits, steps: Sequence[Step], rank: int, elements: Elements, chunked: str = ""
) -> str:
    """The steps of a rank as a function of its inputs at home. chunked: the axis of which this is one chunk."""
    return _Source(digits, rank, elements, chunked).function(name, steps)


def source_of_chunks(name: str, digits: Digits, rank: int) -> str:
    """A function that calls `chunk_0`, `chunk_1`, ... with the chunks of a rank's inputs, and joins their outputs."""
    nest, program = digits.nest, digits.nest.program
    piece = digits.piece(str(nest.chunked))

    def chunk(word: str, operand: Operand, number: int) -> str:
        sizes = local_sizes(digits, operand, digits.home(operand))
        return _block(operand.name, sizes, {piece: number}, word)

    lines = [f"def {name}({_names(program.given)}):"]
    for output in program.outputs:
        lines.append(f"{INDENT}{output.name} = empty({digits.local_shape(output, digits.home(output))})")
    for number in range(nest.chunks):
        arguments = ", ".join(chunk("cut", operand, number) for operand in program.given)
        results = [f"{output.name}_{number}" for output in program.outputs]
        lines.append(f"{INDENT}{', '.join(results)} = chunk_{number}({arguments})")
        for result, output in zip(results, program.outputs, strict=True):
            lines.append(f"{INDENT}write({chunk('part', output, number)}, {result})")
    return "\n".join([*lines, f"{INDENT}return {_names(program.outputs)}"])


class _Source(RankView):
    """The lines of one rank. shapes: {name of a block: its shape}."""

    def __init__(self, digits: Digits, rank: int, elements: Elements, chunked: str) -> None:
        super().__init__(digits, rank)
        self.elements, self.chunked = elements, chunked
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.lines: list[str] = []

    def function(self, name: str, steps: Sequence[Step]) -> str:
        self.lines = [f"def {name}({_names(self.program.given)}):"]
        self.shapes = {x.name: self.digits.local_shape(x, self.digits.home(x)) for x in self.program.given}
        self._add("# " + ", ".join(f"{name} {shape}" for name, shape in self.shapes.items()))
        for step in steps:
            _WRITE[type(step)](self, step)
        wide = {x.name for x in self.program.outputs if self.program.itemsize(x) < 4 and not self.program.is_rounded(x)}
        outputs = (f"narrow({x.name})" if x.name in wide else x.name for x in self.program.outputs)
        self._add(f"return {', '.join(outputs)}")
        return "\n".join(self.lines)

    def _add(self, line: str, comment: str = "") -> None:
        self.lines.append(INDENT + line + f"  # {comment}" * bool(comment))

    def _make(self, name: str, shape: Sequence[int], expression: str, comment: str = "") -> None:
        """Assign to a block, and say its shape."""
        self.shapes[name] = tuple(shape)
        self._add(f"{name} = {expression}", comment + f"{' -> ' if comment else ''}{tuple(shape)}")

    # Collectives

    def gather(self, step: kinds.Gather) -> None:
        for name, joined in step.moves:
            shape = self._joined(name, joined, self.size(step.axis))
            call = f"gather({name}, {self._among(step.axis)}, dim={_dim(joined)})"
            self._make(name, shape, call, f"along {step.axis}")

    def all_to_all(self, step: kinds.AllToAll) -> None:
        size = self.size(step.axis)
        for name, cut, joined in step.moves:
            self.shapes[name] = self._cut(name, cut, size)
            places = f"cut={_dim(cut)}, join={_dim(joined)}"
            expression = f"all_to_all({name}, {self._among(step.axis)}, {places})"
            self._make(name, self._joined(name, joined, size), expression, f"along {step.axis}")

    def slice(self, step: kinds.Slice) -> None:
        size, own = self.size(step.axis), self.coordinates[step.axis]
        for name, cut in step.moves:
            self._make(name, self._cut(name, cut, size), f"cut({name}, {_dim(cut)}, number={own}, of={size})")

    def swap(self, step: kinds.Swap) -> None:
        for name in step.operands:
            call = f"swap({name}, peer={self.swap_peer(step)})"
            self._make(name, self.shapes[name], call, f"of {' and '.join(step.axes)}")

    def reduce_scatter(self, step: kinds.ReduceScatter) -> None:
        result, size = self.program.results[step.result], self.size(step.axis)
        for name, cut in step.moves:
            self.shapes[name] = self._cut(name, cut, size)
        cuts = _tuple([str(_dim(cut)) for _, cut in step.moves])
        names = _tuple(result.outputs)
        call = f'reduce_scatter("{result.monoid}", {names}, {self._among(step.axis)}, cut={cuts})'
        self._add(f"{names} = {call}", f"along {step.axis} -> {self._shapes_of(result)}")

    def all_reduce(self, step: kinds.AllReduce) -> None:
        result = self.program.results[step.result]
        names = _tuple(result.outputs)
        call = f'all_reduce("{result.monoid}", {names}, {self._among(step.axis)})'
        self._add(f"{names} = {call}", f"along {step.axis} -> {self._shapes_of(result)}")

    # Blocks that travel

    def send(self, step: kinds.Send) -> None:
        to, source = self.peer(step.axis, -1), self.peer(step.axis, 1)
        for operand in step.operands:
            block = _register(operand, step.source)
            call = f"exchange({block}, to={to}, source={source})"
            self._make(_register(operand, step.target), self.shapes[block], call, f"begun along {step.axis}")

    def arrive(self, step: kinds.Arrive) -> None:
        self._add(f"wait({', '.join(_register(operand, step.key) for operand in step.operands)})")

    def free(self, step: kinds.Free) -> None:
        self._add(f"del {', '.join(_register(operand, step.key) for operand in step.operands)}")

    def send_partial(self, step: kinds.SendPartial) -> None:
        to, source = self.peer(step.axis, step.distance), self.peer(step.axis, -step.distance)
        for name in self.program.results[step.result].outputs:
            block = _register(name, step.source)
            sent = f"narrow({block})" if self.program.is_rounded(self.program.operand(name)) else block
            call = f"exchange({sent}, to={to}, source={source})"
            self._make(f"other_{block}", self.shapes[block], call, f"begun along {step.axis}")

    def combine(self, step: kinds.Combine) -> None:
        result = self.program.results[step.result]
        others = [f"other_{_register(name, step.source)}" for name in result.outputs]
        self._add(f"wait({', '.join(others)})")
        self._combine(result, [_register(name, step.target) for name in result.outputs], others)

    # Tiles

    def compute(self, step: kinds.Compute) -> None:
        fixed = self.turn(step.counters)
        if self.loops:
            loops = [digit for digit in map(self.digits.nest.digit, self.digits.nest.order) if digit.size > 1]
            turn = (f"{loop.name} {fixed[self.digits.piece(loop.name)]} of {loop.size}" for loop in loops)
            self._add(f"# {', '.join(turn)}")
        inputs = {x.name: self.key(x.name, step.counters) for x in self.program.inputs if x.in_tile}
        blocks = [_block(_register(name, key), self.sizes[name], fixed, "part") for name, key in inputs.items()]
        if (scan := self.program.scan) and scan.carry in self.shapes:
            blocks.append(scan.carry)
        targets, after = [], list[tuple[Result, list[str], list[str]]]()
        for result in self.program.results:
            key = self.key(result.outputs[0], step.counters)
            names = [_register(name, key) for name in result.outputs]
            local = _local(self.sizes[result.outputs[0]], fixed)
            if names[0] not in self.shapes:
                self._new_accumulators(result, names, is_cut=bool(local))
                if not local:
                    targets += names
                    continue
            computed = [f"{name}_of_tile" for name in result.outputs]
            targets += computed
            totals = [_block(name, self.sizes[x], fixed, "part") for name, x in zip(names, result.outputs, strict=True)]
            after.append((result, totals, computed))
        self._add(f"{', '.join(targets)} = tile({', '.join([*blocks, *self._elements(fixed)])})")
        for each in after:
            self._combine(*each)

    def round(self, step: kinds.Round) -> None:
        for name in self.program.results[step.result].outputs:
            if self.program.is_rounded(self.program.operand(name)):
                self._make(name, self.shapes[name], f"narrow({name})")

    def derive(self, step: kinds.Derive) -> None:
        operand = self.program.operand(step.operand)
        source = self.program.operand(operand.source[0])
        shape = [n for n, axis in zip(self.shapes[source.name], source.axes, strict=True) if axis in operand.axes]
        self._make(operand.name, shape, f'derive("{operand.name}", {", ".join(operand.source)})')

    def summarize(self, step: kinds.Summarize) -> None:
        inputs = [operand.name for operand in self.program.inputs]
        for operand in map(self.program.operand, self.scan.summaries):
            self.shapes[operand.name] = self.digits.local_shape(operand, self.digits.needed(operand))
        self._add(f"{', '.join(self.scan.summaries)} = summarize({', '.join([*inputs, *self._elements({})])})")

    def pass_states(self, step: kinds.PassStates) -> None:
        call = f"pass_states({', '.join(self.scan.summaries)})"
        self._make(self.scan.carry, self.shapes[self.scan.state], call)

    # Parts of lines

    def _new_accumulators(self, result: Result, names: Sequence[str], is_cut: bool) -> None:
        for name, output in zip(names, map(self.program.operand, result.outputs), strict=True):
            self.shapes[name] = self.digits.local_shape(output, self.digits.needed(output))
        if is_cut:
            shapes = ", ".join(str(self.shapes[name]) for name in names)
            self._add(f'{_tuple(names)} = neutral("{result.monoid}", {shapes})')

    def _combine(self, result: Result, totals: Sequence[str], others: Sequence[str]) -> None:
        self._add(f'combine("{result.monoid}", {_tuple(totals)}, {_tuple(others)})')

    def _elements(self, fixed: Fixed) -> list[str]:
        """For each loop axis that is divided, the elements of the whole tensor that a tile has, as `axis=range(...)`."""
        of = {axis: _runs(self.elements(axis, blocks)) for axis, blocks in self.blocks_of_axes(fixed).items()}
        wholes = {axis: str(range(self.program.axis(axis).size)) for axis in of}
        return [f"{axis}={runs}" for axis, runs in of.items() if axis == self.chunked or runs != wholes[axis]]

    def _shapes_of(self, result: Result) -> str:
        return ", ".join(str(self.shapes[name]) for name in result.outputs)

    def _among(self, axis: str) -> str:
        """The ranks along a mesh axis."""
        first, second = (self.mesh.rank_at({**self.coordinates, axis: n}) for n in (0, 1))
        step = second - first
        return str(range(first, first + step * self.mesh.size(axis), step))

    def _joined(self, name: str, place: Place, blocks: int) -> tuple[int, ...]:
        """The shape of this many blocks, joined."""
        return tuple(n * blocks if dim == place.dim else n for dim, n in enumerate(self.shapes[name]))

    def _cut(self, name: str, place: Place, blocks: int) -> tuple[int, ...]:
        """The shape of one of this many blocks."""
        return tuple(n // blocks if dim == place.dim else n for dim, n in enumerate(self.shapes[name]))


_WRITE: dict[type, Callable[[_Source, Any], None]] = {kind: getattr(_Source, name) for kind, name in METHODS.items()}


def _register(name: str, key: Key) -> str:
    """The name of a block: that of the operand, and the loop counters unless all are zero."""
    return "_".join([name, *map(str, key)]) if any(key) else name


def _names(operands: Sequence[Operand]) -> str:
    return ", ".join(operand.name for operand in operands)


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' * (len(items) == 1)})"


def _dim(place: Place) -> int | tuple[int, int]:
    return place.dim if place.outer == 1 else (place.dim, place.outer)


def _local(sizes: Sizes, fixed: Fixed) -> list[tuple[Place, int, int]]:
    """(place, number, of) of the blocks in `fixed` of a tensor's digits, the last dimension and innermost digit first."""
    blocks = []
    for dim, digits in enumerate(sizes):
        for index, (piece, size) in enumerate(digits):
            if piece in fixed:
                blocks.append((Place(dim, math.prod(n for _, n in digits[:index])), fixed[piece], size))
    return blocks[::-1]


def _block(name: str, sizes: Sizes, fixed: Fixed, word: str) -> str:
    """The expression of the block of a tensor with these digits fixed."""
    for place, number, size in _local(sizes, fixed):
        name = f"{word}({name}, {_dim(place)}, number={number}, of={size})"
    return name


def _runs(elements: torch.Tensor) -> str:
    """Elements as a range, or as a list of ranges."""
    ends = [*((elements.diff() != 1).nonzero().flatten() + 1).tolist(), len(elements)]
    runs = [range(int(elements[a]), int(elements[b - 1]) + 1) for a, b in zip([0, *ends], ends, strict=False)]
    return str(runs[0] if len(runs) == 1 else runs)
