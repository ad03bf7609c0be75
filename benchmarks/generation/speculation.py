"""Speculative decoding by prompt lookup against decoding token by token, at batch 1 (about 12 min).

The claims: on repetitive text it is >= 1.5x as fast, aim 2x; on text without repetitions, and on text whose repetitions are
misleading, it is never below 0.95x. Both 130m shapes, one thread, by format of the weights. Contestants run in turn and give
the same tokens. Plain decoding runs twice, and the difference of its two times is the spread.

The weights are random, but the head makes each token likely to be followed by the next one of its phrase, and the last one
by the first. So the texts are under control: one phrase that repeats, by greedy search; phrases that change after some
repetitions, by sampling; and with a very high temperature samples from all tokens, or from FEW, so that pairs of tokens
often occur again and tell nothing about the next one.
"""

import copy
import os
import tempfile

os.environ.update(OMP_NUM_THREADS="1")

import torch
from transformers import AutoModelForCausalLM

import megatron_ssm
from benchmarks.support.shapes import SHAPES
from benchmarks.support.tables import interleaved, markdown, publish

NEW, LONGEST, REPETITIONS = 64, 7, 6
PHRASE, FEW = 8, 16  # tokens
FORMATS = {"fp32": {}, "bf16": dict(dtype=torch.bfloat16), "int8": dict(weights="int8")}
CHANGING = {"Mamba-1 130m": 2.2, "Mamba-2 130m": 5.3}  # the temperature at which a phrase lasts for some repetitions
TEXTS = {
    "one phrase": {},
    "changing phrases": dict(seed=1),
    "no repetitions": dict(temperature=1000.0, seed=1),
    "misleading": dict(temperature=1000.0, seed=1, logit_bias=dict.fromkeys(range(FEW), 1e6)),
}


@torch.no_grad()
def save_model(shape: str, directory: str) -> None:
    """A model of this shape: a head of its own for the phrases, and blocks that change the embeddings little."""
    torch.manual_seed(0)
    config = copy.deepcopy(SHAPES[shape])
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    for block in model.backbone.layers:
        block.mixer.out_proj.weight *= 1e-3
    ids = torch.arange(config.vocab_size)
    following = ids // PHRASE * PHRASE + (ids + 1) % PHRASE  # the vocabulary is a multiple of PHRASE
    model.lm_head.weight[following] = model.backbone.embeddings.weight
    model.save_pretrained(directory)


def decode(model: megatron_ssm.Model, options: dict, longest: int) -> tuple[list[int], int]:
    """The new tokens of a text with these options of sampling, and in how many steps they came."""
    engine, steps = megatron_ssm.Engine(model, slots=1, speculate=longest), 0
    request = engine.add(range(PHRASE), NEW, **options)
    while engine.is_busy:
        engine.step()
        steps += 1
    return request.tokens, steps


def measured(model: megatron_ssm.Model, text: str, temperature: float) -> list[str]:
    """The cells of a row: plain and speculative decoding, tokens per step, ratio and spread."""
    options = TEXTS[text] | (dict(temperature=temperature) if text == "changing phrases" else {})
    expected, _ = decode(model, options, 0)
    found, steps = decode(model, options, LONGEST)
    if found != expected:
        raise ValueError(f"{text}: the tokens differ with speculative decoding")
    longest = {"plain": 0, "ahead": LONGEST, "again": 0}
    times = interleaved({name: lambda n=n: decode(model, options, n) for name, n in longest.items()}, REPETITIONS)
    base = (times["plain"] + times["again"]) / 2
    return [
        f"{NEW / base:.1f} tokens/s", f"{NEW / times['ahead']:.1f} tokens/s", f"{NEW / steps:.2f}",
        f"{base / times['ahead']:.2f}x", f"{abs(times['plain'] / times['again'] - 1):.1%}",
    ]  # fmt: skip


def main() -> None:
    """Measure all shapes, formats and texts, and publish the table."""
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            save_model(shape, directory)
            models = {name: megatron_ssm.load(directory, **options) for name, options in FORMATS.items()}
        for name, model in models.items():
            rows += [[f"{shape}, {name}", text, *measured(model, text, CHANGING[shape])] for text in TEXTS]
    header = ["model", "text", "plain", f"up to {LONGEST} proposals", "tokens per step", "ratio", "spread"]
    publish("speculation", markdown(header, rows))


if __name__ == "__main__":
    main()
