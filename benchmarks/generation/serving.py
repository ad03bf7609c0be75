"""Continuous batching and the prefix cache: the engine against one request after the other (about 6 min).

The claims: a batch of requests takes less time than the same requests one by one; and the first token comes sooner if the
beginning of the prompt was read before. Mamba-2 at the 130m shape with random weights in fp32, on one rank of one thread.
Contestants run in turn. The one without the feature runs twice, and the difference of its two times is the spread.
"""

import os
from collections.abc import Callable

os.environ.update(OMP_NUM_THREADS="1")

import torch

import megatron_ssm
from benchmarks.support.tables import interleaved, markdown, publish
from megatron_ssm import families
from megatron_ssm.checkpoints.hf import build

CONFIG = dict(
    model_type="mamba2", hidden_size=768, num_hidden_layers=24, vocab_size=50288, num_heads=24, head_dim=64, n_groups=1,
    state_size=128, tie_word_embeddings=True,
)  # fmt: skip
REQUESTS, PROMPT, NEW, SLOTS = 16, 32, 16, 8
SHARED, OWN = 512, 32  # tokens at the beginning that all prompts share, and tokens that only one prompt has
REPETITIONS = 10


def random_ids(count: int, seed: int) -> list[int]:
    """`count` random token ids, the same for the same seed."""
    return torch.randint(CONFIG["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def serve(model: megatron_ssm.Model, slots: int) -> list[list[int]]:
    """The new tokens of all requests, from an engine with `slots` slots."""
    engine = megatron_ssm.Engine(model, slots=slots)
    requests = [engine.add(random_ids(PROMPT, seed), max_new_tokens=NEW) for seed in range(REQUESTS)]
    while engine.is_busy:
        engine.step()
    return [request.tokens for request in requests]


def first_token(engine: megatron_ssm.Engine, seed: int) -> list[int]:
    """The first new token after a prompt of the SHARED tokens and OWN random ones."""
    request = engine.add(random_ids(SHARED, 0) + random_ids(OWN, seed), max_new_tokens=1)
    return list(engine.stream(request))


def row(what: str, times: dict[str, float], per: Callable[[float], str]) -> list[str]:
    """A row of the table. times: seconds "without" and "with" the feature, and "again" without. per: formats seconds."""
    base = (times["without"] + times["again"]) / 2
    spread = abs(times["without"] / times["again"] - 1)
    return [what, per(base), per(times["with"]), f"{base / times['with']:.2f}x", f"{spread:.1%}"]


def main() -> None:
    """Measure both claims and publish the table."""
    torch.set_num_threads(1)
    model = megatron_ssm.initialize(build(families.from_dict(CONFIG)))
    if serve(model, SLOTS) != serve(model, 1):
        raise ValueError("the batch's tokens differ from those of single requests")
    cold, warm = megatron_ssm.Engine(model), megatron_ssm.Engine(model, prefix_bytes=10**9)
    first_token(warm, 0)
    seeds = iter(range(1, 10**6))

    def one_by_one() -> None:
        serve(model, 1)

    def read_all() -> None:
        first_token(cold, next(seeds))

    batch = interleaved({"without": one_by_one, "with": lambda: serve(model, SLOTS), "again": one_by_one}, REPETITIONS)
    first = {"without": read_all, "with": lambda: first_token(warm, next(seeds)), "again": read_all}
    tokens = REQUESTS * NEW
    rows = [
        row(f"{REQUESTS} requests, {PROMPT} + {NEW} tokens each: one by one, {SLOTS} slots", batch,
            lambda s: f"{tokens / s:.1f} tokens/s"),
        row(f"first token after {SHARED} shared + {OWN} own tokens: read all, prefix cache",
            interleaved(first, REPETITIONS), lambda s: f"{s:.2f} s"),
    ]  # fmt: skip
    publish("serving", markdown(["what", "without", "with", "ratio", "spread"], rows))


if __name__ == "__main__":
    main()
