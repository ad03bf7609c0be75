"""The time of a plan, predicted from its steps, the speeds of its mesh, and the time of a tile.

All ranks take the same steps, so one of them stands for all. A rank has one link for each level of the mesh: messages on it
follow one another, while tiles are computed; beginning a message takes the rank its latency. Steps that wait do so until
their message has arrived. A tile and the messages under way delay each other, if `overlap` is below 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from commfabric.fabric.cost_model import Fabric
from commir.ir.mesh import Mesh

from .accounting import Message
from .plan_steps import Arrive, Combine, Compute, Send, SendPartial, Step, Summarize, message_of

EQUAL_SPEED = 0.0, 1e9  # seconds, bytes per second: of mesh axes whose speed is not known


def message_seconds(mesh: Mesh, axis: str, nbytes: float) -> tuple[float, float]:
    """(latency, time on the link) of a message of `nbytes` along a mesh axis, in seconds."""
    return link_seconds(mesh, mesh.axis(axis).level, mesh.size(axis), nbytes)


def link_seconds(mesh: Mesh, level: str, ranks: int, nbytes: float) -> tuple[float, float]:
    """(latency, time on the link) of a message of `nbytes` between two of `ranks` ranks along a level, in seconds."""
    speed: Any = mesh.speeds.get(level, EQUAL_SPEED)
    if not isinstance(speed, Fabric):
        alpha, rate = speed
        return alpha, nbytes / rate
    operations = {curve.operation for curve in speed.curves}
    operation, ranks = ("p2p", ranks) if "p2p" in operations else ("all_gather", 2)
    latency = speed.time(operation, 0, ranks, extrapolate=True)
    return latency, max(0.0, speed.time(operation, nbytes, ranks, extrapolate=True) - latency)


def collective_seconds(latency: float, busy: float, count: int, at_once: int) -> float:
    """The time of `count` messages, `at_once` of them under way at a time: one has the link while others begin."""
    before = (count - 1) // at_once
    return before * max(latency + busy, at_once * busy) + latency + (count - at_once * before) * busy


def check_tile(point_seconds: float, call_seconds: float, overlap: float) -> None:
    """Raise ValueError for invalid times of a tile or an invalid overlap; `search` describes them."""
    if not (point_seconds >= 0 and call_seconds >= 0 and overlap <= 1):
        raise ValueError(
            f"point_seconds={point_seconds}, call_seconds={call_seconds}, overlap={overlap}: expected times of at least 0 "
            "and an overlap of at most 1"
        )


@dataclass
class _Clock:
    """The time of a rank.

    Attributes:
        now: the time at which the rank goes on.
        free: the time at which the link of each level is free again.
        arrivals: the times at which messages in flight arrive.
    """

    mesh: Mesh
    now: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    arrivals: dict[Any, float] = field(default_factory=dict)

    def send(self, message: Message) -> float:
        """Send the messages of a step from now on; return the time at which the last arrives."""
        level = self.mesh.axis(message.axis).level
        latency, busy = message_seconds(self.mesh, message.axis, message.nbytes)
        needed = collective_seconds(latency, busy, message.count, message.at_once)
        arrival = max(self.now, self.free.get(level, 0.0)) + needed
        self.free[level] = arrival - latency
        return arrival

    def compute(self, tile_seconds: float, overlap: float) -> None:
        """Compute a tile. It and the messages under way take (1 - overlap) x the shorter of both in addition."""
        last = max(self.arrivals.values(), default=self.now)
        delay = (1 - overlap) * max(0.0, min(tile_seconds, last - self.now))
        if delay:
            self.free = {level: time + delay * (time > self.now) for level, time in self.free.items()}
            self.arrivals = {key: time + delay * (time > self.now) for key, time in self.arrivals.items()}
        self.now += tile_seconds + delay


def seconds(
    mesh: Mesh,
    steps: Sequence[Step],
    sent: Sequence[Sequence[Message]],
    tile_seconds: float = 0.0,
    overlap: float = 1.0,
) -> float:
    """The predicted time of a plan.

    sent: the messages of each step (`Account.by_step`). tile_seconds: of one tile; all turns of all ranks have tiles of one
    size. overlap: see `search`.
    """
    clock = _Clock(mesh)
    for step, messages in zip(steps, sent, strict=True):
        if isinstance(step, Compute | Summarize):  # summaries take the recurrence of a tile
            clock.compute(tile_seconds, overlap)
        elif isinstance(step, Arrive | Combine):
            clock.now = max(clock.now, clock.arrivals.pop(message_of(step)))
        for message in messages:
            arrival = clock.send(message)
            if isinstance(step, Send | SendPartial):
                clock.arrivals[message_of(step)] = arrival
                clock.now += message_seconds(mesh, message.axis, 0)[0]
            else:
                clock.now = arrival
    return clock.now
