"""What `search_graph` refuses: operators and edges that do not fit together."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from commir.ir.checks import as_name, check_type, shown
from commir.ir.mesh import Mesh
from commir.ir.program import Operand, Program

from .operator_options import GraphNode


def check_graph(operators: Sequence[GraphNode], mesh: Mesh, allowed: Mapping[str, Sequence[tuple[str, ...]]]) -> None:
    """ValueError: two operators have one name, an edge does not fit, or `allowed` is wrong. See `search_graph`."""
    check_type("search_graph", mesh, Mesh)
    if not isinstance(operators, Sequence):
        raise ValueError(f"search_graph takes a list of operators, not {shown(operators)}")
    for each in operators:
        check_type("search_graph", each, GraphNode)
    by_name = {each.name: each for each in operators}
    if len(by_name) < len(operators):
        names = [each.name for each in operators]
        raise ValueError(f"two operators are called {next(name for name in names if names.count(name) > 1)}")
    if not isinstance(allowed, Mapping):
        raise ValueError(f"allowed={shown(allowed)}: it is given as {{operator: [(loop of each mesh axis, ...), ...]}}")
    for name, placements in allowed.items():
        if name not in by_name:
            raise ValueError(f"allowed names {as_name(name)}, which is no operator of the graph")
        if not _are_placements(placements, len(mesh.axes)):
            raise ValueError(f"allowed[{name!r}] is {shown(placements)}; it needs a loop for each axis of {mesh!r}")
    for consumer in operators:
        for operand, (producer, renamed) in consumer.inputs.items():
            taken = consumer.program.operand(operand)
            if producer not in by_name or producer == consumer.name:
                what = "itself" if producer == consumer.name else f"{producer}, which is no operator of the graph"
                raise ValueError(f"{consumer.name} takes {operand} from {what}")
            if wrong := _misfit(by_name[producer].program, consumer.program, taken, renamed):
                raise ValueError(f"{consumer.name} takes {operand} from {producer}: {wrong}")


def _are_placements(found: Any, count: int) -> bool:
    """Whether these are several times the names of `count` loops, and at least once."""
    return (
        isinstance(found, Sequence)
        and len(found) > 0
        and all(
            isinstance(each, tuple) and len(each) == count and all(isinstance(loop, str) for loop in each)
            for each in found
        )
    )


def _misfit(producer: Program, consumer: Program, taken: Operand, renamed: Mapping[str, str]) -> str:
    """The rule that an edge breaks, or nothing. renamed: {axis of what the producer makes: axis of the operand}."""
    made = producer.outputs[0]
    for before, after in renamed.items():
        if before not in made.axes or after not in taken.axes:
            axes = f"{made.name} has {', '.join(made.axes)}, and {taken.name} {', '.join(taken.axes)}"
            return f"{before} as {after}, but {axes}"
        orders = producer.axis(before).order, consumer.axis(after).order
        if orders[0] != orders[1]:
            return f"{before} is in {orders[0]} order, {after} in {orders[1]} order"
    if made.home is not None and made.home not in renamed and taken.home is not None:
        return f"the edge must say which axis of {taken.name} is {made.home}, along which {made.name} is kept"
    if renamed.get(made.home or "") != taken.home:
        return f"{made.name} is kept along {made.home}, {taken.name} along {taken.home}; they must be the same axis"
    sizes = _blocks(made, producer.shape(made), renamed), _blocks(taken, consumer.shape(taken), renamed.values())
    if [(renamed.get(axis, axis), size) for axis, size in sizes[0].items()] != list(sizes[1].items()):
        return f"its axes are {sizes[0]} of {made.name}, and {sizes[1]} of {taken.name}"
    if producer.dtype != consumer.dtype:
        return f"it is {producer.dtype}, and {consumer.name} needs {consumer.dtype}"
    return ""


def _blocks(operand: Operand, shape: Sequence[int], named: Collection[str]) -> dict[str, int]:
    """{axis: its size, with those of the axes behind it that the edge does not name} in the order of the dimensions."""
    sizes: dict[str, int] = {}
    for axis, size in zip(operand.axes, shape, strict=True):
        if axis in named or not sizes:
            sizes[axis] = size
        else:
            sizes[list(sizes)[-1]] *= size
    return sizes
