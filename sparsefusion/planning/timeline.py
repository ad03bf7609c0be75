"""When the gradients of a step are ready, what it costs to select and send them, and the predicted time of the step.

Times of a step count from the end of the previous one, so they include the optimizer and the forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

LARGEST_CORRECTION = 3.0  # of the costs of messages; its inverse is the smallest
BISECTIONS = 12  # of the interval of the correction


@dataclass(frozen=True)
class Tensor:
    """The gradient of a parameter. dims: the number of its dimensions. ready: when it is complete, in seconds.

    copied: several ranks of a divided model hold a copy of the parameter, and the copies must stay equal.
    """

    name: str
    numel: int
    dims: int
    ready: float
    copied: bool = False


@dataclass(frozen=True)
class Timeline:
    """A profiled dense step.

    tensors: in the order in which they are ready. atoms: the names of the gradients that the framework hands over
    together, in its order. itemsize: bytes of an element. sent_itemsize: the same in the framework's own messages.
    step: measured seconds of the step. waits_for_atoms: the framework waits for the means of each atom before it
    continues.
    """

    tensors: tuple[Tensor, ...]
    atoms: tuple[tuple[str, ...], ...]
    itemsize: int
    sent_itemsize: int
    step: float
    waits_for_atoms: bool = False

    @property
    def numel(self) -> int:
        """The number of elements of all gradients."""
        return sum(tensor.numel for tensor in self.tensors)

    def by_name(self) -> dict[str, Tensor]:
        """{name: tensor} of all gradients."""
        return {tensor.name: tensor for tensor in self.tensors}


class MessageTimes(Protocol):
    """The part of a `Fabric` that `Costs` uses."""

    def time(self, operation: str, nbytes: int, ranks: int) -> float:
        """Seconds of a collective."""


@dataclass(frozen=True)
class Costs:
    """The costs of the parts of a step, in seconds, on `ranks` ranks.

    fabric: the times of messages alone. factor: how many times as long they take beside everything else. select(numel):
    the selection from so many elements. add(k): adding so many received values. copy(nbytes): copying. dense_operation:
    the collective with which the framework sends gradients. per_message: what every sparse message costs the computing
    thread, beside its selection and its transfer.
    """

    fabric: MessageTimes
    ranks: int
    select: Callable[[int], float]
    add: Callable[[int], float]
    copy: Callable[[float], float]
    factor: float = 1.0
    dense_operation: str = "all_reduce"
    per_message: float = 0.0

    def all_reduce(self, nbytes: int) -> float:
        """Seconds of an all-reduce of so many bytes."""
        return self.message("all_reduce", nbytes)

    def message(self, operation: str, nbytes: int) -> float:
        """Seconds of a collective; nbytes as in `Fabric.time`. 0 bytes take no time."""
        return self.factor * self.fabric.time(operation, nbytes, self.ranks) if nbytes else 0.0

    def calibrated(self, loads: Sequence["Load"], timeline: Timeline) -> "Costs":
        """The costs with the factor for which the predicted time of the profiled step is the measured one, by bisection.

        loads: of the framework's own messages, with these costs. The factor is at most LARGEST_CORRECTION and at least
        its inverse. Where computation is nearly all of the step, the costs are returned unchanged.
        """
        if timeline.step - timeline.tensors[-1].ready < 0.1 * timeline.step:
            return self
        low, high = 1 / LARGEST_CORRECTION, LARGEST_CORRECTION
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            slower = [load._replace(reduce=middle * load.reduce) for load in loads]
            if step_seconds(slower, False, timeline.waits_for_atoms) < timeline.step:
                low = middle
            else:
                high = middle
        return replace(self, factor=(low + high) / 2 * self.factor)


class Load(NamedTuple):
    """The work for one buffer. ready: when its gradients are complete. All others are seconds.

    select: the selection. reduce, gather: its dense and its sparse message. write: writing the means into the
    gradients. early: when the gradients are ready that are sent early. early_reduce: their message.
    """

    ready: float
    select: float
    reduce: float
    gather: float
    write: float
    early: float = 0.0
    early_reduce: float = 0.0


def step_seconds(loads: Sequence[Load], interleaved: bool, waits_for_atoms: bool = False) -> float:
    """The time of a step with these buffers, in order: one thread computes, selects and writes, and one link sends.

    interleaved: the dense message of a buffer is sent before its selection. waits_for_atoms: the thread continues when
    the means of a buffer are written.
    """
    delay, link, arrived = 0.0, 0.0, []
    for backward, select, reduce, gather, write, early, early_reduce in loads:  # faster than access by name
        ready = backward + delay
        if early_reduce:
            link = max(link, early + delay) + early_reduce
        selected = ready + select
        leaves = ready if interleaved else selected
        link = (link if link > leaves else leaves) + reduce  # faster than max, and planning is mostly this
        link = (link if link > selected else selected) + gather
        delay += select
        if waits_for_atoms:
            delay = link + write - backward
        else:
            arrived.append((link, write))
    done = loads[-1].ready + delay
    for at, write in arrived:
        done = (done if done > at else at) + write
    return done
