"""Plans that commir's search chooses on nodes with fast links, behind slow ones between them (about 12 min; root).

The claim: in at least 90 % of the cells the chosen plan is at most 1.10x as slow as the best hand-written schedule, whose
splits follow the nodes or ignore them. Forward passes in bf16, causal. The ranks of a node share one slow link to the other
nodes. See `benchmarks.support.plans.Comparison`.
"""

from collections.abc import Sequence

from benchmarks.support.cells import cell_arguments
from benchmarks.support.plans import AttentionCell, Comparison, in_all_ways, placed
from benchmarks.support.tables import print_or_publish
from commir import Mesh, Plan
from commir.scheduling.known_schedules import known_as

SHAPES = [(2, 2), (2, 4), (4, 2)]
CELLS = [AttentionCell(*shape, rate, kv) for shape in SHAPES for rate in ("50mbit", "500mbit") for kv in (8, 2, 1)]
CELLS += [AttentionCell(*shape, "200mbit", 2, seq=4096) for shape in SHAPES]

# Known schedules that ignore the nodes, on one axis of all ranks, and {column of the table: one that follows them}.
FLAT = "ring", "all-gather", "Ulysses"
BY_NODE = {
    "double ring": "double ring",
    "USP": "USP",
    "2-D": "Attention2D",
    "2-D, overlapped": "Attention2D, overlapped",
}


def by_hand(cell: AttentionCell) -> dict[str, Plan]:
    """The known schedules that fit; where there are two ways to use the nodes, both."""
    by_node: dict[str, tuple[Mesh, Sequence[str]]] = {"": (cell.mesh, ("node", "gpu"))}
    both = by_node | {"the other way": (cell.mesh, ("gpu", "node"))}
    plans: dict[str, Plan] = {}
    for name in FLAT:
        plans |= in_all_ways(cell.program, name, name, {"": (Mesh(x=cell.ranks), ())})
    for kind, name in BY_NODE.items():
        plans |= in_all_ways(cell.program, kind, name, by_node if name == "double ring" else both)
    return plans


def chosen(plan: Plan) -> str:
    """The name of a plan that is a known schedule, and the placement of another one."""
    return known_as(plan.schedule) or placed(plan)


COMPARISON = Comparison(
    CELLS,
    by_hand,
    shown=["all-gather", "Ulysses", *BY_NODE],
    repeated=15,
    chosen=chosen,
    describe=lambda cell: f"{cell.nodes} x {cell.per_node}, {cell.tensors}, {cell.seq:,}",
)

if __name__ == "__main__":
    arguments = cell_arguments()
    if arguments is not None:
        COMPARISON.measure(*arguments)
    else:
        print_or_publish("two-levels", COMPARISON.table(__file__, "nodes x ranks, links, heads, tokens"))
