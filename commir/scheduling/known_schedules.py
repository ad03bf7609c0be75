"""The known schedules of attention and of matrix products: the loop of each mesh axis, and what travels in a ring."""

from dataclasses import replace
from typing import TypeVar

from commir.ir.program import Program
from commir.programs.attention_programs import ATTENTION_TILES, SAVED
from commir.programs.linear_programs import HOMES, MATMUL

from .loop_nest import IllegalSchedule, LoopNest
from .placements import Placement, is_placed, place, placements_of

Nest = TypeVar("Nest", bound=LoopNest)
Placements = tuple[Placement, ...]

# In a ring, keys and values travel where the ranks of an axis have blocks of q, and queries and outputs where they have kv.
Q, KV, HEADS = (Placement(axis) for axis in ("q", "kv", "heads"))
Q_IN_RING, KV_IN_RING = Placement("q", True), Placement("kv", True)

# {schedule of attention: the placements of its mesh axes}
ATTENTION: dict[str, Placements] = {
    "ring": (Q_IN_RING,),
    "double ring": (Q_IN_RING, Q_IN_RING),
    "all-gather": (Q,),
    "Ulysses": (HEADS,),
    "USP": (Q_IN_RING, HEADS),
    "LoongTrain": (Q_IN_RING, Q_IN_RING, HEADS),
    "TokenRing": (KV_IN_RING,),  # queries travel one way around the ring, and partial results back
    "tree": (KV,),
    "Mnemosyne": (KV, HEADS),  # and all operands are kept along heads, too
    "Attention2D": (KV, Q),
    "Attention2D, overlapped": (KV_IN_RING, Q_IN_RING),
    "3-D": (KV, Q, HEADS),
    "3-D, overlapped": (KV_IN_RING, Q_IN_RING, HEADS),
}
DECODING = ("tree", "Mnemosyne")  # only for decoding, where every rank has the few queries
# {matrix product: {schedule: the placement of its mesh axis}}
PRODUCTS: dict[str, dict[str, Placements]] = {
    "all_gather_matmul": {
        "all-gather, then product": (Placement("cols"),),
        "AsyncTP": (Placement("cols", True),),
    },
    "matmul_reduce_scatter": {
        "product, then reduce-scatter": (Placement("inner"),),
        "AsyncTP": (Placement("inner", True),),
    },
}


def known_schedules(program: Program) -> dict[str, Placements]:
    """The known schedules of a program: {name: the placement of each of its mesh axes}. Your own operators have none."""
    if _is_product(program):
        return dict(PRODUCTS[program.name])
    if not _is_attention(program):
        return {}
    is_decoding = program.operand("q").home is None
    return {name: parts for name, parts in ATTENTION.items() if name not in DECODING or is_decoding}


def known(nest: Nest, name: str, *mesh_axes: str) -> Nest:
    """Transform a new schedule into the known schedule `name`: `known(Schedule(program, mesh), "USP")`.

    Args:
        nest: a schedule to which no primitive was applied.
        name: one of `known_schedules`.
        mesh_axes: the mesh axis of each part of the known schedule, in the order of `known_schedules`; by default the axes
            of the mesh, outermost first. `Plan.explain` names USP and the 3-D schedules only if the innermost axis divides
            heads.

    Raises:
        IllegalSchedule: the program has no such schedule, it has another number of parts than there are mesh axes, or as in
            `place`.
    """
    schedules = known_schedules(nest.program)
    if name not in schedules:
        others = ", ".join(schedules) or "none"
        raise IllegalSchedule(f"{nest.program.name} has no known schedule {name!r}: expected {others}")
    parts, names = schedules[name], mesh_axes or nest.mesh.names
    if len(names) != len(parts):
        loops = "; ".join(map(str, parts))
        raise IllegalSchedule(f"{name} needs {len(parts)} mesh axes ({loops}), not {len(names)} ({', '.join(names)})")
    placements = dict(zip(names, parts, strict=True))
    if name == "Mnemosyne":
        for operand, mesh_axis, axis in sorted(_along_heads(placements)):
            nest = nest.shard(operand, axis, mesh_axis)
    return place(nest, **placements)


def known_as(nest: LoopNest) -> str:
    """The name of the known schedule that this is, or "". A part may be divided over several mesh axes.

    Only a schedule that `place`, and then `in_chunks`, makes has a name (`is_placed`): with blocks of other sizes, or in
    another order of the ranks, a plan may send much more. The same holds for operands that are kept elsewhere than in the
    library's program, with two exceptions: where all mesh axes that divide heads keep lse along heads, where it is computed;
    and for a backward pass and Mnemosyne, where they keep all of SAVED so.
    """
    program, placements = nest.program, placements_of(nest)
    chosen = list(placements.values())
    if _is_product(program):  # without a ring, a product may divide several mesh axes
        parts = ((name, part) for name, (part,) in PRODUCTS[program.name].items())
        same = (name for name, part in parts if chosen == [part] or (not part.is_streamed and set(chosen) == {part}))
        name = next(same, "")
    else:
        name = _name_of_attention(nest, chosen) if _is_attention(program) else ""
    if not name or not _is_at_home(nest, name, placements) or not is_placed(replace(nest, homes=())):
        return ""
    return name + ", in chunks" * (nest.chunked is not None)


def _is_at_home(nest: LoopNest, name: str, placements: dict[str, Placement]) -> bool:
    """Return True if operands are at home, or moved only as `known`, `leaving_lse` and `backward_plan` do."""
    moved = {home for home in nest.homes if home[1] in placements}
    all_moved = _along_heads(placements)
    if name == "Mnemosyne":
        return moved == all_moved
    lse = {each for each in all_moved if each[0] == "lse"}
    return moved in (set(), lse) or (nest.program.tile == "attention_backward" and moved == all_moved)


def _along_heads(placements: dict[str, Placement]) -> set[tuple[str, str, str]]:
    """(operand, mesh axis, heads) of all of SAVED, on the mesh axes that divide heads."""
    return {(name, m, "heads") for name in SAVED for m, placement in placements.items() if placement.axis == "heads"}


def _is_product(program: Program) -> bool:
    """Return True for the programs of PRODUCTS, with operands that are kept as there."""
    is_named = program.name in PRODUCTS and program.tile == MATMUL
    return is_named and {operand.name: operand.home for operand in program.operands} == HOMES[program.name]


def _is_attention(program: Program) -> bool:
    """Return True for attention whose operands are kept as in the library's programs.

    Keys and values are kept along the sequence. All others are, too, or every rank has all of them, as in decoding.
    """
    of_keys = {operand.home for operand in program.operands if "kv" in operand.axes}
    others = {operand.home for operand in program.operands if "kv" not in operand.axes}
    return program.tile in ATTENTION_TILES and of_keys == {"kv"} and others in ({"q"}, {None})


def _name_of_attention(nest: LoopNest, chosen: list[Placement]) -> str:
    order = [placement.axis for placement in chosen]
    if "heads" in order and set(order[order.index("heads") :]) != {"heads"}:  # another loop is inside
        return ""
    axes = tuple(dict.fromkeys(order))
    streamed = {placement.is_streamed for placement in chosen if placement.axis != "heads"}  # heads never travel
    if axes == ("heads",):
        return "Ulysses"
    if len(streamed) != 1:
        return ""
    if axes == ("kv",) and streamed == {True} and len(chosen) == 1:
        return "TokenRing"
    if axes[0] == "kv" and axes[1:] in ((), ("heads",)) and nest.program.operand("q").home is None:
        return "" if True in streamed else DECODING[len(axes) - 1]
    if axes == ("q",):
        rings = "ring" if len(chosen) == 1 else "double ring"
        return rings if True in streamed else "all-gather"
    if axes == ("q", "heads") and True in streamed:
        return "USP" if order.count("q") == 1 else "LoongTrain"
    if set(axes[:2]) == {"q", "kv"} and axes[2:] in ((), ("heads",)):
        return ("3-D" if axes[2:] else "Attention2D") + ", overlapped" * (True in streamed)
    return ""
