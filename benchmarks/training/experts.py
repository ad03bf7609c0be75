"""A training step of experts against transformers' experts, and a loop over the experts in torch (about 3 min).

The layer has the sizes of Granite 4.0 H tiny, halved: 64 experts, of which each token chooses 6.
"""

import torch
import torch.nn.functional as F
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts

from benchmarks.support.tables import interleaved, markdown, publish
from megatron_ssm.kernels.experts import apply_experts, apply_experts_ref

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
    theirs = transformers_experts(up, down)
    functions = dict(
        ours=lambda: apply_experts(x, weights, index, EXPERTS, up, down, gated),
        transformers=lambda: theirs(x, index, weights),
        loop=lambda: apply_experts_ref(x, weights, index, EXPERTS, up, down, gated),
    )
    expected = functions["loop"]()
    for each in functions.values():
        torch.testing.assert_close(each(), expected, rtol=1e-4, atol=1e-5)
    calls = {name: lambda each=each: each().square().mean().backward() for name, each in functions.items()}
    return interleaved(calls, repetitions=5)


def transformers_experts(up: torch.Tensor, down: torch.Tensor) -> Qwen3NextExperts:
    """The same experts in transformers, with its default implementation, grouped products."""
    sizes = dict(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=CHANNELS)
    config = Qwen3NextConfig(**sizes)
    config._experts_implementation = "grouped_mm"
    experts = Qwen3NextExperts(config)
    with torch.no_grad():
        experts.gate_up_proj.copy_(up.view_as(experts.gate_up_proj))
        experts.down_proj.copy_(down.view_as(experts.down_proj))
    return experts


def main() -> None:
    """Measure, and write the table."""
    rows = []
    for tokens in TOKENS:
        found = measure(tokens)
        others = [
            f"{found[name] * 1e3:.0f} ms ({found[name] / found['ours']:.1f}x)" for name in ("transformers", "loop")
        ]
        rows.append([f"{tokens:,}", f"{found['ours'] * 1e3:.0f} ms", *others])
    publish("training-step-of-experts", markdown(["tokens", "ours", "transformers", "a loop in torch"], rows))


if __name__ == "__main__":
    main()
