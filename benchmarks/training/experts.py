"""A training step of experts against a loop over the experts in torch. Takes 2 minutes.

The layer has the sizes of Granite 4.0 H tiny, halved: 64 experts, of which each token chooses 6.
"""

import statistics
import time

import torch
import torch.nn.functional as F

from benchmarks.support.tables import markdown, publish
from megatron_ssm.ops.experts import apply_experts, apply_experts_ref

EXPERTS, CHOSEN, HIDDEN, CHANNELS = 64, 6, 768, 256
TOKENS = (256, 1024, 4096)
REPETITIONS = 10


def gated(inner: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def seconds(function, inputs, index) -> float:
    """The time of forward and backward."""
    x, weights, up, down = inputs
    start = time.perf_counter()
    function(x, weights, index, EXPERTS, up, down, gated).square().mean().backward()
    return time.perf_counter() - start


def measure(tokens: int) -> tuple[float, float]:
    """(seconds of ours, of the loop): medians of interleaved repetitions."""
    torch.manual_seed(0)
    shapes = (tokens, HIDDEN), (tokens, CHOSEN), (EXPERTS * 2 * CHANNELS, HIDDEN), (EXPERTS * HIDDEN, CHANNELS)
    inputs = [(0.05 * torch.randn(shape)).requires_grad_() for shape in shapes]
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)])
    for each in inputs:
        each.grad = torch.zeros_like(each)
    found: dict = {apply_experts: [], apply_experts_ref: []}
    for _ in range(REPETITIONS + 1):
        for function, times in found.items():
            times.append(seconds(function, inputs, index))
    ours, loop = (statistics.median(times[1:]) for times in found.values())
    return ours, loop


def main() -> None:
    """Measure, and write the table."""
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for tokens in TOKENS:
            ours, loop = measure(tokens)
            rows.append(
                [str(threads), f"{tokens:,}", f"{ours * 1e3:.0f} ms", f"{loop * 1e3:.0f} ms", f"{loop / ours:.1f}x"]
            )
    publish("training-step-of-experts", markdown(["threads", "tokens", "ours", "a loop in torch", "ratio"], rows))


if __name__ == "__main__":
    main()
