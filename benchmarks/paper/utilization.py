"""Utilization of one core: prefill against matrix products, decoding against memory: the paper's Fig. 8 (about 3 min).

The claims: reading a prompt of 256 tokens runs at >= 0.5 of the speed of matrix products alone; decoding a token reads the
weights at >= 0.7 of the memory's bandwidth. Mamba-1 of the 130m shape in fp32, one thread. The products alone are those of
in_proj on 512 tokens. Medians of interleaved runs.
"""

import os
import tempfile
from collections.abc import Callable

os.environ.update(OMP_NUM_THREADS="1")

import torch

import megatron_ssm
from benchmarks.support.shapes import random_model
from benchmarks.support.tables import interleaved, markdown, publish

SHAPE, PROMPTS, OUTPUTS = "Mamba-1 130m", (16, 32, 64, 128, 256, 512), (16, 64, 128)
STREAM = 2**26  # floats that are read to measure the memory's bandwidth
PAPER = [["GPU utilization in prefill, the paper's A6000", "98.7 % at 128 and 256"]]


@torch.no_grad()
def main() -> None:
    """Measure and publish the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        random_model(SHAPE, directory)
        model = megatron_ssm.load(directory)
    ids, stream = torch.zeros(1, max(PROMPTS), dtype=torch.int64), torch.ones(STREAM)
    matrix, x = model.layers[0].mixer.in_proj.weight(), torch.randn(512, model.config.hidden_size)
    products = sum(
        p.numel()
        for p in model.parameters()
        if p.ndim == 2 and p.field.has_weight_decay and p is not model.embeddings.weight
    )
    cache = model.new_cache(1)
    model.local_logits(ids, cache=cache, logits_to_keep=1)

    def decode(tokens: int) -> None:
        for _ in range(tokens):
            model.local_logits(ids[:, :1], cache=cache)

    def read(prompt: int) -> Callable[[], torch.Tensor]:
        return lambda: model.local_logits(ids[:, :prompt], cache=model.new_cache(1), logits_to_keep=1)

    runs = {"products": lambda: torch.nn.functional.linear(x, matrix), "stream": stream.sum}
    runs |= {("read", prompt): read(prompt) for prompt in PROMPTS}
    runs |= {("decode", tokens): lambda n=tokens: decode(n) for tokens in OUTPUTS}
    seconds = interleaved(runs)
    peak, memory = 2 * x.shape[0] * matrix.numel() / seconds["products"], stream.nbytes / seconds["stream"]
    weights = sum(p.nbytes for p in model.parameters())
    rows = [[f"{prompt} tokens read, of the products' {peak / 1e9:.0f} GFLOP/s",
             f"{2 * products * prompt / seconds['read', prompt] / peak:.0%}"] for prompt in PROMPTS]  # fmt: skip
    rows += [[f"{tokens} tokens decoded, of the memory's {memory / 1e9:.0f} GB/s",
              f"{weights * tokens / seconds['decode', tokens] / memory:.0%}"] for tokens in OUTPUTS]  # fmt: skip
    publish("utilization", markdown(["share", SHAPE], PAPER + rows))


if __name__ == "__main__":
    main()
