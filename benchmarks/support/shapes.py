"""Shapes of models: of 130m parameters, to be saved with random weights, and of published checkpoints. The processor."""

import os
from pathlib import Path

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")

from transformers import (
    AutoModelForCausalLM,
    FalconMambaConfig,
    Mamba2Config,
    MambaConfig,
    PreTrainedModel,
    ZambaConfig,
)
from transformers.utils import logging

from megatron_ssm.diagnostics.doctor import cpu_model
from megatron_ssm.native.products import instructions

PROMPT = 256
SHAPES = {
    "Mamba-1 130m": MambaConfig(hidden_size=768, num_hidden_layers=24, vocab_size=50280),
    "Mamba-2 130m": Mamba2Config(
        hidden_size=768, num_hidden_layers=24, vocab_size=50288, num_heads=24, head_dim=64, n_groups=1, state_size=128,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
FAMILIES = SHAPES | {  # the four families of the paper that docs/results/paper-evaluation.md repeats
    "Falcon-Mamba": FalconMambaConfig(
        hidden_size=768, intermediate_size=1536, num_hidden_layers=24, vocab_size=50280, tie_word_embeddings=True
    ),
    "Zamba": ZambaConfig(
        hidden_size=768, num_hidden_layers=20, vocab_size=50280, num_attention_heads=16, num_key_value_heads=16,
        attention_head_dim=96, intermediate_size=3072, n_mamba_heads=2,
    ),
}  # fmt: skip

PUBLISHED = {
    "mamba-2.8b": MambaConfig(hidden_size=2560, num_hidden_layers=64, vocab_size=50280),
    "mamba2-2.7b": Mamba2Config(
        hidden_size=2560, num_hidden_layers=64, vocab_size=50288, num_heads=80, head_dim=64, n_groups=1, state_size=128,
        tie_word_embeddings=True,
    ),
    "falcon-mamba-7b": FalconMambaConfig(
        hidden_size=4096, intermediate_size=8192, num_hidden_layers=64, vocab_size=65024, tie_word_embeddings=False
    ),
    "Zamba-7B-v1": ZambaConfig(),
}  # fmt: skip


def random_model(shape: str, directory: str | Path) -> PreTrainedModel:
    """transformers' model of a shape of FAMILIES, with random weights; it is also saved in `directory`."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(FAMILIES[shape]).eval()
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    return model


def processor() -> str:
    """The name of the processor, and the instructions for products of matrices that the kernels use on it."""
    return f"{cpu_model()}, {instructions()}"
