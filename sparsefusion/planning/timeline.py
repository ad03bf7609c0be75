"""The times at which the gradients of a step are ready, the costs to select and send them, and the predicted step time.

Times of a step count from the end of the previous one, so they include the optimizer and the forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Tensor:
    """The gradient of a parameter.

    Attributes:
        name: The name of the parameter.
        numel, dims: The numbers of its elements and of its dimensions.
        ready: The time at which the gradient is complete, in seconds.
        copied: True if several ranks of a divided model hold copies of the parameter, which must stay equal.
    """

    name: str
    numel: int
    dims: int
    ready: float
    copied: bool = False


@dataclass(frozen=True)
class Timeline:
    """A profiled dense step.

    Attributes:
        tensors: The gradients, in the order in which they are ready.
        atoms: The names of gradients that the framework hands over together, in its order.
        itemsize: Bytes of an element.
        sent_itemsize: Bytes of an element in the framework's own messages.
        step: Measured seconds of the step.
        waits_for_atoms: True if the framework waits for the means of an atom before it continues.
    """

    tensors: tuple[Tensor, ...]
    atoms: tuple[tuple[str, ...], ...]
    itemsize: int
    sent_itemsize: int
    step: float
    waits_for_atoms: bool = False

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True)
class Costs:
    """The costs of the parts of a step, in seconds.

    Attributes:
        times: times(operation, nbytes): seconds of a collective on idle machines; nbytes as in `Fabric.time`.
        ranks: The number of ranks.
        select: select(numel): seconds of a selection from this many elements.
        add: add(k): seconds to add this many received values.
        copy: copy(nbytes): seconds to copy this many bytes.
        factor: The factor of the times of messages during a training step.
        dense_operation: The collective with which the framework sends gradients.
        per_message: Seconds of the computing thread for a sparse message, without its selection and its transfer.
    """

    times: Callable[[str, int], float]
    ranks: int
    select: Callable[[int], float]
    add: Callable[[int], float]
    copy: Callable[[float], float]
    factor: float = 1.0
    dense_operation: str = "all_reduce"
    per_message: float = 0.0

    def message(self, operation: str, nbytes: int) -> float:
        """Seconds of a collective during a training step. 0 bytes take no time."""
        return self.factor * self.times(operation, nbytes) if nbytes else 0.0


class Load(NamedTuple):
    """The work for one buffer, in seconds.

    Attributes:
        ready: The time at which its gradients are complete.
        select: The duration of the selection.
        reduce, gather: The durations of its dense and of its sparse message.
        write: The duration of writing the means into the gradients.
        early: The time at which the gradients that are sent early are ready.
        early_reduce: The duration of their message.
    """

    ready: float
    select: float
    reduce: float
    gather: float
    write: float
    early: float = 0.0
    early_reduce: float = 0.0


def step_seconds(loads: Sequence[Load], interleaved: bool, waits_for_atoms: bool = False) -> float:
    """The time of a step in which one thread computes, selects and writes, and one link sends these buffers in order.

    interleaved: the dense message of a buffer is sent before its selection. waits_for_atoms: the thread waits until the
    means of a buffer are written.
    """
    delay, link, arrived = 0.0, 0.0, []
    for backward, select, reduce, gather, write, early, early_reduce in loads:  # faster than access by name
        ready = backward + delay
        if early_reduce:
            link = max(link, early + delay) + early_reduce
        selected = ready + select
        leaves = ready if interleaved else selected
        link = (link if link > leaves else leaves) + reduce  # faster than max; this loop dominates planning
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
