"""Training speed with the C kernels and without them (about 8 min).

The claim: with them it trains >= 1.3x as many tokens per second. Two tensor-parallel ranks of mamba2-small.yaml, Mamba-2
and Mamba-1. Runs of 100 steps take turns, with MEGATRON_SSM_SKIP_NATIVE=1 (torch and gloo) and without (C and shared
memory). The tokens per second of the last 50 steps count.
"""

import os
import statistics
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

from benchmarks.support.cells import ROOT
from benchmarks.support.pretraining import tokens_per_s, write_text
from benchmarks.support.tables import markdown, publish

STEPS, REPETITIONS = 100, 5
SMALL = dict(config=ROOT / "examples" / "configs" / "mamba2-small.yaml", tensor_model_parallel_size=2)
WAYS = {"torch, gloo": {"MEGATRON_SSM_SKIP_NATIVE": "1"}, "C, shared memory": {}}


def main() -> None:
    """Measure and publish the table."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = write_text(folder)
        for model_type, name in (("mamba2", "Mamba-2"), ("mamba", "Mamba-1")):
            rates = {way: [] for way in WAYS}
            for _ in range(REPETITIONS):
                for way, environment in WAYS.items():
                    rate = tokens_per_s(2, text, folder, STEPS, environment, model_type=model_type, **SMALL)
                    rates[way].append(rate)
            plain, fast = (statistics.median(each) for each in rates.values())
            spread = max(max(each) / min(each) - 1 for each in rates.values())
            rows.append([name, f"{plain:,.0f}", f"{fast:,.0f}", f"{fast / plain:.2f}x", f"{spread:.0%}"])
    header = ["training on two ranks, tokens/s", *WAYS, "ratio", "spread"]
    publish("training", markdown(header, rows))


if __name__ == "__main__":
    main()
