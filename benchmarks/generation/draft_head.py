"""Speculative decoding by a draft head against decoding token by token and prompt lookup, at batch 1 (about 6 min).

The claim: >= 1.3x as fast as decoding token by token, with the acceptance that the head reaches after it was trained here.
The 150m shape of Qwen3.5 with an untied head, one thread, by format of the weights. Its weights are random, but each token
is likely to be followed by the next one of a long phrase, and sometimes by another token, so that the text seldom repeats
itself: prompt lookup finds little in it. The draft head begins with random weights and is trained on such text. All
contestants run in turn and give the same tokens. Plain decoding runs twice, and the difference of its two times is the
spread.
"""

import copy
import os
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="2")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import megatron_ssm
from benchmarks.support.shapes import HYBRIDS, processor
from benchmarks.support.tables import interleaved, markdown, print_or_publish
from megatron_ssm import families
from megatron_ssm.spec.fields import hf_shapes

NEW, LONGEST, REPETITIONS = 96, 7, 4
PHRASE, JUMPS = 120, 0.1  # tokens; how often another token follows in training
TEXTS = {"greedy": 0.0, "sampled": 1.05}  # temperatures
STEPS, SEQ, BATCH, RATE = 60, 96, 2, 4e-3  # of training
FORMATS = {"fp32": {}, "bf16": dict(dtype=torch.bfloat16), "int8": dict(weights="int8")}


@torch.no_grad()
def save_model(directory: Path) -> torch.Tensor:
    """A model whose tokens follow one another in phrases, with a random draft head; returns the token after each."""
    torch.manual_seed(0)
    config = copy.deepcopy(HYBRIDS["Qwen3.5"])
    config.tie_word_embeddings, config.num_mtp_layers, config.mtp_layer_types = False, 1, ["full_attention"]
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        mixer = layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj
        mixer.weight *= 1e-2
        layer.mlp.down_proj.weight *= 1e-2
    ids = torch.arange(config.vocab_size)
    following = ids // PHRASE * PHRASE + (ids + 1) % PHRASE  # the vocabulary is a multiple of PHRASE
    model.lm_head.weight[following] = model.model.embed_tokens.weight
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name, shape in hf_shapes(families.read(directory).with_draft_head().fields()).items():
        if name.startswith("mtp."):
            tensors[name] = torch.zeros(shape) if "norm" in name else 0.02 * torch.randn(shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return following


def train(directory: Path, following: torch.Tensor, target: Path) -> float:
    """Train the draft head on text of such phrases, and save the model; returns how often it guesses right in the end."""
    model = megatron_ssm.load(directory, draft_head=True)
    head, generator = model.requires_grad_(False).draft_head, torch.Generator().manual_seed(1)
    head.requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), lr=RATE)
    right = 0.0
    for _ in range(STEPS):
        columns = [torch.randint(len(following), (BATCH,), generator=generator)]
        while len(columns) < SEQ + 1:
            others = torch.randint(len(following), (BATCH,), generator=generator)
            columns.append(following[columns[-1]].where(torch.rand(BATCH, generator=generator) > JUMPS, others))
        ids = torch.stack(columns, dim=1)
        with torch.no_grad():
            cache = model.new_cache(BATCH)
            model.next_logits(ids[:, :-2], cache=cache, prompt=True)
            hidden = cache.states["final"].per_token["hidden"][:, : SEQ - 1].clone()
            embeddings = model.embedded(ids[:, 1:-1])
        logits = model.scaled_logits(head(embeddings, hidden))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = float((logits.argmax(-1) == ids[:, 2:]).float().mean())
    megatron_ssm.save(model, target)
    return right


def decode(model: megatron_ssm.Model, longest: int, temperature: float) -> tuple[list[int], tuple[int, int]]:
    """The new tokens of a text, and how many were proposed and accepted."""
    engine = megatron_ssm.Engine(model, slots=1, speculate=longest)
    request = engine.add(range(16), NEW, temperature=temperature, seed=1)
    while engine.is_busy:
        engine.step()
    return request.tokens, engine.speculated


def rows_of(format: str, directory: Path) -> list[list[str]]:
    """A row for each text."""
    plain, with_head = (megatron_ssm.load(directory, draft_head=has, **FORMATS[format]) for has in (False, True))
    contestants = {"plain": (plain, 0), "lookup": (plain, LONGEST), "head": (with_head, LONGEST), "again": (plain, 0)}
    rows = []
    for text, temperature in TEXTS.items():
        found = {name: decode(*each, temperature) for name, each in contestants.items()}
        if any(tokens != found["plain"][0] for tokens, _ in found.values()):
            raise ValueError(f"{format}: the tokens differ with speculative decoding")
        functions = {name: lambda each=each, t=temperature: decode(*each, t) for name, each in contestants.items()}
        times = interleaved(functions, REPETITIONS)
        base = (times["plain"] + times["again"]) / 2
        proposed, accepted = found["head"][1]
        rows.append([
            format, text, f"{NEW / base:.1f} tokens/s", f"{base / times['lookup']:.2f}x", f"{base / times['head']:.2f}x",
            f"{accepted / max(1, proposed):.0%}", f"{abs(times['plain'] / times['again'] - 1):.1%}",
        ])  # fmt: skip
    return rows


def main() -> None:
    """Train the head, measure all formats, and publish the table."""
    with tempfile.TemporaryDirectory() as temporary:
        source, trained = Path(temporary, "source"), Path(temporary, "trained")
        right = train(source, save_model(source), trained)
        print(f"after {STEPS} steps of training, {right:.0%} of the guesses are right", flush=True)
        torch.set_num_threads(1)
        rows = []
        for format in FORMATS:
            rows += rows_of(format, trained)
            print(rows[-2:], flush=True)
    header = [
        processor(),
        "text",
        "token by token",
        "prompt lookup",
        "draft head",
        "accepted of its proposals",
        "spread",
    ]
    print_or_publish("draft-head", markdown(header, rows))


if __name__ == "__main__":
    main()
