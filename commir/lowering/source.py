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

from commir.ir.program import WHOLE, Operand, Result

from . import plan_steps as kinds
from .operand_layouts import Digits, Piece
from .plan_steps import Key, Place, Step
from .tensor_blocks import Sizes, local_sizes
from .unrolled_loops import loops_of, travelling

Elements = Callable[
    [str, Mapping[Piece, int]], torch.Tensor
]  # (axis, {digit: its block}) -> elements of the whole tensor
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

    inputs = [operand for operand in program.inputs if not operand.source]
    lines = [f"def {name}({_names(inputs)}):"]
    for output in program.outputs:
        lines.append(f"{INDENT}{output.name} = empty({digits.local_shape(output, digits.home(output))})")
    for number in range(nest.chunks):
        arguments = ", ".join(chunk("cut", operand, number) for operand in inputs)
        found = [f"{output.name}_{number}" for output in program.outputs]
        lines.append(f"{INDENT}{', '.join(found)} = chunk_{number}({arguments})")
        for each, output in zip(found, program.outputs, strict=True):
            lines.append(f"{INDENT}write({chunk('part', output, number)}, {each})")
    return "\n".join([*lines, f"{INDENT}return {_names(program.outputs)}"])


class _Source:
    """The lines of one rank. shapes: {name of a block: its shape}."""

    def __init__(self, digits: Digits, rank: int, elements: Elements, chunked: str) -> None:
        self.digits, self.nest, self.program = digits, digits.nest, digits.nest.program
        self.mesh, self.elements, self.chunked = digits.nest.mesh, elements, chunked
        self.coordinates, self.loops = self.mesh.coordinates(rank), loops_of(digits)
        self.travels = {x.name: travelling(digits, self.loops, x) for x in self.program.operands}
        self.sizes = {x.name: local_sizes(digits, x, digits.needed(x)) for x in self.program.operands}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.lines: list[str] = []

    def function(self, name: str, steps: Sequence[Step]) -> str:
        """The function that takes the steps."""
        inputs = [operand for operand in self.program.inputs if not operand.source]
        self.lines = [f"def {name}({_names(inputs)}):"]
        self.shapes = {x.name: self.digits.local_shape(x, self.digits.home(x)) for x in inputs}
        self._add("# " + ", ".join(f"{name} {shape}" for name, shape in self.shapes.items()))
        for step in steps:
            _WRITE[type(step)](self, step)
        outputs = [
            f"narrow({x.name})" if self._is_wide_on_wire(x) and self.program.itemsize(x) < 4 else x.name
            for x in self.program.outputs
        ]
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
            shape = self._joined(name, joined, self.mesh.size(step.axis))
            self._make(
                name, shape, f"gather({name}, {self._among(step.axis)}, dim={_dim(joined)})", f"along {step.axis}"
            )

    def all_to_all(self, step: kinds.AllToAll) -> None:
        size = self.mesh.size(step.axis)
        for name, cut, joined in step.moves:
            self.shapes[name] = self._cut(name, cut, size)
            places = f"cut={_dim(cut)}, join={_dim(joined)}"
            expression = f"all_to_all({name}, {self._among(step.axis)}, {places})"
            self._make(name, self._joined(name, joined, size), expression, f"along {step.axis}")

    def slice(self, step: kinds.Slice) -> None:
        size, own = self.mesh.size(step.axis), self.coordinates[step.axis]
        for name, cut in step.moves:
            self._make(name, self._cut(name, cut, size), f"cut({name}, {_dim(cut)}, number={own}, of={size})")

    def swap(self, step: kinds.Swap) -> None:
        first, second = step.axes
        here = self.coordinates
        peer = self.mesh.rank_at({**here, first: here[second], second: here[first]})
        for name in step.operands:
            self._make(name, self.shapes[name], f"swap({name}, peer={peer})", f"of {first} and {second}")

    def reduce_scatter(self, step: kinds.ReduceScatter) -> None:
        result, size = self.program.results[step.result], self.mesh.size(step.axis)
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
        to, source = self._peer(step.axis, -1), self._peer(step.axis, 1)
        for operand in step.operands:
            block = _register(operand, step.source)
            call = f"exchange({block}, to={to}, source={source})"
            self._make(_register(operand, step.target), self.shapes[block], call, f"begun along {step.axis}")

    def arrive(self, step: kinds.Arrive) -> None:
        self._add(f"wait({', '.join(_register(operand, step.key) for operand in step.operands)})")

    def free(self, step: kinds.Free) -> None:
        self._add(f"del {', '.join(_register(operand, step.key) for operand in step.operands)}")

    def send_partial(self, step: kinds.SendPartial) -> None:
        to, source = self._peer(step.axis, step.distance), self._peer(step.axis, -step.distance)
        for name in self.program.results[step.result].outputs:
            block = _register(name, step.source)
            sent = block if self._is_wide_on_wire(self.program.operand(name)) else f"narrow({block})"
            call = f"exchange({sent}, to={to}, source={source})"
            self._make(f"other_{block}", self.shapes[block], call, f"begun along {step.axis}")

    def combine(self, step: kinds.Combine) -> None:
        result = self.program.results[step.result]
        others = [f"other_{_register(name, step.source)}" for name in result.outputs]
        self._add(f"wait({', '.join(others)})")
        self._combine(result, [_register(name, step.target) for name in result.outputs], others)

    # Tiles

    def compute(self, step: kinds.Compute) -> None:
        fixed = {}
        for loop, counter in zip(self.loops, step.counters, strict=True):
            shift = self.coordinates[loop.mesh_axis] if loop.mesh_axis else 0
            fixed[loop.piece] = (counter + shift) % loop.size
        if self.loops:
            turn = (f"{name} {fixed[self.digits.piece(name)]} of {self.nest.digit(name).size}" for name in self.nest.order
                    if self.nest.digit(name).size > 1)  # fmt: skip
            self._add(f"# {', '.join(turn)}")
        blocks = [self._input(x, step.counters, fixed) for x in self.program.inputs if x.in_tile]
        if (scan := self.program.scan) and scan.carry in self.shapes:
            blocks.append(scan.carry)
        targets, after = [], list[tuple[Result, list[str], list[str]]]()
        for result in self.program.results:
            key = tuple(step.counters[j] for j in self.travels[result.outputs[0]])
            names = [_register(name, key) for name in result.outputs]
            local = _local(self.sizes[result.outputs[0]], fixed)
            if names[0] not in self.shapes:
                self._new_accumulators(result, names, is_cut=bool(local))
                if not local:
                    targets += names
                    continue
            found = [f"{name}_of_tile" for name in result.outputs]
            targets += found
            totals = [_block(name, self.sizes[x], fixed, "part") for name, x in zip(names, result.outputs, strict=True)]
            after.append((result, totals, found))
        self._add(f"{', '.join(targets)} = tile({', '.join([*blocks, *self._elements(fixed)])})")
        for each in after:
            self._combine(*each)

    def round(self, step: kinds.Round) -> None:
        for name in self.program.results[step.result].outputs:
            if not self._is_wide_on_wire(self.program.operand(name)):
                self._make(name, self.shapes[name], f"narrow({name})")

    def derive(self, step: kinds.Derive) -> None:
        operand = self.program.operand(step.operand)
        source = self.program.operand(operand.source[0])
        shape = [n for n, axis in zip(self.shapes[source.name], source.axes, strict=True) if axis in operand.axes]
        self._make(operand.name, shape, f'derive("{operand.name}", {", ".join(operand.source)})')

    def summarize(self, step: kinds.Summarize) -> None:
        scan, inputs = self.program.scan, [operand.name for operand in self.program.inputs]
        assert scan is not None
        for name in scan.summaries:
            operand = self.program.operand(name)
            self.shapes[name] = self.digits.local_shape(operand, self.digits.needed(operand))
        self._add(f"{', '.join(scan.summaries)} = summarize({', '.join([*inputs, *self._elements({})])})")

    def pass_states(self, step: kinds.PassStates) -> None:
        scan = self.program.scan
        assert scan is not None
        self._make(scan.carry, self.shapes[scan.state], f"pass_states({', '.join(scan.summaries)})")

    # Parts of lines

    def _new_accumulators(self, result: Result, names: Sequence[str], is_cut: bool) -> None:
        for name, output in zip(names, map(self.program.operand, result.outputs), strict=True):
            self.shapes[name] = self.digits.local_shape(output, self.digits.needed(output))
        if is_cut:
            shapes = ", ".join(str(self.shapes[name]) for name in names)
            self._add(f'{_tuple(names)} = neutral("{result.monoid}", {shapes})')

    def _combine(self, result: Result, totals: Sequence[str], others: Sequence[str]) -> None:
        self._add(f'combine("{result.monoid}", {_tuple(totals)}, {_tuple(others)})')

    def _input(self, operand: Operand, counters: Key, fixed: Mapping[Piece, int]) -> str:
        key = tuple(counters[j] for j in self.travels[operand.name])
        return _block(_register(operand.name, key), self.sizes[operand.name], fixed, "part")

    def _elements(self, fixed: Mapping[Piece, int]) -> list[str]:
        """For each loop axis that is divided, the elements of the whole tensor that a tile has, as `axis=range(...)`."""
        known = {piece: self.coordinates[m] for m, piece in self.digits.parallel().items()} | dict(fixed)
        axes = [axis for axis in self.program.axes if axis.name in self.digits.sizes and axis.kind != WHOLE]
        of = {a.name: _runs(self.elements(a.name, {p: i for p, i in known.items() if p[0] == a.name})) for a in axes}
        divided = [a.name for a in axes if a.name == self.chunked or of[a.name] != str(range(a.size))]
        return [f"{name}={of[name]}" for name in divided]

    def _shapes_of(self, result: Result) -> str:
        return ", ".join(str(self.shapes[name]) for name in result.outputs)

    def _among(self, axis: str) -> str:
        """The ranks along a mesh axis."""
        first, second = (self.mesh.rank_at({**self.coordinates, axis: n}) for n in (0, 1))
        step = second - first
        return str(range(first, first + step * self.mesh.size(axis), step))

    def _peer(self, axis: str, distance: int) -> int:
        there = (self.coordinates[axis] + distance) % self.mesh.size(axis)
        return self.mesh.rank_at({**self.coordinates, axis: there})

    def _joined(self, name: str, place: Place, blocks: int) -> tuple[int, ...]:
        """The shape of this many blocks, joined."""
        return tuple(n * blocks if dim == place.dim else n for dim, n in enumerate(self.shapes[name]))

    def _cut(self, name: str, place: Place, blocks: int) -> tuple[int, ...]:
        """The shape of one of this many blocks."""
        return tuple(n // blocks if dim == place.dim else n for dim, n in enumerate(self.shapes[name]))

    def _is_wide_on_wire(self, output: Operand) -> bool:
        """Return True if partial results of an output travel in at least fp32, in which they are computed."""
        return self.program.itemsize(output, is_partial=True) >= 4


_WRITE: dict[type, Callable[[_Source, Any], None]] = {
    kinds.AllToAll: _Source.all_to_all,
    kinds.Gather: _Source.gather,
    kinds.Slice: _Source.slice,
    kinds.Swap: _Source.swap,
    kinds.Derive: _Source.derive,
    kinds.Send: _Source.send,
    kinds.Arrive: _Source.arrive,
    kinds.Free: _Source.free,
    kinds.Compute: _Source.compute,
    kinds.Summarize: _Source.summarize,
    kinds.PassStates: _Source.pass_states,
    kinds.SendPartial: _Source.send_partial,
    kinds.Combine: _Source.combine,
    kinds.ReduceScatter: _Source.reduce_scatter,
    kinds.AllReduce: _Source.all_reduce,
    kinds.Round: _Source.round,
}


def _register(name: str, key: Key) -> str:
    """The name of a block: that of the operand, and the loop counters unless all are zero."""
    return "_".join([name, *map(str, key)]) if any(key) else name


def _names(operands: Sequence[Operand]) -> str:
    return ", ".join(operand.name for operand in operands)


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' * (len(items) == 1)})"


def _dim(place: Place) -> int | tuple[int, int]:
    return place.dim if place.outer == 1 else (place.dim, place.outer)


def _local(sizes: Sizes, fixed: Mapping[Piece, int]) -> list[tuple[Place, int, int]]:
    """(place, number, of) of the blocks in `fixed` of a tensor's digits, the last dimension and innermost digit first."""
    found = []
    for dim, digits in enumerate(sizes):
        for index, (piece, size) in enumerate(digits):
            if piece in fixed:
                found.append((Place(dim, math.prod(n for _, n in digits[:index])), fixed[piece], size))
    return found[::-1]


def _block(name: str, sizes: Sizes, fixed: Mapping[Piece, int], word: str) -> str:
    """The expression of the block of a tensor with these digits fixed."""
    for place, number, size in _local(sizes, fixed):
        name = f"{word}({name}, {_dim(place)}, number={number}, of={size})"
    return name


def _runs(elements: torch.Tensor) -> str:
    """Elements as a range, or as a list of ranges."""
    ends = [*((elements.diff() != 1).nonzero().flatten() + 1).tolist(), len(elements)]
    runs = [range(int(elements[a]), int(elements[b - 1]) + 1) for a, b in zip([0, *ends], ends, strict=False)]
    return str(runs[0] if len(runs) == 1 else runs)
