"""The known schedules of attention and of matrix products: the loop of each mesh axis, and what travels in a ring."""

from dataclasses import replace
from typing import TypeVar

from commir.ir.checks import check_type, is_among, shown
from commir.ir.program import Program
from commir.programs.attention_programs import ATTENTION_TILES, SAVED
from commir.programs.linear_programs import HOMES, MATMUL

from .loop_nest import Illegal, LoopNest
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
    "tree": (KV,),  # of decoding, whose few queries every rank has
    "Attention2D": (KV, Q),
    "Attention2D, overlapped": (KV_IN_RING, Q_IN_RING),
    "3-D": (KV, Q, HEADS),
    "3-D, overlapped": (KV_IN_RING, Q_IN_RING, HEADS),
}
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
    """{name: the placement of each of its mesh axes} of the known schedules of a program; of your own operators, none."""
    check_type("known_schedules", program, Program)
    if _is_product(program):
        return dict(PRODUCTS[program.name])
    if not _is_attention(program):
        return {}
    return {name: each for name, each in ATTENTION.items() if name != "tree" or program.operand("q").home is None}


def known(nest: Nest, name: str, *mesh_axes: str) -> Nest:
    """`nest`, an untransformed schedule, as the known schedule `name`: `known(Schedule(program, mesh), "USP")`.

    mesh_axes: which axis of the mesh has each of its parts, in the order of `known_schedules`; by default the axes of the
    mesh, outermost first. `Plan.explain` names USP and the 3-D schedules only where heads have the innermost axis.

    Illegal: the program has no such schedule, it has another number of parts than the mesh has axes, the mesh has no such
    axis, one is named twice, or as in `place`.
    """
    check_type("known", nest, LoopNest)
    schedules = known_schedules(nest.program)
    if not is_among(name, schedules):
        others = "; ".join(schedules) or "none"
        raise Illegal(f"known: {nest.program.name} has no known schedule {shown(name)}; it has {others}")
    parts, names = schedules[name], mesh_axes or nest.mesh.names
    if unknown := [each for each in names if not is_among(each, nest.mesh.names)]:
        raise Illegal(f"known: the mesh has no axis {shown(unknown[0])}; it has {', '.join(nest.mesh.names)}")
    if len(set(names)) < len(names):
        raise Illegal(f"known: {', '.join(names)} name a mesh axis twice")
    if len(names) != len(parts):
        loops = "; ".join(map(str, parts))
        has = "1 part" if len(parts) == 1 else f"{len(parts)} parts"
        given = "is 1 mesh axis" if len(names) == 1 else f"are {len(names)} mesh axes"
        raise Illegal(f"known: {name} has {has} ({loops}), and {', '.join(names)} {given}")
    return place(nest, **dict(zip(names, parts, strict=True)))


def known_as(nest: LoopNest) -> str:
    """The name of a known schedule, also of one that divides a part over several mesh axes; empty if it has none.

    Only what `place`, and then `in_chunks`, make has a name (`is_placed`): with blocks of other sizes, or in another order
    of the ranks, a plan may send much more, and so it may with operands that are kept elsewhere than in the library's
    program. On all mesh axes whose ranks divide heads, lse may be along heads instead, where it is computed, and for a
    backward pass all of SAVED, where the forward pass has left them.
    """
    program, placements = nest.program, placements_of(nest)
    if not _is_at_home(nest, placements):
        return ""
    chosen = list(placements.values())
    if _is_product(program):
        name = _name_of_product(program.name, chosen)
    else:
        name = _name_of_attention(nest, chosen) if _is_attention(program) else ""
    if not name or not is_placed(replace(nest, homes=())):
        return ""
    return name + ", in chunks" * (nest.chunked is not None)


def _is_at_home(nest: LoopNest, placements: dict[str, Placement]) -> bool:
    """Whether no operand is moved from the program's homes, or only as `leaving_lse` and `backward_plan` do."""
    moved = {each for each in nest.homes if each[1] in placements}
    left = {(name, m, "heads") for name in SAVED for m, each in placements.items() if each.axis == "heads"}
    lse = {each for each in left if each[0] == "lse"}
    return moved in (set(), lse) or (nest.program.tile == "attention_backward" and moved == left)


def _is_product(program: Program) -> bool:
    """Whether a program is one of PRODUCTS, with operands that are kept as there."""
    is_named = program.name in PRODUCTS and program.tile == MATMUL
    return is_named and {each.name: each.home for each in program.operands} == HOMES[program.name]


def _is_attention(program: Program) -> bool:
    """Whether a program is attention whose operands are kept as in the library's programs.

    Keys and values are kept along the sequence. So are all others, or every rank has all of them, as in decoding.
    """
    of_keys = {each.home for each in program.operands if "kv" in each.axes}
    others = {each.home for each in program.operands if "kv" not in each.axes}
    return program.tile in ATTENTION_TILES and of_keys == {"kv"} and others in ({"q"}, {None})


def _name_of_attention(nest: LoopNest, chosen: list[Placement]) -> str:
    order = [each.axis for each in chosen]
    if "heads" in order and set(order[order.index("heads") :]) != {"heads"}:  # another loop is inside of theirs
        return ""
    axes = tuple(dict.fromkeys(order))
    streamed = {each.is_streamed for each in chosen if each.axis != "heads"}  # of the axes that can travel in rings
    if axes == ("heads",):
        return "Ulysses"
    if len(streamed) != 1:
        return ""
    if axes == ("kv",) and streamed == {False} and not nest.home("q"):
        return "tree"
    if axes == ("q",):
        rings = "ring" if len(chosen) == 1 else "double ring"
        return rings if True in streamed else "all-gather"
    if axes == ("q", "heads") and True in streamed:
        return "USP"
    if set(axes[:2]) == {"q", "kv"} and axes[2:] in ((), ("heads",)):
        return ("3-D" if axes[2:] else "Attention2D") + ", overlapped" * (True in streamed)
    return ""


def _name_of_product(program: str, chosen: list[Placement]) -> str:
    """A product without a ring may be divided over several mesh axes."""
    for name, (part,) in PRODUCTS[program].items():
        if chosen == [part] or (not part.is_streamed and set(chosen) == {part}):
            return name
    return ""
