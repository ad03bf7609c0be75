"""Continuous batching and the prefix cache: the engine against one request after the other (about 6 min).

The claims: a batch of requests takes less time than the same requests one by one, and a prompt whose beginning was read
before starts sooner. Mamba-2 at the 130m shape, random weights, fp32, one thread, one rank; contestants in turn, the
first of them twice: the difference is the spread.
"""

import os

os.environ.update(OMP_NUM_THREADS="1")

import torch

import megatron_ssm
from benchmarks.support.tables import interleaved, markdown, publish
from megatron_ssm.checkpoints.hf import build

CONFIG = dict(
    model_type="mamba2", hidden_size=768, num_hidden_layers=24, vocab_size=50288, num_heads=24, head_dim=64, n_groups=1,
    state_size=128, tie_word_embeddings=True,
)  # fmt: skip
REQUESTS, PROMPT, NEW, SLOTS = 16, 32, 16, 8
SHARED, OWN = 512, 32  # tokens of a prompt that others have too, and of its own
REPETITIONS = 10


def random_ids(count, seed):
    """Token ids."""
    return torch.randint(CONFIG["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def serve(model, slots):
    """All requests through an engine of so many slots."""
    engine = megatron_ssm.Engine(model, slots=slots)
    requests = [engine.add(random_ids(PROMPT, seed), max_new_tokens=NEW) for seed in range(REQUESTS)]
    while engine.is_busy:
        engine.step()
    return [request.tokens for request in requests]


def first_token(engine, seed):
    """The first token after the shared beginning and something new."""
    request = engine.add(random_ids(SHARED, 0) + random_ids(OWN, seed), max_new_tokens=1)
    return list(engine.stream(request))


def row(what, times, per):
    """A line of the table from the times of "without", "with" and "again" (without, once more)."""
    base = (times["without"] + times["again"]) / 2
    spread = abs(times["without"] / times["again"] - 1)
    return [what, per(base), per(times["with"]), f"{base / times['with']:.2f}x", f"{spread:.1%}"]


def main():
    """Measure both claims and publish the table."""
    torch.set_num_threads(1)
    model = megatron_ssm.initialize(build(megatron_ssm.Config.from_dict(CONFIG)))
    if serve(model, SLOTS) != serve(model, 1):
        raise ValueError("the batch's tokens differ from those of single requests")
    cold, warm = megatron_ssm.Engine(model), megatron_ssm.Engine(model, prefix_bytes=10**9)
    first_token(warm, 0)
    seeds = iter(range(1, 10**6))

    def one_by_one():
        serve(model, 1)

    def read_all():
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
