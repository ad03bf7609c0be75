"""`Plan.explain`: the messages of a plan in words, for each operand and mesh axis."""

from collections.abc import Sequence

from commir.ir.program import Program
from commir.scheduling.loop_nest import LoopNest

from .accounting import Message
from .plan_steps import (
    AllReduce,
    AllToAll,
    Arrive,
    Combine,
    Derive,
    Free,
    Gather,
    ReduceScatter,
    Round,
    Send,
    SendPartial,
    Slice,
    Step,
    Swap,
)  # fmt: skip
from .timeline import collective_seconds, message_seconds

RULES: dict[type, str] = {
    AllToAll: "all-to-all",
    Gather: "all-gather",
    Swap: "swap",
    Send: "ring, while tiles are computed",
    ReduceScatter: "reduce-scatter",
    AllReduce: "all-reduce",
    SendPartial: "partial results travel, while tiles are computed",
}


def table_of_messages(
    nest: LoopNest, steps: Sequence[Step], sent: Sequence[Sequence[Message]], times: int = 1
) -> list[tuple[str, str, str, int, int, float]]:
    """(operands, mesh axis, rule, messages, bytes that a rank sends, seconds of the messages) in the order of the steps.

    sent: the messages of each step (`Account.by_step`). times: how often the steps are taken, one time after the other.
    """
    mesh, rows = nest.mesh, dict[tuple[str, str, str], list[float]]()
    for step, messages in zip(steps, sent, strict=True):
        for message in messages:
            key = operands_of(nest.program, step), message.axis, RULES[type(step)]
            row = rows.setdefault(key, [0, 0, 0.0])
            latency, busy = message_seconds(mesh, message.axis, message.nbytes)
            row[0] += times * message.count
            row[1] += times * message.count * message.nbytes
            row[2] += times * collective_seconds(latency, busy, message.count, message.at_once)
    return [(*key, int(count), int(nbytes), seconds) for key, (count, nbytes, seconds) in rows.items()]


def lines_of_messages(
    nest: LoopNest, steps: Sequence[Step], sent: Sequence[Sequence[Message]], times: int = 1
) -> list[str]:
    """`table_of_messages` as aligned lines, with seconds only where the speed of the mesh is known."""
    rows = [("operands", "mesh axis", "rule", "messages", "bytes", "seconds")]
    for operands, axis, rule, count, nbytes, seconds in table_of_messages(nest, steps, sent, times):
        time = f"{seconds:.3g}" if nest.mesh.axis(axis).level in nest.mesh.speeds else "-"
        rows.append((operands, axis, rule, str(count), f"{nbytes:,}", time))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def operands_of(program: Program, step: Step) -> str:
    """The names of the operands that a step moves, computes or releases; "" if it names none."""
    if isinstance(step, Derive):
        return step.operand
    if isinstance(step, Send | Arrive | Swap | Free):
        return ", ".join(step.operands)
    if isinstance(step, SendPartial | Combine | ReduceScatter | AllReduce | Round):
        known = step.result in range(len(program.results))
        return ", ".join(program.results[step.result].outputs) if known else f"result {step.result}"
    return ", ".join(move[0] for move in step.moves) if isinstance(step, AllToAll | Gather | Slice) else ""
