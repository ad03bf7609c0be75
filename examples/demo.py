"""The main task, small: train a hybrid on two ranks, ask it what it has never seen, and leave it for a chat.

python examples/demo.py [DIRECTORY]   (default: demo; `make demo` runs it)

Nothing is downloaded: the text is Python's own documentation, which is part of every CPython (see corpus.py), and phrases.py
makes the conversations.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(TRANSFORMERS_VERBOSITY="error")

import torch
from corpus import write_corpus
from phrases import TEMPLATE, write_phrases
from replies import replies
from tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import megatron_ssm
from commfabric.foundation.command_line import run, silence_third_parties

HERE = Path(__file__).resolve().parent
VOCABULARY = 768  # tokens of the byte-pair encoding
# There is one right reply, so the most likely token is taken; the first token, 0, ends a text.
GREEDY = '{"do_sample": false, "max_new_tokens": 32, "eos_token_id": 0, "pad_token_id": 0}\n'
LEAST = 0.9  # share of the replies that must be right
SHOWN = 3  # wrong replies that are printed
TIMED = 64  # new tokens in the comparison of speeds


def main(directory: str | Path = "demo") -> None:
    """Run the demo and write its files to `directory`. ValueError if a result is not as promised."""
    torch.set_num_threads(1)
    disable_progress_bar()
    text, model = Path(directory) / "text", Path(directory) / "model"
    topics, _ = write_corpus(text, extra=False)
    asked = write_phrases(text)
    print(
        f"to learn: {len(topics)} topics of Python's documentation, and dates, times and amounts with their standard form"
    )
    print(f"held out: {len(asked)} phrases, whose two numbers and phrasing are never together in the text to learn")
    train(text, model)
    check_replies(model, asked)
    compare_with_transformers(model, next(iter(asked)))
    print(f"\nTo ask it yourself:\n{os.path.relpath(Path(sys.executable).parent)}/megatron-ssm chat {model}")


def train(text: Path, model: Path) -> None:
    """Train a tokenizer, and then the model on two tensor-parallel ranks."""
    tokenizer = text.parent / "tokenizer"
    train_tokenizer(tokenizer, VOCABULARY, sorted((text / "train").iterdir()))
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    (tokenizer / "generation_config.json").write_text(GREEDY)
    script, options, sizes = (os.path.relpath(HERE / name) for name in ("pretrain.py", "demo.yaml", "demo.json"))
    command = [script, "--config", options, "--model-config", sizes, "--tokenizer-model", str(tokenizer),
               "--data", str(text / "train"), "--valid-data-path", str(text / "held_out"), "--out", str(model)]  # fmt: skip
    print(f"\n$ torchrun --nproc-per-node 2 -- {' '.join(command)}", flush=True)
    start = time.perf_counter()
    on_two_ranks(*command)
    print(f"trained in {time.perf_counter() - start:.0f} s, starting and saving included")


def on_two_ranks(*command: str, **options: Any) -> str:
    """Run a script under torchrun, with one thread per rank; ValueError if it fails, after it has printed why."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    done = subprocess.run([*torchrun, *command], env={"OMP_NUM_THREADS": "1", **os.environ}, text=True, **options)
    if done.returncode:
        raise ValueError(f"{command[0]} failed with exit code {done.returncode}")
    return done.stdout


def check_replies(model: Path, asked: dict[str, str]) -> None:
    """Ask one rank and two for the forms of the held-out phrases. ValueError if they differ, or too few are right."""
    messages = model.parent / "messages.txt"
    messages.write_text("\n".join(asked), encoding="utf-8")
    one = replies(model, list(asked))
    two = json.loads(on_two_ranks(str(HERE / "replies.py"), str(model), str(messages), stdout=subprocess.PIPE))
    if one != two:
        raise ValueError("1 rank and 2 ranks reply differently")
    results = list(zip(asked, one, asked.values(), strict=True))
    right = {phrase: reply for phrase, reply, form in results if reply == form}
    kinds = {re.sub(r"\w", "", reply): f"  {phrase} -> {reply}" for phrase, reply in right.items()}  # by punctuation
    wrong = [f"  {phrase} -> {reply!r}   (wrong: it is {form})" for phrase, reply, form in results if reply != form]
    share = len(right) / len(results)
    print(f"\n{share:.1%} of {len(results)} replies to held-out phrases are exact; 1 rank and 2 ranks reply the same:")
    print("\n".join([*kinds.values(), *wrong[:SHOWN]]))
    if share < LEAST:
        raise ValueError(f"only {share:.1%} of the replies are exact, and at least {LEAST:.0%} should be")


def compare_with_transformers(directory: Path, message: str) -> None:
    """Compare the logits of both libraries, and the speed of one thread."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": message}]
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True).input_ids
    with torch.no_grad():
        theirs, ours = AutoModelForCausalLM.from_pretrained(directory), megatron_ssm.load(directory)
        difference = (ours(ids) - theirs(ids).logits).abs().max().item()
    name = type(theirs).__name__
    print(f"transformers reads the model as {name}; its logits differ by at most {difference:.1e}")
    if not difference < 1e-3:
        raise ValueError("the logits differ from transformers'")
    speeds, options = [], dict(do_sample=False, min_new_tokens=TIMED, max_new_tokens=TIMED)
    for each in (theirs, ours):
        each.generate(ids, **options)  # the first call loads what the others find
        start = time.perf_counter()
        each.generate(ids, **options)
        speeds.append(TIMED / (time.perf_counter() - start))
    print(f"tokens per second on one thread: {speeds[0]:.0f} with transformers, {speeds[1]:.0f} with megatron-ssm")


if __name__ == "__main__":
    silence_third_parties()
    sys.exit(run("demo", lambda: main(*sys.argv[1:])))
