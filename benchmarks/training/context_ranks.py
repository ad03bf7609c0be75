"""Training on two context ranks of one machine against one rank, with sequences of 8,192 tokens (about 18 min).

The claim: two context ranks, which share each sequence, train >= 1.6x as many tokens per second as one rank. Runs of
examples/pretrain.py with two layers of width 256 or 768, byte-level, in fp32; one thread for each rank; the ranks send
through gloo on this machine. Runs on one and on two ranks take turns. The tokens per second of the last three of six steps
count: forward, backward, the sum of the gradients over the ranks, and the optimizer.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

from benchmarks.support.pretraining import tokens_per_s, write_text
from benchmarks.support.tables import markdown, print_or_publish

TOKENS, STEPS, REPETITIONS = 8192, 6, 3
MAMBA_1 = dict(model_type="mamba", mamba_state_dim=16)
MAMBA_2 = dict(model_type="mamba2", mamba_state_dim=128, mamba_head_dim=64)
ZAMBA_2 = dict(model_type="zamba2", mamba_state_dim=64, mamba_head_dim=64, num_attention_heads=8)
# With these settings, glibc keeps large blocks that are freed. By default it returns them to the system.
KEEP = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
ROWS: list[tuple[str, int, dict, dict[str, str]]] = [
    ("Mamba-1", 256, MAMBA_1, {}), ("Mamba-2", 256, MAMBA_2, {}), ("Zamba2", 256, ZAMBA_2, {}),
    ("Mamba-1", 768, MAMBA_1, {}), ("Mamba-2", 768, MAMBA_2, {}), ("Mamba-2, memory is kept", 768, MAMBA_2, KEEP),
]  # fmt: skip


def row(name: str, hidden: int, model: dict, env: dict[str, str], text: Path, folder: Path) -> list[str]:
    """Measure a row of the table."""
    sizes = dict(hidden_size=hidden, num_layers=2, seq_length=TOKENS, micro_batch_size=1, global_batch_size=1, **model)
    sizes |= dict(lr=1e-3, lr_warmup_iters=2)

    def speed(ranks: int) -> float:
        return tokens_per_s(ranks, text, folder, STEPS, env, context_parallel_size=ranks, **sizes)

    pairs = [[speed(1), speed(2)] for _ in range(REPETITIONS)]
    one, two = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = [pair[1] / pair[0] for pair in pairs]
    return [name, str(hidden), f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"]


def main() -> None:
    """Measure and publish the table; or measure and print the rows whose numbers are arguments."""
    numbers = [int(number) for number in sys.argv[1:]] or range(len(ROWS))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = write_text(folder)
        rows = [row(*ROWS[number], text, folder) for number in numbers]
    header = ["training, tokens/s", "hidden size", "one rank", "two context ranks", "ratio"]
    print_or_publish("context-ranks", markdown(header, rows))


if __name__ == "__main__":
    main()
