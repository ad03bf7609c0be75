"""The time of a plan, predicted from its steps, the speeds of its mesh, and the time of a tile.

All ranks take the same steps, so one of them stands for all. A rank has one link for each level of the mesh: messages on it
follow one another, while tiles are computed; beginning a message takes the rank its latency. Steps that wait do so until
their message has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from commir.ir.mesh import Mesh

from .accounting import Message
from .steps import Arrive, Combine, Compute, Send, SendPartial, Step

EQUAL_SPEED = 0.0, 1e9  # seconds, bytes per second: of mesh axes whose speed is not known


def message_seconds(mesh: Mesh, axis: str, nbytes: float) -> tuple[float, float]:
    """(latency, time on the link) of a message of `nbytes` along a mesh axis, in seconds."""
    return link_seconds(mesh, mesh.axis(axis).level, mesh.size(axis), nbytes)


def link_seconds(mesh: Mesh, level: str, ranks: int, nbytes: float) -> tuple[float, float]:
    """(latency, time on the link) of a message of `nbytes` between two of `ranks` ranks along a level, in seconds."""
    speed: Any = mesh.speeds.get(level, EQUAL_SPEED)
    if not hasattr(speed, "time"):
        alpha, rate = speed
        return alpha, nbytes / rate
    operations = {curve.operation for curve in speed.curves}
    operation, ranks = ("p2p", ranks) if "p2p" in operations else ("all_gather", 2)
    latency = speed.time(operation, 0, ranks, extrapolate=True)
    return latency, max(0.0, speed.time(operation, nbytes, ranks, extrapolate=True) - latency)


@dataclass
class _Clock:
    """now: when the rank goes on. free: when each level's link is free again. arrivals: when messages in flight arrive."""

    mesh: Mesh
    now: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    arrivals: dict[Any, float] = field(default_factory=dict)

    def send(self, message: Message) -> float:
        """Send messages one after the other, from now on; returns when the last has arrived."""
        level = self.mesh.axis(message.axis).level
        latency, busy = message_seconds(self.mesh, message.axis, message.nbytes)
        start = max(self.now, self.free.get(level, 0.0))
        if message.count > 1:  # each waits for the one before
            start += (message.count - 1) * (latency + busy)
        self.free[level] = start + busy
        return start + latency + busy


def seconds(mesh: Mesh, steps: Sequence[Step], sent: Sequence[Sequence[Message]], tile_seconds: float = 0.0) -> float:
    """The predicted time of a plan.

    sent: the messages of each step (`Account.by_step`). tile_seconds: of one tile, which has the same size in every turn.
    """
    clock = _Clock(mesh)
    for step, messages in zip(steps, sent, strict=True):
        if isinstance(step, Compute):
            clock.now += tile_seconds
        elif isinstance(step, Arrive):
            clock.now = max(clock.now, clock.arrivals.pop((step.operands, step.key)))
        elif isinstance(step, Combine):
            clock.now = max(clock.now, clock.arrivals.pop((step.result, step.source, step.target)))
        for message in messages:
            arrival = clock.send(message)
            if not isinstance(step, Send | SendPartial):
                clock.now = arrival
                continue
            awaited = (
                (step.operands, step.target) if isinstance(step, Send) else (step.result, step.source, step.target)
            )
            clock.arrivals[awaited] = arrival
            clock.now += message_seconds(mesh, message.axis, 0)[0]
    return clock.now
