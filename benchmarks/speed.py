"""Prefill and decode against transformers at the 130m shapes, one thread, pure torch (about 3 min).

The claim: prefill of 256 tokens >= 1.3x, decode at batch 1 >= 1.0x. Both engines run the same random checkpoint, in
turn, in one process; transformers runs twice, and the difference between its two runs is the spread.
"""

import os
import tempfile

os.environ.update(OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")

import torch
from _tables import interleaved, markdown, publish
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig
from transformers.utils import logging

import megatron_ssm

PROMPT, NEW, REPETITIONS = 256, 16, 10
SHAPES = {
    "Mamba-1 130m": MambaConfig(hidden_size=768, num_hidden_layers=24, vocab_size=50280),
    "Mamba-2 130m": Mamba2Config(
        hidden_size=768, num_hidden_layers=24, vocab_size=50288, num_heads=24, head_dim=64, n_groups=1, state_size=128,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


def contestants(config):
    """{engine: (prefill, decode)}: functions that run one repetition, decode NEW tokens after a prompt."""
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        ours = megatron_ssm.load(directory)
    ids = torch.randint(0, config.vocab_size, (1, PROMPT))
    token = ids[:, :1]
    their_cache = theirs(ids, use_cache=True, logits_to_keep=1).cache_params
    our_cache = ours.new_cache(1)
    ours(ids, cache=our_cache, logits_to_keep=1)

    def their_decode():
        for _ in range(NEW):
            theirs(token, cache_params=their_cache, use_cache=True)

    def our_decode():
        for _ in range(NEW):
            ours(token, cache=our_cache)

    def their_prefill():
        theirs(ids, use_cache=True, logits_to_keep=1)

    def our_prefill():
        ours(ids, cache=ours.new_cache(1), logits_to_keep=1)

    return {"prefill": (their_prefill, our_prefill), "decode": (their_decode, our_decode)}


@torch.no_grad()
def main():
    """Measure both shapes and publish the table."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows = []
    for shape, config in SHAPES.items():
        for phase, (theirs, ours) in contestants(config).items():
            times = interleaved({"theirs": theirs, "ours": ours, "again": theirs}, REPETITIONS)
            per = (lambda s: f"{NEW / s:.1f} tokens/s") if phase == "decode" else (lambda s: f"{s:.2f} s")
            base = (times["theirs"] + times["again"]) / 2
            spread = abs(times["theirs"] / times["again"] - 1)
            rows.append([shape, phase, per(base), per(times["ours"]), f"{base / times['ours']:.2f}x", f"{spread:.1%}"])
    publish("speed", markdown(["shape", f"prompt {PROMPT}", "transformers", "megatron-ssm", "ratio", "spread"], rows))


if __name__ == "__main__":
    main()
