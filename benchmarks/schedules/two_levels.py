"""Plans that commir's search chooses on nodes with fast links, behind slow ones between them (about 12 min; root).

The claim: in at least 90 % of the cells the chosen plan is at most 1.10x as slow as the best hand-written schedule, whose
splits follow the nodes or ignore them. Forward passes in bf16, causal. The ranks of a node share one slow link to the other
nodes. See `benchmarks.support.plans.Comparison`.
"""

from benchmarks.support.cells import cell_arguments
from benchmarks.support.plans import OTHER_WAY, STREAMED_KV, STREAMED_Q, AttentionCell, Comparison, lowered, placed
from benchmarks.support.tables import print_or_publish
from commir import Mesh, Plan
from commir.scheduling.placements import known_as

SHAPES = [(2, 2), (2, 4), (4, 2)]
CELLS = [AttentionCell(*shape, rate, kv) for shape in SHAPES for rate in ("50mbit", "500mbit") for kv in (8, 2, 1)]
CELLS += [AttentionCell(*shape, "200mbit", 2, seq=4096) for shape in SHAPES]

# Schedules that ignore the nodes, on one axis of all ranks, and those that follow them: (placement of nodes, within a node).
FLAT = {"ring": STREAMED_KV, "all-gather": "q", "Ulysses": "heads"}
BY_NODE = {
    "double ring": [(STREAMED_KV, STREAMED_KV)],
    "USP": [(STREAMED_KV, "heads"), ("heads", STREAMED_KV)],
    "2-D": [("kv", "q"), ("q", "kv")],
    "2-D, overlapped": [(STREAMED_Q, STREAMED_KV), (STREAMED_KV, STREAMED_Q)],
}


def by_hand(cell: AttentionCell) -> dict[str, Plan]:
    """The known schedules that fit; where there are two ways to use the nodes, both."""
    plans = {name: lowered(cell.program, Mesh(x=cell.ranks), {"x": each}) for name, each in FLAT.items()}
    for name, ways in BY_NODE.items():
        for number, (node, gpu) in enumerate(ways):
            plans[name + OTHER_WAY * number] = lowered(cell.program, cell.mesh, {"node": node, "gpu": gpu})
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
