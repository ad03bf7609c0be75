"""The context ranks of a model: the choice of an attention schedule, and of passing states or exchanging channels."""

import math
import sys

import torch.distributed as dist
from torch.distributed import ProcessGroup

from attention2d import Attention2D, choose
from attention2d.layout.attention_arguments import check_heads
from attention2d.layout.token_order import local_length
from attention2d.schedules.family import named_grids
from commfabric.collectives.counted import Counter
from commfabric.fabric.cost_model import Fabric
from commir import Mesh, Plan, Schedule, best_grid, search, verify
from commir.lowering.scan_messages import takes_slices
from commir.programs import attention, gated_delta, selective_scan
from commir.scheduling.loop_nest import IllegalSchedule
from commir.scheduling.placements import place, placements_of
from commir.searching.grids import VERIFIED, leaving_lse
from megatron_ssm.parallel.blocks import ContextRanks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.spec.stack import Stack

SMALLER_SIZES = range(16, 2, -1)  # sizes of the mesh on which a plan for more than VERIFIED ranks is verified


def schedule_of(
    name: str, group: ProcessGroup, config: Stack, tensor_ranks: int, seq: int, batch: int, training: bool = True,
    fabric: Fabric | None = None,
) -> Attention2D:  # fmt: skip
    """The attention schedule called `name` for the ranks of `group`.

    `auto` is the schedule that sends the fewest bytes for the attention of this model, or the fastest on `fabric`. `search`
    makes the same choice by commir, which derives the messages of every grid from the loops of attention, and verifies the
    plan of the grid that it chooses. For a model without attention, which sends no messages by the schedule, both are the
    ring.

    Args:
        name: ring, all-gather, ulysses, usp (pairs of ranks divide the heads), 2d (the most square grid), 3d (usp on this
            grid), auto, or search.
        group: The context-parallel ranks.
        tensor_ranks: The number of tensor-parallel ranks.
        seq, batch: The number of tokens of a sequence, and of sequences on each rank.
        training: Count the bytes of forward and backward, instead of those of forward only.
        fabric: The measured links of the ranks; None compares bytes.

    Raises:
        ValueError: The schedule does not fit the number of ranks.
    """
    ranks = group.size()
    if name in ("auto", "search") and config.attentions:
        attention = config.attentions[0].on_ranks(tensor_ranks)
        sizes: dict[str, int] = dict(**vars(attention), seq=seq, batch=batch)
        return (choose if name == "auto" else _searched)(group, **sizes, itemsize=4, training=training, fabric=fabric)
    if name in ("usp", "3d") and ranks % 2:
        raise ValueError(
            f"the schedule {name} needs an even number of ranks, not {ranks}: pairs of ranks divide the heads"
        )
    grids = named_grids(ranks)
    grids |= {"auto": grids["ring"], "search": grids["ring"]}
    rows, cols, ulysses, overlap = grids[name]
    return Attention2D(group, rows, cols, ulysses, overlap=overlap)


def _searched(
    group: ProcessGroup, heads: int, kv_heads: int, head_dim: int, seq: int, batch: int, itemsize: int, training: bool,
    fabric: Fabric | None,
) -> Attention2D:  # fmt: skip
    """The schedule of the best grid by commir; its `reason` explains the plan. The arguments are those of `choose`."""
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
    """(the best plan for the first recurrence of a model, True if the ranks of `group` exchange channels in it).

    `commir.search` compares passing states with exchanging channels: the messages of forward in fp32, by bytes or by their
    time on `fabric`. Backward is not counted. It sends about as much as forward in both forms, so the chosen form may send a
    few per cent more than the other near the sequence length at which both are equal. For a gated delta net with K = V, this
    is up to a fifth, because backward sends no matrices if states are passed.

    Channels are exchanged only if their number is a multiple of the ranks. If several groups share B and C (or q and k), the
    number of groups must be a multiple, too.

    The plan is verified; if there are more than VERIFIED ranks, on a smaller mesh. All ranks that pass the same arguments
    get the same plan. The arguments are those of `schedule_of`.
    """
    ranks, sizes = group.size(), config.recurrences[0]
    shape = batch, local_length("zigzag", seq, ranks) * ranks, sizes.heads // tensor_ranks
    groups = max(1, sizes.groups // tensor_ranks)
    if sizes.is_mapped:
        program = gated_delta(*shape, sizes.state, sizes.head_dim, groups)
    else:
        program = selective_scan(*shape, sizes.head_dim, sizes.state, groups=groups)
    for plan in search(program, Mesh(rank=ranks), fabric, top=sys.maxsize):
        axes = {placement.axis for placement in placements_of(plan.schedule).values()}
        if axes <= {"seq"} or axes == {"heads"}:
            verify(plan_to_verify(plan))
            return plan, axes == {"heads"}
    raise AssertionError("the padded sequence divides over the ranks")


def plan_to_verify(plan: Plan) -> Plan:
    """The plan of a scan, or an equivalent one on 3 to 16 ranks if it has more than VERIFIED.

    The smaller plan has the same placements, and its ranks pass states in the same form.
    """
    if plan.mesh.ranks <= VERIFIED:
        return plan
    program, placements = plan.program, placements_of(plan.schedule)
    heads_per_group = math.lcm(*(operand.divisor("heads") for operand in program.operands))
    for ranks in SMALLER_SIZES:
        for groups in (ranks, ranks + 1):  # a multiple of the ranks, and one that is not
            smaller = program.resized(seq=2 * ranks, heads=groups * heads_per_group)
            try:
                smaller_plan = place(Schedule(smaller, Mesh(rank=ranks)), **placements).lower()
            except IllegalSchedule:
                continue
            if takes_slices(smaller_plan.digits) == takes_slices(plan.digits):
                return smaller_plan
    raise AssertionError("one of SMALLER_SIZES admits the placements of every scan")


def check_schedule(
    schedule: Attention2D | None,
    config: Stack,
    group: ProcessGroup | None,
    data_group: ProcessGroup | None = None,
    exchange_channels: bool = False,
) -> None:
    """Raise ValueError if a schedule cannot split the sequences of a model over its ranks.

    The tensor-parallel, data-parallel and context-parallel groups of this rank may have no other rank in common.

    Args:
        group: The tensor-parallel ranks.
        data_group: The data-parallel ranks.
        exchange_channels: True if each context rank computes some channels (or heads) for all tokens.
    """
    if schedule is None:
        if exchange_channels:
            raise ValueError("exchange_channels=True needs context=, a schedule that splits sequences over ranks")
        return
    if not isinstance(schedule, Attention2D):
        raise ValueError(f"context={schedule!r}: expected a schedule of attention2d, such as Attention2D or Ring")
    ContextRanks(schedule.group, Counter(), schedule.order)  # ValueError for an order in which tokens are not blocks
    for other, kind in ((group, "tensor-parallel"), (data_group, "data-parallel")):
        if schedule.group is not None and other is not None:
            others, context = (set(dist.get_process_group_ranks(ranks)) for ranks in (other, schedule.group))
            if others & context != {dist.get_rank()}:
                raise ValueError(
                    f"context ranks {sorted(context)} and {kind} ranks {sorted(others)} must have only this rank in common"
                )
    tensor_ranks = 1 if group is None else group.size()
    for recurrence in config.recurrences if exchange_channels else ():
        local_heads = recurrence.heads // tensor_ranks
        if local_heads < schedule.ranks:
            raise ValueError(
                f"exchange_channels=True: {local_heads} {recurrence.unit} are too few for {schedule.ranks} context ranks"
            )
    for sizes in config.attentions:
        local = sizes.on_ranks(tensor_ranks)
        check_heads(local.heads, local.kv_heads, schedule.grid.ulysses)


def context_ranks(schedule: Attention2D | None, ranks: Ranks, exchange_channels: bool = False) -> ContextRanks | None:
    """The context ranks of a schedule, or None if there is only one. ranks: the tensor-parallel ranks, with the counter."""
    if schedule is None or schedule.ranks == 1:
        return None
    return ContextRanks(schedule.group, ranks.counter, schedule.order, ranks.recomputation, exchange_channels)


def check_length(schedule: Attention2D | None, tokens: int, seq: int | None, padding: int = 0) -> None:
    """Raise ValueError unless `tokens` is the number of tokens of each context rank for a sequence of `seq` tokens.

    seq: None if the sequence has no padding, which is always valid. padding: the largest number of further tokens.
    """
    if seq is None:
        return
    if schedule is None:
        raise ValueError(f"seq={seq} needs context ranks: other sequences have no padding")
    if not 0 <= tokens - (expected := len(schedule.positions(seq))) <= padding:
        raise ValueError(f"seq={seq}: expected {expected} tokens on each context rank, got {tokens}")
