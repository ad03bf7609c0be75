"""The main task on real text: train a small language model on two ranks, save it, and generate from it on one and on two.

python examples/demo.py [DIRECTORY]   (default: demo; `make demo` runs it)

Nothing is downloaded: the text is Python's own documentation, which is part of every CPython (see corpus.py).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from corpus import HELD_OUT, NGRAM, write_corpus
from tokenizer import train_tokenizer

from megatron_ssm.training.text_statistics import bigram_nats_per_byte, longest_shared, ngram_overlap
from sparsefusion.foundation.command_line import run, silence_third_parties

HERE = Path(__file__).resolve().parent
PROMPT = "If the argument is"
VOCABULARY, STEPS = 1024, 700  # tokens of the byte-pair encoding; steps of the training
TIMED = 64  # new tokens in the comparison of speeds
SAMPLING = ["--temperature", "0.5", "--seed", "1", "--max-new-tokens", "200"]
MAX_OVERLAP = 0.10  # share of the held-out text's n-grams that may occur in the training text
MAX_LOSS, MARGIN = 1.25, 0.8  # held-out loss in nats/byte: its limit, and how far it must be below the bigram baseline


def main(directory: str | Path = "demo") -> None:
    """Run the demo and write its files to `directory`. ValueError if a result is not as promised."""
    directory = Path(directory)
    train, held_out, bigram = prepare_text(directory / "text")
    nats = train_model(directory, train, held_out)
    print(f"\nheld-out loss {nats:.3f} nats/byte; a bigram model has {bigram:.3f}")
    if not (nats <= MAX_LOSS and bigram - nats >= MARGIN):  # also refuses NaN
        raise ValueError(
            f"the held-out loss is not at most {MAX_LOSS} nats/byte and {MARGIN} below the bigram baseline"
        )
    command = f"python -m megatron_ssm generate --model {directory / 'model'} --prompt {PROMPT!r}"
    print(f"\n$ {command} {' '.join(SAMPLING)}")
    one, two = (generate(directory / "model", ranks) for ranks in (1, 2))
    print(PROMPT + one["text"])
    shared = longest_shared(one["text"], [path.read_text(encoding="utf-8") for path in train])
    print(f"\nlongest piece of it in the training text: {len(shared)} characters, {shared!r}")
    if one["tokens"] != two["tokens"]:
        raise ValueError(f"1 and 2 ranks generated different tokens: {one['tokens']} and {two['tokens']}")
    print(f"1 and 2 ranks generated the same {len(one['tokens'])} tokens")
    compare_with_transformers(directory / "model")
    server = Path(sys.executable).parent / "megatron-ssm"
    print(f"\nto see it continue what you write in a browser: {server} serve --model {directory / 'model'}")
    print("then open http://127.0.0.1:8000; examples/speedrun.sh makes a model that answers questions")


def prepare_text(folder: Path) -> tuple[list[Path], list[Path], float]:
    """Write the text and print what it is; returns (training paths, held-out paths, bigram baseline in nats/byte)."""
    paths = write_corpus(folder)
    train, held_out = ([path.read_text(encoding="utf-8") for path in side] for side in paths)
    overlap, bigram = ngram_overlap(held_out, train, NGRAM), bigram_nats_per_byte(train, held_out)
    sizes = [sum(len(text.encode()) for text in side) for side in (train, held_out)]
    print(
        f"text: Python's documentation and docstrings, {sizes[0]:,} bytes to train on; {sizes[1]:,} held out, whole topics:"
    )
    print(f"  {', '.join(HELD_OUT)}")
    print(
        f"  {overlap:.1%} of the held-out {NGRAM}-grams stand in the training text; bigram baseline {bigram:.3f} nats/byte"
    )
    if overlap > MAX_OVERLAP:
        raise ValueError(
            f"the held-out text is not held out: {overlap:.1%} of its {NGRAM}-grams are in the training text"
        )
    return *paths, bigram


def train_model(directory: Path, train: list[Path], held_out: list[Path]) -> float:
    """Train on two tensor-parallel ranks under torchrun, one thread each; returns the held-out loss in nats/byte."""
    log, tokenizer = directory / "train.jsonl", directory / "tokenizer"
    train_tokenizer(tokenizer, VOCABULARY, train)
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "--", str(HERE / "pretrain.py"), "--config",
               str(HERE / "demo.yaml"), "--tensor-model-parallel-size", "2", "--tokenizer-model", str(tokenizer),
               "--train-iters", str(STEPS), "--data", str(train[0].parent),
               "--valid-data-path", str(held_out[0].parent), "--out", str(directory / "model"),
               "--log", str(log)]  # fmt: skip
    print("\n$ " + " ".join(command), flush=True)
    start = time.perf_counter()
    run_quietly([sys.executable, "-m", "torch.distributed.run", *command[1:]])
    print(f"trained in {time.perf_counter() - start:.0f} s, starting and saving included")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "held_out_nats_per_byte" in line][-1]["held_out_nats_per_byte"]


def generate(model: Path, ranks: int) -> dict[str, Any]:
    """The command line's JSON output on 1 or 2 ranks."""
    command = [sys.executable, "-m", "megatron_ssm", "generate", "--model", str(model), "--prompt", PROMPT, "--json",
               *SAMPLING, "--tp", str(ranks)]  # fmt: skip
    return json.loads(run_quietly(command, stdout=subprocess.PIPE).stdout)


def run_quietly(command: list[str], **options: Any) -> subprocess.CompletedProcess:
    """Run a command with one thread per rank; ValueError if it fails, after it has printed why."""
    done = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, **options)
    if done.returncode:
        raise ValueError(f"{command[2]} failed with exit code {done.returncode}")
    return done


def compare_with_transformers(model: Path) -> None:
    """Load the checkpoint with transformers, if that is installed; compare the logits, and the speed of one process."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        print("transformers is not installed: its logits were not compared")
        return
    import torch

    import megatron_ssm

    disable_progress_bar()
    ids = AutoTokenizer.from_pretrained(model)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        theirs, ours = AutoModelForCausalLM.from_pretrained(model), megatron_ssm.load(model)
        difference = (ours(ids) - theirs(ids).logits).abs().max().item()
    print(f"transformers loads the checkpoint and gives the same logits: largest difference {difference:.1e}")
    if not difference < 1e-3:
        raise ValueError("the logits differ from transformers'")
    speeds, options = [], dict(do_sample=False, min_new_tokens=TIMED, max_new_tokens=TIMED)
    for each in (theirs, ours):
        each.generate(ids, **options)  # the first call loads what the others find
        start = time.perf_counter()
        each.generate(ids, **options)
        speeds.append(TIMED / (time.perf_counter() - start))
    print(f"generation in one process: transformers {speeds[0]:.0f} tokens/s, megatron-ssm {speeds[1]:.0f} tokens/s")


if __name__ == "__main__":
    silence_third_parties()
    sys.exit(run("demo", lambda: main(*sys.argv[1:])))
