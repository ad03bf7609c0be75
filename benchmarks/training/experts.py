"""A training step of experts against a loop over the experts in torch (about 3 min).

The layer has the sizes of Granite 4.0 H tiny, halved: 64 experts, of which each token chooses 6.
"""

import torch
import torch.nn.functional as F

from benchmarks.support.tables import interleaved, markdown, publish
from megatron_ssm.ops.experts import apply_experts, apply_experts_ref

EXPERTS, CHOSEN, HIDDEN, CHANNELS = 64, 6, 768, 256
TOKENS = (256, 1024)


def gated(inner: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def measure(tokens: int) -> dict[str, float]:
    """{name: seconds of forward and backward}."""
    torch.manual_seed(0)
    shapes = (tokens, HIDDEN), (tokens, CHOSEN), (EXPERTS * 2 * CHANNELS, HIDDEN), (EXPERTS * HIDDEN, CHANNELS)
    x, weights, up, down = ((0.05 * torch.randn(shape)).requires_grad_() for shape in shapes)
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)])
    functions = dict(ours=apply_experts, loop=apply_experts_ref)
    return interleaved(
        {
            name: lambda function=function: (
                function(x, weights, index, EXPERTS, up, down, gated).square().mean().backward()
            )
            for name, function in functions.items()
        },
        repetitions=5,
    )


def main() -> None:
    """Measure, and write the table."""
    rows = []
    for tokens in TOKENS:
        found = measure(tokens)
        times = [f"{found[name] * 1e3:.0f} ms" for name in ("ours", "loop")]
        rows.append([f"{tokens:,}", *times, f"{found['loop'] / found['ours']:.1f}x"])
    publish("training-step-of-experts", markdown(["tokens", "ours", "a loop in torch", "ratio"], rows))


if __name__ == "__main__":
    main()
