"""`interpret`: run a plan on a whole mesh that is simulated in one process."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from commir.lowering.plan import Plan, check_plan
from commir.lowering.plan_text import one_line

from .rank_steps import take_steps
from .state import Count, Kernels, Messages, RankState, without_autocast

Tensor = torch.Tensor


class Stuck(RuntimeError):
    """Messages do not match: no rank sends an awaited one, its shape differs, or a block changes while it is sent."""


class StepFailed(RuntimeError):
    """A rank cannot take a step, for instance because it lacks a block. `place` is the rank and step."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:  # so that it can be sent to another process
        return type(self), (str(self), self.place)


def interpret(plan: Plan, inputs: Mapping[str, Tensor], counts: list[Count] | None = None) -> dict[str, Tensor]:
    """Simulate all ranks of a plan in one process: whole inputs -> {output: whole tensor}, without gradient.

    Args:
        plan: the plan.
        inputs: {input: whole tensor}.
        counts: an empty list, to which what each rank has sent and held is appended.

    Raises:
        ValueError: as in `Plan.check`.
        Stuck: the messages do not match; those of a lowered plan always do.
        StepFailed: a rank cannot take a step; those of a lowered plan can always be taken.
    """
    check_plan(plan)
    plan.check(inputs)
    with torch.no_grad():
        return plan.unshard(run_ranks(plan, plan.shard_all(inputs), counts))


def run_ranks(
    plan: Plan, blocks: list[dict[str, Tensor]], counts: list[Count] | None = None, kernels: Kernels | None = None
) -> list[dict[str, Tensor]]:
    """The outputs of every rank, from its inputs at home. Ranks take turns; each runs until it waits for a message."""
    states = [RankState(plan, rank, each, kernels=kernels) for rank, each in enumerate(blocks)]
    post, runs = _Post(), [take_steps(state) for state in states]
    waiting: dict[int, Any] = dict.fromkeys(range(len(runs)))  # {rank: the handle that it waits for, or None}
    results: dict[int, dict[str, Tensor]] = {}
    with without_autocast(blocks[0]):
        while waiting:
            ready = [rank for rank, handle in waiting.items() if handle is None or post.deliver(rank, handle)]
            if not ready:
                first = states[min(waiting)].place
                raise Stuck(f"ranks {sorted(waiting)} wait for messages that no rank sends, the first at {first}")
            for rank in ready:
                try:
                    waiting[rank] = _run_until_waiting(runs[rank], rank, post)
                except StopIteration as end:
                    results[rank] = end.value
                    states[rank].count.held = states[rank].held_before
                    del waiting[rank]
                except (Stuck, MemoryError, torch.OutOfMemoryError):
                    raise
                except Exception as error:
                    place = states[rank].place
                    raise StepFailed(f"{place}: {one_line(error)}", place) from error
    post.refuse_undelivered()
    if counts is not None:
        counts += [state.count for state in states]
    return [results[rank] for rank in range(len(runs))]


def _run_until_waiting(run: Any, rank: int, post: "_Post") -> Any:
    """Continue a rank until it waits for a handle, and return that. Raises StopIteration when the rank has finished."""
    answer = None
    while True:
        request = run.send(answer)
        if not isinstance(request, Messages):
            return request
        answer = post.start(rank, request)


@dataclass(frozen=True)
class _Handle:
    """Messages that a rank has begun. receives: (from, tensor). sends: (to, tensor, its value and version then)."""

    receives: list[tuple[int, Tensor]]
    sends: list[tuple[int, Tensor, Tensor, int | None]]


def _version(x: Tensor) -> int | None:
    """The number of writes to a tensor's memory, through any of its views; None in inference mode, which does not count."""
    return None if x.is_inference() else x._version


class _Post:
    """Messages under way: a queue for each pair of ranks, as on a network that keeps their order."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], deque[Tensor]] = {}
        self._expected: dict[tuple[int, int], deque[Tensor]] = {}

    def start(self, rank: int, messages: Messages) -> "_Handle":
        """Send messages, and return a handle for them and for those to receive."""
        handle = _Handle([(source, x) for x, source in messages.receives], [])
        for x, to in messages.sends:
            message = x.clone()
            handle.sends.append((to, x, message, _version(x)))
            self._queues.setdefault((rank, to), deque()).append(message)
            self._match(rank, to)
        for x, source in messages.receives:
            self._expected.setdefault((source, rank), deque()).append(x)
            self._match(source, rank)
        return handle

    def deliver(self, rank: int, handle: "_Handle") -> bool:
        """Return True if all messages of a handle have arrived. Raises Stuck if a block was changed while it was sent."""
        if any(x is each for source, x in handle.receives for each in self._expected[source, rank]):
            return False
        for to, x, message, version in handle.sends:
            if (version is None or x._version != version) and not torch.equal(x.nan_to_num(), message.nan_to_num()):
                raise Stuck(
                    f"rank {rank} changes a block of shape {tuple(x.shape)} while it is on its way to rank {to}"
                )
        return True

    def refuse_undelivered(self) -> None:
        """Raise Stuck if a message was sent that no rank has received, or the reverse."""
        if left := [pair for pair, queue in (*self._queues.items(), *self._expected.items()) if queue]:
            raise Stuck(f"messages between the ranks {left[:3]} are sent or awaited, but not both")

    def _match(self, sender: int, receiver: int) -> None:
        """Copy messages that are both sent and awaited to their destination."""
        queue, expected = self._queues.get((sender, receiver), ()), self._expected.get((sender, receiver), ())
        while queue and expected:
            x, message = expected.popleft(), queue.popleft()
            if x.shape != message.shape or x.dtype != message.dtype:
                raise Stuck(f"rank {sender} sends {tuple(message.shape)} where rank {receiver} awaits {tuple(x.shape)}")
            x.copy_(message)
