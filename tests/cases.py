"""Configurations that the tests of whole models share, and a model's tensors put together again from its ranks."""

from functools import cache, cached_property

import pytest
import torch

import megatron_ssm
from hf import SMALL, hf_model
from megatron_ssm.families import hf_shapes

SEQ = 70  # more than one chunk of either scan

# name: (family, changes to the small model of hf.py). Its 61 words divide over no 2 ranks.
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
