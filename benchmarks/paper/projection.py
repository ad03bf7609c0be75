"""PROJECTION, not a measurement: published shapes on 1 to 8 H100s, from measurements of four H100s (about 1 min).

The time of a token that follows 1024 others has two parts. Its bytes are read at 0.7 of an H100's 3.35 TB/s: weights (those
of a shared block at each use), states, keys and values. Its all-reduces take the time of the fabric in examples/h100x4,
which was measured on four GPUs and is extrapolated to two and eight. An extrapolated time is an interval: from a latency
that does not grow with the ranks to one that grows like a ring's. "graphs" means the latency of all-reduces inside CUDA
graphs. The host's time to launch kernels is not included. Weights are in bf16, states and sums in fp32. The longest prompt
is that of mamba-ssm's kernels.
"""

from pathlib import Path
from typing import Any

from benchmarks.support.shapes import PUBLISHED
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.advice import best_degree
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.readers import extend_by_sweeps, read_curves
from megatron_ssm import families
from megatron_ssm.model.advise import decoding_shape
from megatron_ssm.model.memory import Memory
from megatron_ssm.spec.stack import Stack

FILES = Path(__file__).resolve().parents[2] / "examples" / "h100x4"
DEGREES, BATCHES, PROMPT, GB = (1, 2, 4, 8), (1, 64), 1024, 1e9
CAPACITY, MEASURED = 80 * GB, (1, 4)  # MEASURED: the numbers of GPUs whose times are not extrapolated


def h100s() -> Fabric:
    """The fabric of four H100s: small messages from timed all-reduces of a token, larger ones from nccl-tests."""
    sweeps = [read_curves(FILES / f"{name}.csv", name, 4)[0] for name in ("all_reduce", "all_gather", "reduce_scatter")]
    return Fabric(tuple(extend_by_sweeps(read_curves(FILES / "tp_latency_quiet.json", "all_reduce", 4), sweeps)), {})


def row(name: str, config: Stack, fabric: Fabric, degree: int) -> list[str]:
    """A row of the table: one model on `degree` GPUs."""
    memory = Memory(config, degree)
    held = memory.weights + memory.cache(max(BATCHES), PROMPT)
    cells = [name, str(degree), f"{memory.weights / GB:.1f} GB", f"{held / GB:.1f} GB"]
    if held > CAPACITY:
        return [*cells, *["does not fit"] * 3]
    shape = decoding_shape(name, config, degree, length=PROMPT)
    for batch in BATCHES:
        found = (
            best_degree(shape, fabric, [degree], batch, mode=mode, extrapolate=True).rows[0]
            for mode in ("eager", "graph")
        )
        cells.append(" / ".join(map(milliseconds, found)))
    return [*cells, f"{Memory(config, degree, on_cuda=True).longest_prompt(CAPACITY, 256):,}"]


def milliseconds(found: Any) -> str:
    """The time per token as text; the interval, if the number of GPUs was not measured. found: a row of `best_degree`."""
    if found.degree in MEASURED:
        return f"{found.seconds * 1e3:.2f}"
    return f"{found.low * 1e3:.1f} to {found.high * 1e3:.1f}"


def main() -> None:
    """Compute and publish."""
    fabric, rows = h100s(), []
    for name, published in PUBLISHED.items():
        config = families.from_dict(published.to_dict())
        for degree in DEGREES:
            try:
                rows.append(row(name, config, fabric, degree))
            except ValueError as error:
                rows.append([name, str(degree), str(error), *[""] * 4])
    header = ["PROJECTION", "H100s", "weights per GPU", f"and {max(BATCHES)} sequences of {PROMPT}"]
    header += [f"ms per token, batch {batch}: all-reduces eager / in graphs" for batch in BATCHES]
    header += ["longest prompt, batch 256"]
    publish("projection", markdown(header, rows))


if __name__ == "__main__":
    main()
