"""Plans that commir's search chooses on nodes with fast links, behind slow ones between them (about 12 min; root).

The claim: in at least 90 % of the cells the chosen plan is at most 1.10x as slow as the best hand-written schedule, whose
splits follow the nodes or ignore them. Forward passes in bf16, causal. The ranks of a node share one slow link to the other
nodes. See `benchmarks.support.plans.Comparison`.
"""

from benchmarks.support.cells import cell_arguments
from benchmarks.support.plans import OTHER_WAY, AttentionCell, Comparison, lowered, placed
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
    plans = {name: lowered(cell.program, Mesh(x=cell.ranks), name) for name in FLAT}
    for shown, name in BY_NODE.items():
        plans[shown] = lowered(cell.program, cell.mesh, name, "node", "gpu")
        if name != "double ring":
            plans[shown + OTHER_WAY] = lowered(cell.program, cell.mesh, name, "gpu", "node")
    return {name: plan for name, found in plans.items() for plan in found}


def chosen(plan: Plan) -> str:
    """The placement of a plan, and its name if it is a known schedule."""
    name = known_as(plan.schedule)
    return placed(plan) + f" ({name})" * bool(name)


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
