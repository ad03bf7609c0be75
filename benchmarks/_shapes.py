"""The 130m shapes, with random weights, as checkpoints for the benchmarks of speed."""

import os
from pathlib import Path

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")

from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig
from transformers.utils import logging

PROMPT = 256
SHAPES = {
    "Mamba-1 130m": MambaConfig(hidden_size=768, num_hidden_layers=24, vocab_size=50280),
    "Mamba-2 130m": Mamba2Config(
        hidden_size=768, num_hidden_layers=24, vocab_size=50288, num_heads=24, head_dim=64, n_groups=1, state_size=128,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


def random_model(shape: str, directory):
    """transformers' model of a shape, saved in `directory` as well."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(SHAPES[shape]).eval()
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    return model
