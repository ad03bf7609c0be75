"""Plans that commir's search chooses against hand-written schedules, behind slow links (about 10 min; root).

The claims: in at least 90 % of the cells the chosen plan is at most 1.10x as slow as the best hand-written schedule, and
predicted and measured times of all schedules in all cells together have a rank correlation of at least 0.9. Within single
cells it is lower, as the table shows; what it says beyond the differences between cells is printed beside it. Forward
passes in bf16, causal. See `benchmarks.support.plans.Comparison`.
"""

from benchmarks.support.cells import cell_arguments
from benchmarks.support.plans import AttentionCell, Comparison, lowered, placed
from benchmarks.support.tables import print_or_publish
from commir import Plan
from commir.scheduling.known_schedules import ATTENTION, known_as

CELLS = [
    AttentionCell(ranks, 1, rate, kv_heads)
    for ranks in (4, 8)
    for rate in ("20mbit", "200mbit")
    for kv_heads in (8, 2, 1)
]
CELLS += [AttentionCell(ranks, 1, "200mbit", kv_heads, seq=4096) for ranks in (4, 8) for kv_heads in (8, 2)]
# {column of the table: known schedule}
KINDS = {name: name for name in ("ring", "all-gather", "Ulysses", "USP")}
KINDS |= {"2-D": "Attention2D", "2-D, overlapped": "Attention2D, overlapped"}


def by_hand(cell: AttentionCell) -> dict[str, Plan]:
    """The known schedules that fit, each with the best split of the ranks in its kind, by bytes."""
    splits = [cell.mesh.split("x", x0=n, x1=cell.ranks // n) for n in range(2, cell.ranks) if cell.ranks % n == 0]
    meshes = {1: [cell.mesh], 2: splits}
    found = {
        shown: [plan for mesh in meshes[len(ATTENTION[name])] for plan in lowered(cell.program, mesh, name)]
        for shown, name in KINDS.items()
    }
    return {name: min(plans, key=lambda plan: plan.bytes_per_rank) for name, plans in found.items() if plans}


COMPARISON = Comparison(
    CELLS,
    by_hand,
    shown=[name for name in KINDS if name != "ring"],
    repeated=20,
    chosen=lambda plan: known_as(plan.schedule) or placed(plan),
    describe=lambda cell: f"{cell.ranks}, {cell.tensors}, {cell.seq:,}",
)

if __name__ == "__main__":
    arguments = cell_arguments()
    if arguments is not None:
        COMPARISON.measure(*arguments)
    else:
        print_or_publish("chosen-plans", COMPARISON.table(__file__, "ranks, links, heads, tokens"))
