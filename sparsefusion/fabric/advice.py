"""How many ranks to split a model over: the time of a decoded token as a sum of memory and messages, degree by degree.

t(P) = (weights + batch * state) / (P * bandwidth * efficiency) + sum over the all-reduces of a token of their time on P
ranks. The first term is decode's lower bound, reading everything once; the second comes from a measured `Fabric`.
"""

from dataclasses import dataclass

from .cost_model import Fabric


@dataclass(frozen=True)
class Shape:
    """What a model's decoding reads and sends.

    weight_bytes: read once per step; state_bytes: read and written per token of each sequence; reductions: the (bytes
    at batch 1, how many per token) of its all-reduces; divisors: the (name, number) that the ranks must divide.
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


def mamba1_shape(name, hidden, layers, inner, state, dt_rank, vocab, kernel=4, itemsize=2) -> Shape:
    """A Mamba-1 with tied embeddings, of `itemsize` bytes per parameter, its states in fp32.

    Two all-reduces per block: x_proj's dt_rank + 2 state numbers and out_proj's hidden; one more for the embedding.
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
    """One degree: seconds per step with their interval, the share of them that messages take, or why it is excluded.

    messages: seconds of all all-reduces; break_even: what they may take before one rank is as fast (`break_even`).
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
        """The part of the time that messages take."""
        return self.messages / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Advice:
    """The degree to take, a row for each that was asked about, and why, in sentences."""

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
    shape: Shape, fabric: Fabric, degrees, batch=1, memory_bandwidth=3.35e12, efficiency=0.7, memory=80e9,
    mode="eager", extrapolate=False,
) -> Advice:  # fmt: skip
    """The degree with the fastest decode step at this batch, among `degrees`.

    Not the fastest itself, but the smallest degree that is as fast within the fastest one's interval. memory_bandwidth:
    bytes/s of one rank, of which decoding reaches `efficiency` (the defaults: an H100 SXM); memory: bytes of one rank.
    mode, extrapolate: as in `Fabric.time`; without extrapolate a degree never measured is excluded.
    ValueError: every degree is excluded.
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
    """Seconds that all messages of a token may take before `degree` ranks are no faster than one taking `single`."""
    return single * (1 - 1 / degree)


def _row(shape, fabric, degree, batch, reach, memory, mode, extrapolate) -> Row:
    excluded = _unfit(shape, degree, batch, memory)
    if excluded:
        return Row(degree, excluded=excluded)
    single = (shape.weight_bytes + batch * shape.state_bytes) / reach
    try:
        messages, low, high = _messages(shape, fabric, degree, batch, mode, extrapolate)
    except ValueError as error:
        return Row(degree, excluded=str(error))
    local = single / degree
    return Row(degree, local + messages, local + low, local + high, messages, break_even(single, degree))


def _unfit(shape, degree, batch, memory) -> str:
    """Why the model cannot be split so, or nothing. What is read of the state bounds what is kept of it."""
    for name, number in shape.divisors:
        if number % degree:
            return f"{name} {number} does not divide over {degree} ranks ({number} % {degree} = {number % degree})"
    needed = (shape.weight_bytes + batch * shape.state_bytes) / degree
    return f"needs {needed / 1e9:.1f} GB of {memory / 1e9:.1f} GB per rank" if needed > memory else ""


def _messages(shape, fabric, degree, batch, mode, extrapolate):
    """(seconds, low, high) of a token's all-reduces."""
    total = [0.0, 0.0, 0.0]
    for nbytes, count in shape.reductions:
        asked = ("all_reduce", batch * nbytes, degree, extrapolate, mode)
        for i, seconds in enumerate((fabric.time(*asked), *fabric.interval(*asked))):
            total[i] += count * seconds
    return total


def _reasons(shape, rows, fastest, chosen):
    """Sentences: each degree's time and break-even, and the choice."""
    for row in rows:
        if row.excluded:
            yield f"{row.degree} ranks: excluded, {row.excluded}"
        elif row.degree == 1:
            yield f"1 rank: {row.seconds * 1e3:.2f} ms per token, all of it memory"
        else:
            verdict = "faster" if row.messages < row.break_even else "no faster"
            each, bound = (seconds / shape.calls * 1e6 for seconds in (row.messages, row.break_even))
            yield (
                f"{row.degree} ranks: {row.seconds * 1e3:.2f} ms per token, {row.share:.0%} of it {shape.calls} "
                f"all-reduces of {each:.1f} us; {verdict} than one rank, for which they must take less than {bound:.1f} us"
            )
    if chosen is fastest:
        yield f"{chosen.degree} it is: the fastest"
    else:
        within = f"{chosen.degree} and {fastest.degree} ranks within the uncertainty"
        yield f"{chosen.degree} it is: {within} ({chosen.seconds * 1e3:.2f} ms against up to {fastest.high * 1e3:.2f})"
