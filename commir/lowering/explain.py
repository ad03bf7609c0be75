"""`Plan.explain`: the messages of a plan in words, for each operand and mesh axis."""

from collections.abc import Sequence

from commir.scheduling.loop_nest import LoopNest

from . import plan_steps as kinds
from .accounting import Message
from .plan_steps import Step
from .timeline import collective_seconds, message_seconds

RULES: dict[type, str] = {
    kinds.AllToAll: "all-to-all",
    kinds.Gather: "all-gather",
    kinds.Swap: "swap",
    kinds.Send: "ring, while tiles are computed",
    kinds.ReduceScatter: "reduce-scatter",
    kinds.AllReduce: "all-reduce",
    kinds.SendPartial: "partial results travel, while tiles are computed",
}


def lines_of_messages(
    nest: LoopNest, steps: Sequence[Step], sent: Sequence[Sequence[Message]], times: int = 1
) -> list[str]:
    """Aligned lines of operands, mesh axis, rule, messages, bytes that a rank sends, and seconds if the speed is known.

    sent: the messages of each step (`Account.by_step`). times: how often the steps are taken, one time after the other.
    """
    totals = dict[tuple[str, str, str], tuple[int, int, float]]()
    for step, messages in zip(steps, sent, strict=True):
        for message in messages:
            key = _operands_of(nest, step), message.axis, RULES[type(step)]
            count, nbytes, seconds = totals.get(key, (0, 0, 0.0))
            latency, busy = message_seconds(nest.mesh, message.axis, message.nbytes)
            seconds += times * collective_seconds(latency, busy, message.count, message.at_once)
            more = times * message.count
            totals[key] = count + more, nbytes + more * message.nbytes, seconds
    rows = [("operands", "mesh axis", "rule", "messages", "bytes", "seconds")]
    for (operands, axis, rule), (count, nbytes, seconds) in totals.items():
        time = f"{seconds:.3g}" if nest.mesh.axis(axis).level in nest.mesh.speeds else "-"
        rows.append((operands, axis, rule, str(count), f"{nbytes:,}", time))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _operands_of(nest: LoopNest, step: Step) -> str:
    """The names of the operands that a step sends."""
    if isinstance(step, kinds.Send | kinds.Swap):
        return ", ".join(step.operands)
    if isinstance(step, kinds.SendPartial | kinds.AllReduce):
        return ", ".join(nest.program.results[step.result].outputs)
    assert isinstance(step, kinds.AllToAll | kinds.Gather | kinds.ReduceScatter)
    return ", ".join(name for name, *_ in step.moves)
