"""The final norm and the head by step.c. Oracle: the same model, whose head is computed from Python."""

import pytest
import torch
import torch.distributed as dist

import megatron_ssm
from megatron_ssm.decoding import native_head, native_step
from megatron_ssm.native import kernels
from serving import IDS, one_by_one, saved

pytestmark = pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")

BF16 = dict(dtype=torch.bfloat16)
WIDE = dict(hidden_size=128, vocab_size=320)
WIDE2 = dict(WIDE, num_heads=4, head_dim=64)
MODELS = [
    ("mamba", dict(vocab_size=320), dict()),
    ("mamba", dict(WIDE, residual_in_fp32=True, tie_word_embeddings=False), BF16),
    ("mamba", dict(WIDE, residual_in_fp32=False), BF16),
    ("mamba2", WIDE2, dict(weights="int8")),
    ("mamba2", WIDE2, dict(BF16, weights="int8")),
    ("falcon_mamba", WIDE, dict(BF16, weights="int4")),
    ("zamba2", dict(vocab_size=320), dict()),
    ("zamba", dict(vocab_size=320, layers_block_type=["hybrid"] * 2), BF16),
]


def speculative(model):
    """Logits of three tokens of each row after a prompt, all at once."""
    cache = model.new_cache(2)
    model.next_logits(IDS[:, :4], cache=cache, prompt=True)
    return model.speculative_logits(IDS[:, 4:7], cache)


def logits_and_heads(directory, **options):
    """Logits of tokens one by one and of speculative ones, with the head in C and in Python; how many heads there were."""
    model, made, of = megatron_ssm.load(directory, dist.group.WORLD, **options), [], native_head.NativeHead.of
    by_c = []
    for head_of in (lambda *given: made.append(of(*given)) or made[-1], lambda *given: None):
        native_step.NativeHead.of = head_of
        copied = megatron_ssm.load(directory, dist.group.WORLD, **options) if by_c else model
        with torch.no_grad():
            by_c.append((one_by_one(copied, copied), speculative(copied)))
    return *by_c, [head is not None for head in made]


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("family, changes, options", MODELS)
def test_the_head_in_c_has_the_bits_of_python(ranks, tp, family, changes, options, tmp_path):
    directory = saved(tmp_path, family, **changes)
    for by_c, by_python, made in ranks(lambda rank: logits_and_heads(directory, **options), tp):
        assert made == [True, True]  # plans for one token, and for three
        assert all(map(torch.equal, by_c, by_python)) and by_c[0].dtype is torch.float32


@pytest.mark.parametrize("tp", (2, 4))
def test_a_padded_slice_of_the_vocabulary_is_left_to_python(ranks, tp, tmp_path):
    """The last rank has fewer ids than the others, and gives -inf for the missing ones."""
    directory = saved(tmp_path, "mamba", vocab_size=321)
    results = ranks(lambda rank: logits_and_heads(directory), tp)
    assert [made for *_, made in results] == [[True, True]] * (tp - 1) + [[False, False]]
    for by_c, by_python, _ in results:
        assert all(map(torch.equal, by_c, by_python)) and by_c[0].shape[-1] == 321
