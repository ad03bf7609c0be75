"""Plans that commir's search chooses against hand-written schedules, behind slow links (about 10 min; root).

The claims: in at least 90 % of the cells the chosen plan is at most 1.10x as slow as the best hand-written schedule, of all
splits of the ranks, and predicted and measured times of all schedules in all cells together have a rank correlation of at
least 0.9. Within single cells it is lower, as the table shows; what it says beyond the differences between cells is printed
beside it. Forward passes in bf16, causal. See `benchmarks.support.plans.Comparison`.
"""

from benchmarks.support.cells import cell_arguments
from benchmarks.support.plans import AttentionCell, Comparison, in_all_ways, placed
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
    """The known schedules that fit; those of two mesh axes with every split of the ranks."""
    counts = [count for count in range(2, cell.ranks) if cell.ranks % count == 0]
    splits = {f"{n} x {cell.ranks // n}": (cell.mesh.split("x", x0=n, x1=cell.ranks // n), ()) for n in counts}
    plans: dict[str, Plan] = {}
    for kind, name in KINDS.items():
        plans |= in_all_ways(cell.program, kind, name, splits if len(ATTENTION[name]) == 2 else {"": (cell.mesh, ())})
    return plans


COMPARISON = Comparison(
    CELLS,
    by_hand,
    shown=[name for name in KINDS if name != "ring"],
    repeated=15,
    chosen=lambda plan: known_as(plan.schedule) or placed(plan),
    describe=lambda cell: f"{cell.ranks}, {cell.tensors}, {cell.seq:,}",
)

if __name__ == "__main__":
    arguments = cell_arguments()
    if arguments is not None:
        COMPARISON.measure(*arguments)
    else:
        print_or_publish("chosen-plans", COMPARISON.table(__file__, "ranks, links, heads, tokens"))
