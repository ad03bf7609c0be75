"""The steps of a plan. Every rank takes the same steps; peers are relative to its coordinates on the mesh.

A register holds one block of an operand. It has the operand's name and a key, a tuple of loop counters that are all zero for
the block that the rank owns. Messages that begin in one step and are awaited in another travel while the steps between them
are taken.
"""

import re
from dataclasses import dataclass
from typing import get_args

Key = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """The place of a digit in a tensor: the dimension, and the number of blocks of its outer digits around it."""

    dim: int
    outer: int


@dataclass(frozen=True)
class AllToAll:
    """Along `axis`: cut each operand into one piece per rank at `cut`, exchange them, and join what arrives at `joined`.

    moves: (operand, cut, joined). A rank sends (z - 1) / z of each operand, z being the size of the axis.
    """

    axis: str
    moves: tuple[tuple[str, Place, Place], ...]


@dataclass(frozen=True)
class Slice:
    """Keep this rank's piece of each operand, by its coordinate along `axis`; nothing is sent. moves: (operand, cut)."""

    axis: str
    moves: tuple[tuple[str, Place], ...]


@dataclass(frozen=True)
class Gather:
    """Join the blocks of all ranks along `axis`. moves: (operand, joined). A rank sends z - 1 blocks."""

    axis: str
    moves: tuple[tuple[str, Place], ...]


@dataclass(frozen=True)
class Swap:
    """Exchange operands between the ranks at (x, y) and (y, x) of two mesh axes of equal size. A rank sends its block."""

    axes: tuple[str, str]
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Derive:
    """Compute an input from others, where they are, as the program says. Nothing is sent."""

    operand: str


@dataclass(frozen=True)
class Send:
    """Begin to pass block `source` of operands to the rank before along `axis`, and to receive `target` from the next."""

    operands: tuple[str, ...]
    axis: str
    source: Key
    target: Key


@dataclass(frozen=True)
class Arrive:
    """Wait until the block `key` of operands has arrived."""

    operands: tuple[str, ...]
    key: Key


@dataclass(frozen=True)
class Compute:
    """Compute the tile at these loop counters, and combine its results into the accumulators."""

    counters: Key


@dataclass(frozen=True)
class SendPartial:
    """Begin to send partial result `source` to the rank `distance` further along `axis`, for its partial result `target`."""

    result: int
    axis: str
    distance: int
    source: Key
    target: Key


@dataclass(frozen=True)
class Combine:
    """Wait for the partial result that was `source` where it was computed, and combine it into `target`."""

    result: int
    source: Key
    target: Key


@dataclass(frozen=True)
class ReduceScatter:
    """Along `axis`: cut a partial result into pieces, exchange them, and combine those of this rank, in the ranks' order.

    moves: (output, cut). A rank sends (z - 1) / z of its partial result.
    """

    axis: str
    result: int
    moves: tuple[tuple[str, Place], ...]


@dataclass(frozen=True)
class AllReduce:
    """Along `axis`: combine partial results, on every rank, by a reduce-scatter and an all-gather of rows.

    A rank sends 2 (z - 1) / z of its partial result, whose rows are padded to a multiple of z.
    """

    axis: str
    result: int


@dataclass(frozen=True)
class Free:
    """Release the block `key` of operands."""

    operands: tuple[str, ...]
    key: Key


@dataclass(frozen=True)
class Summarize:
    """Compute what each of this rank's blocks of a scanned axis contributes to later ones, into the scan's registers."""


@dataclass(frozen=True)
class PassStates:
    """From the summaries of all blocks, compute the state that enters each of them, in order of position."""


@dataclass(frozen=True)
class Round:
    """Convert outputs to the dtype in which they travel, after all partial results are combined."""

    result: int


Step = (
    AllToAll
    | Slice
    | Gather
    | Swap
    | Derive
    | Send
    | Arrive
    | Compute
    | SendPartial
    | Combine
    | ReduceScatter
    | AllReduce
    | Free
    | Round
    | Summarize
    | PassStates
)
KINDS = {kind.__name__: kind for kind in get_args(Step)}
# {kind of step: the name of the methods that count it and write it as text}, for instance all_to_all
METHODS = {kind: re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name, kind in KINDS.items()}


def register_key(key: Key) -> Key:
    """The key of a register: () for the block that the rank owns, whose counters are all zero."""
    return key if any(key) else ()


def message_of(step: Send | Arrive | SendPartial | Combine) -> tuple[object, ...]:
    """The name of a message, which is the same for the step that begins it and for the step that awaits it."""
    if isinstance(step, Send):
        return step.operands, step.target
    return (step.operands, step.key) if isinstance(step, Arrive) else (step.result, step.source, step.target)
