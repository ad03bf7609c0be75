"""The context ranks of a model: which attention schedules and plans of scans fit it."""

import math
import sys

import torch.distributed as dist
from torch.distributed import ProcessGroup

from attention2d import Attention2D, choose
from attention2d.layout.checks import check_heads
from attention2d.layout.token_order import local_length
from attention2d.schedules.family import named_grids
from commir import Mesh, Plan, Schedule, best_grid, search, verify
from commir.lowering.scans import takes_slices
from commir.programs import attention, gated_delta, selective_scan
from commir.scheduling.loop_nest import Illegal
from commir.scheduling.placements import place, placements_of
from commir.searching.grids import VERIFIED, leaving_lse
from megatron_ssm.context.blocks import ContextRanks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.stack.stack import Stack
from sparsefusion.collectives.counted import Counter
from sparsefusion.fabric.cost_model import Fabric

ALL = sys.maxsize  # plans of a search
FEWER = range(16, 2, -1)  # ranks on which the same placement of a scan is verified instead of more than VERIFIED


def schedule_of(
    name: str, group: ProcessGroup, config: Stack, tensor_ranks: int, seq: int, batch: int, training: bool = True,
    fabric: Fabric | None = None,
) -> Attention2D:  # fmt: skip
    """The attention schedule called `name` for the ranks of `group`.

    name: ring, all-gather, ulysses, usp (two ranks of each cell divide the heads), 2d (the most square grid), 3d (usp on
    such a grid), or auto: the one that sends the fewest bytes for this model's attention, split over `tensor_ranks`, and for
    `batch` sequences of `seq` tokens; training: forward and backward. search: the same by commir, which derives the messages
    of every grid from the loops of attention, and verifies the one that it takes. A model without attention sends nothing by
    it, and auto and search are then the ring. fabric: both then take the fastest by its measured links instead. ValueError
    if the schedule does not fit the number of ranks.
    """
    ranks = group.size()
    if name in ("auto", "search") and config.attentions:
        attention = config.attentions[0].on_ranks(tensor_ranks)
        sizes: dict[str, int] = dict(**vars(attention), seq=seq, batch=batch)
        return (choose if name == "auto" else _searched)(group, **sizes, itemsize=4, training=training, fabric=fabric)
    if name in ("usp", "3d") and ranks % 2:
        raise ValueError(
            f"the schedule {name} needs an even number of ranks, not {ranks}: pairs of them divide the heads"
        )
    grids = named_grids(ranks)
    grids |= {"auto": grids["ring"], "search": grids["ring"]}
    if name not in grids:
        raise ValueError(f"the schedule {name!r} is none of auto, search, ring, all-gather, ulysses, usp, 2d, 3d")
    rows, cols, ulysses, overlap = grids[name]
    return Attention2D(group, rows, cols, ulysses, overlap=overlap)


def _searched(
    group: ProcessGroup, heads: int, kv_heads: int, head_dim: int, seq: int, batch: int, itemsize: int, training: bool,
    fabric: Fabric | None,
) -> Attention2D:  # fmt: skip
    """The schedule of the best grid that commir finds; its `reason` explains the plan. Arguments: as for `choose`."""
    ranks = group.size()
    padded = local_length("zigzag", seq, ranks) * ranks
    program = attention(batch, heads, kv_heads, padded, head_dim, dtype={2: "bfloat16", 4: "float32"}[itemsize])
    mesh = Mesh(rank=ranks, speeds=None if fabric is None else {"rank": fabric})
    plan, (rows, cols, ulysses, overlap) = best_grid(program, mesh, training)
    schedule = Attention2D(group, rows, cols, ulysses, overlap=overlap)
    schedule.reason = leaving_lse(plan).explain()
    return schedule


def scan_plan(
    group: ProcessGroup, config: Stack, tensor_ranks: int, seq: int, batch: int, fabric: Fabric | None = None
) -> tuple[Plan, bool]:
    """(the best plan for the first recurrence of a model, verified; whether the ranks of `group` exchange channels in it).

    `commir.search` compares passing states with exchanging channels in forward, in fp32, by bytes or by the time on
    `fabric`. Backward sends about as much as forward in both forms, and the model's own step sizes travel a little
    differently, so near the number of tokens at which both send the same, the form that is taken may send a few per cent
    more. (Of a gated delta net with K = V up to a fifth: where states pass, backward sends no matrices.) Channels are
    exchanged only if they divide over the ranks; so must the groups that share B and C, or q and k, if there are several.
    All ranks that call it with the same arguments get the same plan. On more than VERIFIED ranks, whose verification would
    take long, the same messages are verified on fewer. Other arguments: as for `schedule_of`.
    """
    ranks, sizes = group.size(), config.recurrences[0]
    shape = batch, local_length("zigzag", seq, ranks) * ranks, sizes.heads // tensor_ranks
    groups = max(1, sizes.groups // tensor_ranks)
    if sizes.is_mapped:
        program = gated_delta(*shape, sizes.state, sizes.head_dim, groups)
    else:
        program = selective_scan(*shape, sizes.head_dim, sizes.state, groups=groups)
    for plan in search(program, Mesh(rank=ranks), fabric, top=ALL):
        loops = {each.axis for each in placements_of(plan.schedule).values()}
        if loops <= {"seq"} or loops == {"heads"}:
            verify(plan_to_verify(plan))
            return plan, loops == {"heads"}
    raise AssertionError("the padded sequence divides over the ranks")


def plan_to_verify(plan: Plan) -> Plan:
    """The plan of a scan or, on more than VERIFIED ranks, its placement on 3 to 16, which pass states in the same form."""
    if plan.mesh.ranks <= VERIFIED:
        return plan
    program, placements = plan.program, placements_of(plan.schedule)
    unit = math.lcm(*(each.divisor("heads") for each in program.operands))  # heads of a group
    for ranks in FEWER:
        for groups in (ranks, ranks + 1):  # of heads: they divide over the ranks, or may not
            smaller = program.resized(seq=2 * ranks, heads=groups * unit)
            try:
                fewer = place(Schedule(smaller, Mesh(rank=ranks)), **placements).lower()
            except Illegal:
                continue
            if takes_slices(fewer.digits) == takes_slices(plan.digits):
                return fewer
    raise AssertionError("some of these numbers of ranks do not divide the heads of a group")


def check_schedule(
    schedule: Attention2D | None,
    config: Stack,
    group: ProcessGroup | None,
    data_group: ProcessGroup | None = None,
    exchange_channels: bool = False,
) -> None:
    """ValueError if `schedule` cannot spread the sequences of this model over ranks, or there are too few channels for it.

    group: the tensor-parallel ranks. data_group: the ranks with other sequences. No rank but this one may be in two of these
    and the context ranks. exchange_channels: whether each context rank computes some channels, or heads of the Mamba-2 kind.
    """
    if schedule is None:
        if exchange_channels:
            raise ValueError("exchange_channels=True: without context=, no ranks share a sequence")
        return
    if not isinstance(schedule, Attention2D):
        raise ValueError(f"context={schedule!r} is not a schedule that attention2d's Attention2D, Ring, ... return")
    ContextRanks(schedule.group, Counter(), schedule.order)  # ValueError for an order in which tokens are not blocks
    for other, kind in ((group, "tensor-parallel"), (data_group, "data-parallel")):
        if schedule.group is not None and other is not None:
            others, context = (set(dist.get_process_group_ranks(each)) for each in (other, schedule.group))
            if others & context != {dist.get_rank()}:
                raise ValueError(
                    f"context ranks {sorted(context)} and {kind} ranks {sorted(others)} must share this rank only"
                )
    ranks = 1 if group is None else group.size()
    for each in config.recurrences if exchange_channels else ():
        if each.heads // ranks < schedule.ranks:
            raise ValueError(
                f"exchange_channels=True: {each.heads // ranks} {each.unit} are too few for {schedule.ranks} context ranks"
            )
    for sizes in config.attentions:
        local = sizes.on_ranks(ranks)
        check_heads(local.heads, local.kv_heads, schedule.grid.ulysses)


def context_ranks(schedule: Attention2D | None, ranks: Ranks, exchange_channels: bool = False) -> ContextRanks | None:
    """The ranks of a schedule, or None if there is only one. ranks: the tensor-parallel ranks, whose counter they use."""
    if schedule is None or schedule.ranks == 1:
        return None
    return ContextRanks(schedule.group, ranks.counter, schedule.order, ranks.recomputation, exchange_channels)


def check_length(schedule: Attention2D | None, tokens: int, seq: int | None, padding: int = 0) -> None:
    """ValueError unless context ranks that share a sequence of `seq` tokens hold `tokens` each (None: without padding).

    padding: how many more they may hold.
    """
    if seq is None:
        return
    if schedule is None:
        raise ValueError(f"seq={seq}: only sequences that context ranks share are padded")
    if not 0 <= tokens - (needed := len(schedule.positions(seq))) <= padding:
        raise ValueError(f"seq={seq} makes {needed} local tokens, not {tokens}")
