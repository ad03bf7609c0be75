"""Configurations that the tests of whole models share, and a model's tensors put together again from its ranks."""

from functools import cache, cached_property

import pytest
import torch

import megatron_ssm
from hf import SMALL, hf_model
from megatron_ssm.families import hf_shapes

SEQ = 70  # more than one chunk of either scan

# name: (family, changes to the small model of hf.py). Its 61 words divide over no 2 ranks; of its first three layers two
# are hybrid, of its first five three.
CASES = {
    "mamba": ("mamba", {}),
    "mamba-biases-untied": ("mamba", dict(use_bias=True, tie_word_embeddings=False, vocab_size=64)),
    "mamba-no-conv-bias": ("mamba", dict(use_conv_bias=False, time_step_rank=5, conv_kernel=3, residual_in_fp32=False)),
    "mamba2-1-group": ("mamba2", dict(n_groups=1, num_hidden_layers=4)),
    "mamba2-1-group-biases-tied": ("mamba2", dict(n_groups=1, use_bias=True, tie_word_embeddings=True)),
    "mamba2-2-groups": ("mamba2", dict(n_groups=2, use_conv_bias=False, residual_in_fp32=False)),
    "mamba2-2-groups-biases-tied": ("mamba2", dict(n_groups=2, use_bias=True, tie_word_embeddings=True)),
    "mamba2-4-groups": ("mamba2", dict(n_groups=4, use_bias=True, conv_kernel=2, vocab_size=5)),
    "mamba2-dt-limit": ("mamba2", dict(n_groups=2, time_step_limit=(0.02, 0.2), tie_word_embeddings=True)),
    "falcon": ("falcon_mamba", dict(time_step_rank=5, mixer_rms_eps=0.01)),
    "falcon-biases-untied": ("falcon_mamba", dict(use_bias=True, tie_word_embeddings=False, vocab_size=64)),
    "falcon-wider": ("falcon_mamba", dict(intermediate_size=96, use_conv_bias=False, conv_kernel=3, residual_in_fp32=False)),
    "zamba-1-head": ("zamba", dict(n_mamba_heads=1, mamba_conv_bias=False, vocab_size=5, mamba_d_conv=3)),
    "zamba-2-heads-biases": ("zamba", dict(mamba_proj_bias=True, num_hidden_layers=3, hidden_act="silu")),
    "zamba-4-heads-grouped-untied": (
        "zamba",
        dict(n_mamba_heads=4, tie_word_embeddings=False, num_hidden_layers=3, attention_head_dim=6, mamba_dt_rank=3)
        | dict(num_attention_heads=8, num_key_value_heads=4),
    ),
    "zamba-8-heads": ("zamba", dict(n_mamba_heads=8, mamba_expand=4, attn_layer_period=2)),
    "zamba2-1-group": ("zamba2", dict(num_hidden_layers=5)),
    "zamba2-2-groups-adapters-rope": (
        "zamba2",
        dict(mamba_ngroups=2, use_shared_attention_adapter=True, use_mem_rope=True, hidden_act="relu", num_mem_blocks=1)
        | dict(num_hidden_layers=3, time_step_min=0.05),
    ),
    "zamba2-4-groups-biases-adapters-untied": (
        "zamba2",
        dict(mamba_ngroups=4, add_bias_linear=True, use_shared_attention_adapter=True, tie_word_embeddings=False)
        | dict(num_hidden_layers=5, hidden_act="gelu_pytorch_tanh"),
    ),
    "zamba2-grouped-rope-1-use": (
        "zamba2",
        dict(num_attention_heads=8, num_key_value_heads=4, hidden_act="silu", use_mem_rope=True, mamba_d_conv=2)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=50.0)),
    ),
    "zamba2-no-attention": ("zamba2", dict(layers_block_type=["linear_attention"] * 2, add_bias_linear=True)),
}


class Oracle:
    """One case's transformers model, its directory, token ids (2, SEQ), and the logits transformers gives for them."""

    def __init__(self, directory, family, changes, dtype=torch.float32):
        self.directory = directory
        self.vocab = changes.get("vocab_size", SMALL["vocab_size"])
        self.model = hf_model(family, dtype=dtype, **{"num_hidden_layers": 2, **changes})
        self.model.save_pretrained(directory)
        self.ids = torch.randint(self.vocab, (2, SEQ), generator=torch.Generator().manual_seed(1))

    @cached_property
    @torch.no_grad()
    def exact(self):
        """Our own float64 logits on one rank; transformers' norms are float32 in any model."""
        return megatron_ssm.load(self.directory, dtype=torch.float64)(self.ids)

    @torch.no_grad()
    def logits(self, ids=None):
        """(batch, seq, vocab) of one call of transformers, without a cache."""
        return self.model(self.ids if ids is None else ids, use_cache=False).logits


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """oracle(name, dtype): the `Oracle` of a case, made once."""

    @cache
    def make(name, dtype=torch.float32):
        return Oracle(tmp_path_factory.mktemp(name), *CASES[name], dtype)

    return make


def assemble(fields, shards):
    """{Hugging Face name: whole tensor} from {our name: piece} of each rank; copies must be the same to the bit."""
    whole = {}
    for name, shape in hf_shapes(fields).items():
        whole[name] = torch.full(shape, float("nan"), dtype=torch.float64)
    for field in fields:
        rows = whole[field.hf].narrow(0, field.start, field.shape[0])
        for rank, shard in enumerate(shards):
            place = rows[field.piece(rank, len(shards))]
            piece = shard[field.name].double()
            assert place.isnan().all() or place.equal(piece), f"rank {rank} holds another {field.name}"
            place.copy_(piece)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole
