"""When gradients are ready in a step, what sending and selecting them costs, and when the step would end.

Seconds of a step count from the end of the last one; so they include what an optimizer and a forward pass take.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from sparsefusion.fabric.cost_model import Fabric

MOST_CORRECTED = 3.0  # times, either way
HALVINGS = 12  # of what the factor may be


@dataclass(frozen=True)
class Tensor:
    """A parameter's gradient: dims are its dimensions, ready the second at which it is there.

    copied: several ranks over which the model is divided hold it, and must go on holding the same.
    """

    name: str
    numel: int
    dims: int
    ready: float
    copied: bool = False


@dataclass(frozen=True)
class Timeline:
    """tensors: in the order in which they are ready. atoms: of which the framework hands over several at once, in its order.

    itemsize: bytes of a number; sent: in the framework's own messages. step: measured seconds of a step with these. waits:
    the framework waits for each atom before it goes on.
    """

    tensors: tuple[Tensor, ...]
    atoms: tuple[tuple[str, ...], ...]
    itemsize: int
    sent: int
    step: float
    waits: bool = False

    @property
    def numel(self) -> int:
        """Of all gradients."""
        return sum(tensor.numel for tensor in self.tensors)

    def by_name(self) -> dict[str, Tensor]:
        """{name: tensor}."""
        return {tensor.name: tensor for tensor in self.tensors}


@dataclass(frozen=True)
class Costs:
    """Seconds, among `ranks` ranks.

    fabric: what messages cost alone; factor: how many times as long they take beside everything else. select(numel): of
    selecting from so many; add(numbers): of adding so many received ones; copy(bytes): of copying. whole: the operation
    with which the framework sends gradients. handle: of the thread that computes, for each sparse message, however small,
    beside selecting for it and sending it.
    """

    fabric: Fabric
    ranks: int
    select: Callable[[int], float]
    add: Callable[[int], float]
    copy: Callable[[int], float]
    factor: float = 1.0
    whole: str = "all_reduce"
    handle: float = 0.0

    def all_reduce(self, nbytes: int) -> float:
        """Of a sum of so many bytes."""
        return self.message("all_reduce", nbytes)

    def message(self, operation: str, nbytes: int) -> float:
        """Of any operation, in its own meaning of bytes (`Fabric.time`); none, nothing."""
        return self.factor * self.fabric.time(operation, nbytes, self.ranks) if nbytes else 0.0

    def corrected(self, loads, timeline: Timeline) -> "Costs":
        """With the factor with which a step of these loads is predicted to take what it took, by bisection.

        loads: of the framework's own messages, with these costs. The factor is at most MOST_CORRECTED, either way; where
        computing is nearly all of the step, nothing can be said.
        """
        if timeline.step - timeline.tensors[-1].ready < 0.1 * timeline.step:
            return self
        low, high = 1 / MOST_CORRECTED, MOST_CORRECTED
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            slower = [load._replace(reduce=middle * load.reduce) for load in loads]
            if seconds(slower, False, timeline.waits) < timeline.step:
                low = middle
            else:
                high = middle
        return replace(self, factor=(low + high) / 2 * self.factor)


class Load(NamedTuple):
    """What is done for a buffer. ready: the second at which its gradients are there; select: seconds of it.

    reduce, gather: of its two messages; write: seconds of writing what they brought into gradients. early: when what leaves
    before the rest is there; early_reduce: seconds of its message.
    """

    ready: float
    select: float
    reduce: float
    gather: float
    write: float
    early: float = 0.0
    early_reduce: float = 0.0


def seconds(loads, interleaved: bool, waits: bool = False) -> float:
    """Of a step with these buffers: one thread computes, selects and writes, one link sends, in this order.

    interleaved: a buffer's all-reduce leaves before anything is selected. waits: the thread goes on when all is written.
    """
    delay, link, arrived = 0.0, 0.0, []
    for backward, select, reduce, gather, write, early, early_reduce in loads:  # faster than their names
        ready = backward + delay
        if early_reduce:
            link = max(link, early + delay) + early_reduce
        selected = ready + select
        leaves = ready if interleaved else selected
        link = (link if link > leaves else leaves) + reduce  # faster than max, and planning is mostly this
        link = (link if link > selected else selected) + gather
        delay += select
        if waits:
            delay = link + write - backward
        else:
            arrived.append((link, write))
    done = loads[-1].ready + delay
    for at, write in arrived:
        done = (done if done > at else at) + write
    return done
