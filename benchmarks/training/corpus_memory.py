"""Memory and start of a run that reads a written dataset of 2 GB (about 1 min, 2 GB of disk).

The claim: after 20,000 samples in Megatron's order, a rank's private memory has grown by at most 300 MB, and the data are
ready within 10 s of the start, both without the index cache in `--data-cache-path` and with it. Pages of the dataset itself
belong to the page cache, which all ranks of a machine share.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.support.tables import markdown
from megatron_ssm.train.corpus import Corpus
from megatron_ssm.train.options import Options
from megatron_ssm.train.prepare import INDEX_VERSION, MAGIC, TYPE_CODES

TOKENS, LENGTHS = 1_000_000_000, (200, 3000)  # of the dataset, in uint16; of its documents, from and to
SEQ, BATCH, SAMPLES = 1024, 16, 20_000
MOST_MB, MOST_S = 300, 10


def write_dataset(prefix: Path) -> None:
    """Write random tokens as a Megatron dataset: the bytes of `prepare`, without the time to tokenize them."""
    random = np.random.default_rng(0)
    lengths = random.integers(*LENGTHS, TOKENS * 2 // sum(LENGTHS), dtype=np.int32)
    with open(prefix.with_suffix(".bin"), "wb") as file:
        for first in range(0, len(lengths), 10_000):
            random.integers(0, 256, lengths[first : first + 10_000].sum(), dtype=np.uint16).tofile(file)
    starts = np.concatenate([[0], lengths[:-1].cumsum(dtype=np.int64) * 2])
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(MAGIC + INDEX_VERSION.to_bytes(8, "little") + bytes([TYPE_CODES[np.uint16]]))
        np.array([len(lengths), len(lengths) + 1], dtype=np.uint64).tofile(file)
        for numbers in (lengths, starts.astype(np.int64), np.arange(len(lengths) + 1, dtype=np.int64)):
            numbers.tofile(file)


def anonymous_bytes() -> int:
    """The memory of this process without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def read(folder: Path) -> None:
    """Print the seconds until the first batch, and the growth of anonymous memory over all samples."""
    before, start = anonymous_bytes(), time.perf_counter()
    options = Options(
        data=(str(folder / "corpus"),), out=str(folder / "out"), seq_length=SEQ, global_batch_size=BATCH,
        train_samples=SAMPLES,
    )  # fmt: skip
    batches = Corpus(options).batches(options, SAMPLES)
    batches.open()
    batches.samples(0, BATCH)
    ready = time.perf_counter() - start
    for first in range(BATCH, SAMPLES, BATCH):
        batches.samples(first, BATCH)
    print(json.dumps([ready, (anonymous_bytes() - before) / 1e6]))


def main() -> int:
    """Print the table; returns 1 if the claim does not hold."""
    if sys.argv[1:]:
        read(Path(sys.argv[1]))
        return 0
    rows, found = [], []
    with tempfile.TemporaryDirectory() as name:
        write_dataset(Path(name) / "corpus")
        for start in ("without index cache", "with index cache"):
            run = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True, check=True)
            seconds, megabytes = json.loads(run.stdout.splitlines()[-1])
            found.append(seconds <= MOST_S and megabytes <= MOST_MB)
            rows.append([start, f"{seconds:.1f} s", f"{megabytes:.0f} MB"])
    print(markdown(["2 GB of tokens", "ready after", f"private memory after {SAMPLES:,} samples"], rows))
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
