"""Continuous batching and the prefix cache: the engine against one request after the other (about 4 min).

The claims: a batch of requests takes less time than the same requests one by one, and a prompt whose beginning was read
before starts sooner. Mamba-2 at the 130m shape, random weights, fp32, one thread, one rank; contestants in turn.
"""

import os

os.environ.update(OMP_NUM_THREADS="1")

import torch
from _tables import interleaved, markdown, publish

import megatron_ssm
from megatron_ssm.checkpoint import build

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
    while engine.busy:
        engine.step()
    return [request.tokens for request in requests]


def first_token(engine, seed):
    """The first token after the shared beginning and something new."""
    request = engine.add(random_ids(SHARED, 0) + random_ids(OWN, seed), max_new_tokens=1)
    return list(engine.stream(request))


def main():
    """Measure both claims and publish the table."""
    torch.set_num_threads(1)
    model = megatron_ssm.initialize(build(megatron_ssm.Config.from_dict(CONFIG)))
    if serve(model, SLOTS) != serve(model, 1):
        raise ValueError("the batch's tokens differ from those of single requests")
    cold, warm = megatron_ssm.Engine(model), megatron_ssm.Engine(model, prefix_bytes=10**9)
    first_token(warm, 0)
    seeds = iter(range(1, 10**6))
    batch = interleaved({"alone": lambda: serve(model, 1), "batch": lambda: serve(model, SLOTS)}, REPETITIONS)
    start = interleaved({"cold": lambda: first_token(cold, next(seeds)), "warm": lambda: first_token(warm, next(seeds))},
                        REPETITIONS)  # fmt: skip
    tokens = REQUESTS * NEW
    rows = [
        [f"{REQUESTS} requests, {PROMPT} + {NEW} tokens each", f"one by one: {tokens / batch['alone']:.1f} tokens/s",
         f"{SLOTS} slots: {tokens / batch['batch']:.1f} tokens/s", f"{batch['alone'] / batch['batch']:.2f}x"],
        [f"first token after {SHARED} shared + {OWN} own tokens", f"cold: {start['cold']:.2f} s",
         f"prefix cache: {start['warm']:.2f} s", f"{start['cold'] / start['warm']:.1f}x"],
    ]  # fmt: skip
    publish("serving", markdown(["what", "without", "with", "ratio"], rows))


if __name__ == "__main__":
    main()
