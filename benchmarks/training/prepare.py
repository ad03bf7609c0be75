"""`megatron-ssm prepare` against tokenizers' `encode_batch` alone, on the same texts (about 1 min).

The claim: prepare, which also reads JSON lines and writes a Megatron dataset, tokenizes at least 0.8 times as many bytes per
second as `encode_batch` with a BPE of up to 32,768 tokens.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.support.tables import markdown
from megatron_ssm.train.prepare import BATCH_DOCUMENTS, prepare

SOURCES = Path(os.__file__).parent  # Python's standard library, a text that is everywhere
MEGABYTES, RUNS, LEAST = 8, 3, 0.8


def texts() -> list[str]:
    """About MEGABYTES of Python's sources, in documents of 4,000 characters, repeated if they are fewer."""
    whole = "\n".join(path.read_text(errors="replace") for path in sorted(SOURCES.glob("*.py")))
    parts = [whole[at : at + 4000] for at in range(0, len(whole), 4000)]
    return parts * (1 + MEGABYTES * 1_000_000 // len(whole))


def train(documents: list[str], folder: Path) -> Tokenizer:
    """A byte-level BPE, written to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=32_768, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def main() -> int:
    """Print the table; returns 1 if the claim does not hold."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    documents = texts()
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = train(documents, folder)
        with open(folder / "texts.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
        bare, whole = [], []
        for _ in range(RUNS):  # in turn, so that other load meets both
            start = time.perf_counter()
            for at in range(0, len(documents), BATCH_DOCUMENTS):
                tokenizer.encode_batch(documents[at : at + BATCH_DOCUMENTS], add_special_tokens=False)
            bare.append(megabytes / (time.perf_counter() - start))
            start = time.perf_counter()
            prepare([folder / "texts.jsonl"], folder / "out", str(folder))
            whole.append(megabytes / (time.perf_counter() - start))
    ratio = median(whole) / median(bare)
    rows = [[f"{median(bare):.1f}", f"{median(whole):.1f}", f"{ratio:.2f}"]]
    print(markdown(["`encode_batch` MB/s", "prepare MB/s", "ratio"], rows))
    return int(ratio < LEAST)


if __name__ == "__main__":
    sys.exit(main())
