"""The number of ranks over which to split a model: predicts the time of a decoded token, as memory traffic plus messages.

    t(P) = (weights + batch * state) / (P * bandwidth * efficiency)
           + the sum of the times of a token's all-reduces on P ranks

The first term is a lower bound of decoding, in which every weight and state is read once. The second term comes from a
measured `Fabric`. A degree is a number of tensor-parallel ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .cost_model import Fabric


@dataclass(frozen=True)
class Shape:
    """The bytes that decoding with a model reads and sends.

    Attributes:
        name: The name of the model.
        weight_bytes: Bytes of the weights, which are read once per step.
        state_bytes: Bytes of one sequence's state that are read and written per token.
        reductions: Pairs (bytes of an all-reduce at batch size 1, number of these all-reduces per token).
        divisors: Pairs (name, number); a degree must divide every number.
    """

    name: str
    weight_bytes: float
    state_bytes: float
    reductions: tuple[tuple[int, int], ...]
    divisors: tuple[tuple[str, int], ...] = ()

    @property
    def calls(self) -> int:
        """All-reduces per token."""
        return sum(count for _, count in self.reductions)


def mamba1_shape(
    name: str,
    hidden: int,
    layers: int,
    inner: int,
    state: int,
    dt_rank: int,
    vocab: int,
    kernel: int = 4,
    itemsize: int = 2,
) -> Shape:
    """The shape of a Mamba-1 with tied embeddings, `itemsize` bytes per parameter and fp32 states.

    A layer has two all-reduces: of the output of x_proj (dt_rank + 2 * state elements) and of out_proj (hidden elements).
    The embedding has one.
    """
    x_proj = dt_rank + 2 * state
    mixer = hidden * 2 * inner + inner * (kernel + 1 + x_proj + dt_rank + 1 + state + 1) + inner * hidden
    weights = layers * (mixer + hidden) + hidden + vocab * hidden
    kept = layers * inner * (4 * state + itemsize * kernel)
    reductions = ((itemsize * x_proj, layers), (itemsize * hidden, layers + 1))
    return Shape(name, itemsize * weights, 2 * kept, reductions, (("d_inner", inner),))


MAMBA_2_8B = mamba1_shape("mamba-2.8b", hidden=2560, layers=64, inner=5120, state=16, dt_rank=160, vocab=50280)


@dataclass(frozen=True)
class Row:
    """The prediction for one degree, a number of ranks: seconds of a decoding step, their interval, and those of its
    all-reduces.

    break_even: seconds of all-reduces with which one rank would be as fast (see the function `break_even`). excluded: the
    reason why the degree is excluded, or "".
    """

    degree: int
    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    messages: float = 0.0
    break_even: float = 0.0
    excluded: str = ""

    @property
    def share(self) -> float:
        return self.messages / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Advice:
    """The recommended degree, the predictions for all degrees, and the reasons as sentences."""

    degree: int
    rows: tuple[Row, ...]
    reasons: tuple[str, ...]

    def table(self) -> str:
        """The rows as a Markdown table."""
        lines = ["| ranks | ms per token | interval | all-reduces | must be below |", "| --- | --- | --- | --- | --- |"]
        for row in self.rows:
            cells = [f"{row.seconds * 1e3:.2f}", f"{row.low * 1e3:.2f} to {row.high * 1e3:.2f}", f"{row.share:.0%}"]
            cells.append(f"{row.messages * 1e3:.2f} of {row.break_even * 1e3:.2f} ms" if row.degree > 1 else "-")
            cells = [row.excluded, "", "", ""] if row.excluded else cells
            lines.append(f"| {row.degree} | " + " | ".join(cells) + " |")
        return "\n".join(lines)


def best_degree(
    shape: Shape,
    fabric: Fabric,
    degrees: Iterable[int],
    batch: int = 1,
    memory_bandwidth: float = 3.35e12,
    efficiency: float = 0.7,
    memory: float = 80e9,
    mode: str = "eager",
    extrapolate: bool = False,
) -> Advice:
    """Recommend one of `degrees` for the shortest decoding step of `batch` sequences.

    It is the smallest degree whose time is below the upper end of the fastest degree's interval, so that no ranks are added
    for an uncertain gain. Hardware defaults describe an H100 SXM.

    Args:
        shape: The model.
        fabric: The times of messages.
        degrees: The numbers of ranks to consider.
        batch: The number of sequences.
        memory_bandwidth: Bytes per second that one rank can read.
        efficiency: The share of the bandwidth that decoding reaches.
        memory: Bytes of memory of one rank.
        mode, extrapolate: See `Fabric.time`. Without `extrapolate`, degrees that were never measured are excluded.

    Raises:
        ValueError: Every degree is excluded.
    """
    reach = memory_bandwidth * efficiency
    rows = [_row(shape, fabric, degree, batch, reach, memory, mode, extrapolate) for degree in sorted(set(degrees))]
    possible = [row for row in rows if not row.excluded]
    if not possible:
        raise ValueError(f"{shape.name}: " + "; ".join(f"{row.degree} ranks: {row.excluded}" for row in rows))
    fastest = min(possible, key=lambda row: row.seconds)
    chosen = next(row for row in possible if row.seconds <= fastest.high)
    return Advice(chosen.degree, tuple(rows), tuple(_reasons(shape, rows, fastest, chosen)))


def break_even(single: float, degree: int) -> float:
    """Seconds of messages per token with which `degree` ranks are as slow as one rank, which takes `single` seconds."""
    return single * (1 - 1 / degree)


def _row(
    shape: Shape, fabric: Fabric, degree: int, batch: int, reach: float, memory: float, mode: str, extrapolate: bool
) -> Row:
    excluded = _why_impossible(shape, degree, batch, memory)
    if excluded:
        return Row(degree, excluded=excluded)
    single = (shape.weight_bytes + batch * shape.state_bytes) / reach
    try:
        messages, low, high = _messages(shape, fabric, degree, batch, mode, extrapolate)
    except ValueError as error:
        return Row(degree, excluded=str(error))
    local = single / degree
    return Row(degree, local + messages, local + low, local + high, messages, break_even(single, degree))


def _why_impossible(shape: Shape, degree: int, batch: int, memory: float) -> str:
    """The reason why the model cannot be split over this many ranks, or "".

    The memory of a rank is compared with the bytes that decoding reads, which are at least the bytes that it stores.
    """
    for name, number in shape.divisors:
        if number % degree:
            return f"{name} {number} is not a multiple of {degree} ranks ({number} % {degree} = {number % degree})"
    needed = (shape.weight_bytes + batch * shape.state_bytes) / degree
    return f"needs {needed / 1e9:.1f} GB of {memory / 1e9:.1f} GB per rank" if needed > memory else ""


def _messages(
    shape: Shape, fabric: Fabric, degree: int, batch: int, mode: str, extrapolate: bool
) -> tuple[float, float, float]:
    """(seconds, low, high) of all all-reduces of a token."""
    total = total_low = total_high = 0.0
    for nbytes, count in shape.reductions:
        low, high = fabric.interval("all_reduce", batch * nbytes, degree, extrapolate, mode)
        total += count * fabric.time("all_reduce", batch * nbytes, degree, extrapolate, mode)
        total_low, total_high = total_low + count * low, total_high + count * high
    return total, total_low, total_high


def _reasons(shape: Shape, rows: Iterable[Row], fastest: Row, chosen: Row) -> Iterator[str]:
    """Sentences about the time and the break-even of each degree, and about the recommendation."""
    for row in rows:
        if row.excluded:
            yield f"{row.degree} ranks: excluded, {row.excluded}"
        elif row.degree == 1:
            yield f"1 rank: {row.seconds * 1e3:.2f} ms per token, all of it memory"
        else:
            verdict = "faster" if row.messages < row.break_even else "no faster"
            mean, bound = (seconds / max(shape.calls, 1) * 1e6 for seconds in (row.messages, row.break_even))
            yield (
                f"{row.degree} ranks: {row.seconds * 1e3:.2f} ms per token, {row.share:.0%} of it {shape.calls} "
                f"all-reduces of {mean:.1f} us; {verdict} than one rank, for which they must take less than {bound:.1f} us"
            )
    use = f"use {chosen.degree} rank{'s' * (chosen.degree > 1)}"
    if chosen is fastest:
        yield f"{use}: the fastest"
    else:
        times = f"{chosen.seconds * 1e3:.2f} ms against up to {fastest.high * 1e3:.2f}"
        yield f"{use}: as fast as {fastest.degree} within the uncertainty ({times})"
