"""Shapes of models: of 130m parameters, to be saved with random weights, and of published checkpoints. The processor."""

import os
from pathlib import Path

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")

from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
    ZambaConfig,
)
from transformers.utils import logging

from megatron_ssm.cli.doctor import cpu_model
from megatron_ssm.kernels.products import instructions

PROMPT = 256


def _kinds(pattern: str) -> list[str]:
    return [{"M": "linear_attention", "*": "full_attention", "-": "mlp"}[letter] for letter in pattern]


SHAPES = {
    "Mamba-1 130m": MambaConfig(hidden_size=768, num_hidden_layers=24, vocab_size=50280),
    "Mamba-2 130m": Mamba2Config(
        hidden_size=768, num_hidden_layers=24, vocab_size=50288, num_heads=24, head_dim=64, n_groups=1, state_size=128,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
FAMILIES = SHAPES | {  # the four families of the paper that docs/results/papers/tensor-parallel-ssm.md repeats
    "Falcon-Mamba": FalconMambaConfig(
        hidden_size=768, intermediate_size=1536, num_hidden_layers=24, vocab_size=50280, tie_word_embeddings=True
    ),
    "Zamba": ZambaConfig(
        hidden_size=768, num_hidden_layers=20, vocab_size=50280, num_attention_heads=16, num_key_value_heads=16,
        attention_head_dim=96, intermediate_size=3072, n_mamba_heads=2,
    ),
}  # fmt: skip
FIVE_FAMILIES = FAMILIES | {
    "Zamba2": Zamba2Config(
        hidden_size=768, num_hidden_layers=18, vocab_size=50280, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=3072, n_mamba_heads=24, mamba_d_state=64, adapter_rank=64, use_mem_rope=True,
        layers_block_type=["hybrid" if i % 6 == 5 else "linear_attention" for i in range(18)],
    ),
}  # fmt: skip

_SSD = dict(mamba_n_heads=24, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1)
_ATTENTION = dict(num_attention_heads=12, num_key_value_heads=4, vocab_size=50280)
HYBRIDS = {  # of 100 to 200 million parameters, but for those with experts, and the published shape
    "Nemotron-H": NemotronHConfig(
        hidden_size=768, intermediate_size=3072, layers_block_type=_kinds("M-M-M-M*-M-M-M-M*-M-"), head_dim=64,
        mamba_num_heads=24, mamba_head_dim=64, ssm_state_size=128, n_groups=8, **_ATTENTION,
    ),
    "Granite 4.0 H": GraniteMoeHybridConfig(
        hidden_size=768, num_hidden_layers=12, shared_intermediate_size=2048, num_local_experts=0, rms_norm_eps=1e-5,
        layer_types=["full_attention" if i % 6 == 5 else "linear_attention" for i in range(12)], embedding_multiplier=12.0,
        logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=1 / 64, tie_word_embeddings=True,
        **_SSD, **_ATTENTION,
    ),
    "Falcon-H1": FalconH1Config(
        hidden_size=768, num_hidden_layers=12, intermediate_size=1536, mamba_d_ssm=1536, head_dim=64, rms_norm_eps=1e-5,
        key_multiplier=0.4, lm_head_multiplier=0.5, embedding_multiplier=5.6, attention_out_multiplier=0.9,
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.24, mlp_multipliers=[0.9, 0.6],
        ssm_multipliers=[0.35, 0.25, 0.35, 0.5, 0.35], tie_word_embeddings=False, **_SSD, **_ATTENTION,
    ),
    "Jamba": JambaConfig(
        hidden_size=768, num_hidden_layers=12, intermediate_size=2048, num_experts=1, attn_layer_period=6,
        attn_layer_offset=5, tie_word_embeddings=True, **_ATTENTION,
    ),
    "Qwen3.5": Qwen3_5TextConfig(
        hidden_size=768, num_hidden_layers=12, intermediate_size=2048, vocab_size=50280, num_attention_heads=6,
        num_key_value_heads=2, head_dim=128, linear_num_key_heads=6, linear_num_value_heads=12, tie_word_embeddings=True,
    ),
    "Granite 4.0 H, experts": GraniteMoeHybridConfig(  # 340 million parameters, of which a token meets 70
        hidden_size=512, num_hidden_layers=12, shared_intermediate_size=256, intermediate_size=256, num_local_experts=64,
        num_experts_per_tok=6, rms_norm_eps=1e-5, embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22,
        layer_types=["full_attention" if i % 6 == 5 else "linear_attention" for i in range(12)],
        attention_multiplier=1 / 64, tie_word_embeddings=True, num_attention_heads=8, num_key_value_heads=2,
        mamba_n_heads=16, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, vocab_size=32768,
    ),
    "Qwen3-Next": Qwen3NextConfig(  # 340 million parameters, of which a token meets 80
        hidden_size=512, num_hidden_layers=12, moe_intermediate_size=256, shared_expert_intermediate_size=256,
        num_experts=64, num_experts_per_tok=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        linear_num_key_heads=4, linear_num_value_heads=8, tie_word_embeddings=True, vocab_size=32768, intermediate_size=512,
    ),
    "Qwen3.5 0.8B": Qwen3_5TextConfig(  # the published shape
        hidden_size=1024, num_hidden_layers=24, intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2,
        linear_num_key_heads=16, linear_num_value_heads=16, tie_word_embeddings=True,
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
    """transformers' model of a shape of FIVE_FAMILIES or HYBRIDS, with random weights; it is also saved in `directory`."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config((FIVE_FAMILIES | HYBRIDS)[shape]).eval()
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    return model


def processor() -> str:
    """The name of the processor, and the instructions for products of matrices that the kernels use on it."""
    return f"{cpu_model()}, {instructions()}"
