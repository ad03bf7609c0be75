"""Training speed of the demo with the C kernels and without them (about 8 min).

The claim: with them it trains >= 1.3x as many tokens per second. Two tensor-parallel ranks with the demo's options, Mamba-2
and Mamba-1. Runs of 100 steps take turns, with MEGATRON_SSM_SKIP_NATIVE=1 (torch and gloo) and without (C and shared
memory). The tokens per second of the last 50 steps count.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

from benchmarks.support.tables import markdown, publish

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
from corpus import write_corpus  # noqa: E402

STEPS, REPETITIONS = 100, 5
WAYS = {"torch, gloo": {"MEGATRON_SSM_SKIP_NATIVE": "1"}, "C, shared memory": {}}


def tokens_per_s(model_type: str, text: Path, folder: Path, environment: dict[str, str]) -> float:
    """The tokens per second in the second half of a run. text: folder of the corpus. environment: added variables."""
    log = folder / "log.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--",
               ROOT / "examples" / "pretrain.py", "--config", ROOT / "examples" / "demo.yaml", "--model-type", model_type,
               "--tensor-model-parallel-size", "2", "--data", text, "--train-iters", str(STEPS),
               "--log-interval", str(STEPS // 2), "--out", folder / "out", "--log", log]  # fmt: skip
    subprocess.run(
        [str(word) for word in command], check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL
    )
    return json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["tokens_per_s"]


def main() -> None:
    """Measure and publish the table."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = write_corpus(folder / "text", extra=False)[0][0].parent
        for model_type, name in (("mamba2", "Mamba-2, the demo's"), ("mamba", "Mamba-1")):
            rates = {way: [] for way in WAYS}
            for _ in range(REPETITIONS):
                for way, environment in WAYS.items():
                    rates[way].append(tokens_per_s(model_type, text, folder, environment))
            plain, fast = (statistics.median(each) for each in rates.values())
            spread = max(max(each) / min(each) - 1 for each in rates.values())
            rows.append([name, f"{plain:,.0f}", f"{fast:,.0f}", f"{fast / plain:.2f}x", f"{spread:.0%}"])
    header = ["training on two ranks, tokens/s", *WAYS, "ratio", "spread"]
    publish("training", markdown(header, rows))


if __name__ == "__main__":
    main()
