"""Prompts that step.c reads in pieces. Oracle: the same model with hooks, which make it call its layers."""

import pytest
import torch

import megatron_ssm
from megatron_ssm.decoding import decode_plan, native_prompt
from megatron_ssm.native import kernels, products
from serving import IDS, counted, hooked, ids, saved

pytestmark = pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")
needs_tiles = pytest.mark.skipif(products.instructions() != "AMX", reason="no AMX")

BOTH_HYBRID = dict(layers_block_type=["hybrid"] * 2)
MODELS = [
    ("mamba", dict(residual_in_fp32=True, use_bias=True)),
    ("falcon_mamba", dict()),
    ("mamba2", dict(residual_in_fp32=True, use_bias=True, n_groups=2, time_step_limit=(0.02, 0.03))),
    ("zamba2", dict(time_step_min=0.1)),
    ("zamba", dict(BOTH_HYBRID, n_mamba_heads=2)),
]
FORMATS = [dict(), dict(dtype=torch.bfloat16)]


@pytest.fixture
def pieces(monkeypatch):
    """A list with an entry for each layer of each call that reads a prompt in C; pieces have up to 8 tokens."""
    for module in (native_prompt, decode_plan):
        monkeypatch.setattr(module, "PIECE", 8)
    monkeypatch.setattr(native_prompt, "SHORTEST", 1)
    return counted(native_prompt.PromptCall, monkeypatch.setattr)


def close(options, ours, theirs):
    """Assert that tensors, or lists of them, are equal but for roundings of the model's products and activations."""
    if options == dict():
        return torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    limit = 2e-3 if "weights" in options else 2**-6
    for mine, other in zip(
        *((each,) if isinstance(each, torch.Tensor) else each for each in (ours, theirs)), strict=True
    ):
        assert (mine - other).norm() < limit * other.norm(), (mine - other).norm() / other.norm()


def prompts_and_a_token(model, *prompts):
    """[The logits of calls that continue a cache, and of a token after them; and what the cache then contains.]"""
    cache = model.new_cache(len(prompts[0]))
    logits = [model(prompt, cache=cache) for prompt in prompts]
    token = model(IDS[: len(prompts[0]), :1], cache=cache)
    return [*logits, token, *(tensor for layer in cache.layers for tensor in (layer.conv, layer.state))]


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("family, changes", MODELS)
@torch.no_grad()
def test_prompts_equal_those_of_blocks(family, changes, options, batch, tmp_path, pieces):
    """Two calls in a row, whose lengths are not multiples of a piece."""
    model = megatron_ssm.load(saved(tmp_path, family, **changes), **options)
    prompts = ids(batch, 21, vocab=61), ids(batch, 3, seed=4, vocab=61)
    ours = prompts_and_a_token(model, *prompts)
    assert len(pieces) == 2 * 2
    hooked_outputs(model)
    theirs = prompts_and_a_token(model, *prompts)
    assert len(pieces) == 2 * 2
    close(options, ours, theirs)


def hooked_outputs(model):
    """Register a hook that changes nothing on a layer of each block."""
    for layer in model.layers:
        layer.norm.register_forward_hook(lambda *_: None)


@pytest.mark.skipif(products.instructions() == "plain loops", reason="neither AMX nor AVX2")
@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("options", (*FORMATS, dict(weights="int8"), dict(weights="int4")), ids=str)
@pytest.mark.parametrize("family", ("mamba", "mamba2"))
@torch.no_grad()
def test_long_prompts(family, options, threads, tmp_path, monkeypatch, limited_threads):
    """Products of many rows; sizes that are not whole tiles or panels."""
    limited_threads(threads)
    own = dict(mamba2=dict(num_heads=8, head_dim=32, state_size=32), mamba=dict(time_step_rank=10))[family]
    model = megatron_ssm.load(saved(tmp_path, family, hidden_size=128, **own), **options)
    count = counted(native_prompt.PromptCall, monkeypatch.setattr)
    prompt = ids(1, 300 if family == "mamba" else 512, vocab=61)  # Mamba-2's chunks are the same in pieces of 256
    cache = model.new_cache(1)
    ours, state = model(prompt, cache=cache), cache.layers[1].state
    assert len(count) == 2
    hooked_outputs(model)
    cache = model.new_cache(1)
    close(options, ours, model(prompt, cache=cache))
    close(options, state, cache.layers[1].state)


@pytest.fixture
def limited_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_tiles
@torch.no_grad()
def test_a_model_of_which_some_matrices_are_not_quantized(tmp_path):
    """in_proj's rows are not a multiple of 64. C and the modules agree whether the recurrence may round."""
    sizes = dict(hidden_size=96, num_heads=6, head_dim=32, state_size=32)
    model = megatron_ssm.load(saved(tmp_path, "mamba2", **sizes), weights="int8")
    weights = model.layers[0].mixer.in_proj.weight(), model.layers[0].mixer.out_proj.weight
    assert [isinstance(weight, torch.Tensor) for weight in weights] == [True, False]
    prompt = ids(1, 40, vocab=61)
    ours = prompts_and_a_token(model, prompt)
    hooked_outputs(model)
    torch.testing.assert_close(ours, prompts_and_a_token(model, prompt), rtol=0, atol=5e-5)


@torch.no_grad()
def test_a_prompt_of_one_token_is_clamped(tmp_path, pieces):
    """As in the modules, and unlike a token that is decoded."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2", time_step_limit=(0.02, 0.03)))
    caches, token = [model.new_cache(1) for _ in range(3)], IDS[:1, :1]
    for cache in caches:
        model(ids(1, 6, vocab=61), cache=cache)
    ours, decoded = model.next_logits(token, cache=caches[0], prompt=True), model.next_logits(token, cache=caches[1])
    assert len(pieces) == 4 * 2
    hooked_outputs(model)
    torch.testing.assert_close(ours, model.next_logits(token, cache=caches[2], prompt=True), rtol=0, atol=5e-5)
    assert not torch.allclose(ours, decoded, atol=1e-4)


@torch.no_grad()
def test_a_model_that_is_called_while_it_reads_a_prompt(tmp_path, pieces):
    """By a hook on the block that both layers share; it reads another prompt into another cache."""
    model = megatron_ssm.load(saved(tmp_path, "zamba", layers_block_type=["hybrid"] * 2))
    prompt, other = ids(1, 6, vocab=61), ids(2, 5, seed=4, vocab=61)
    expected = prompts_and_a_token(model, prompt)
    inner = []

    def read_another(*_):
        if not inner:
            inner.append(model.new_cache(2))
            model(other, cache=inner[0])

    model.shared[0].register_forward_hook(read_another)
    torch.testing.assert_close(prompts_and_a_token(model, prompt), expected, rtol=0, atol=5e-5)
    assert inner and len(pieces) == 3 * 2


@torch.no_grad()
def test_a_cache_of_another_dtype_does_not_change_the_plan(tmp_path, pieces):
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    prompt, cache = ids(1, 6, vocab=61), model.new_cache(1)
    cache.layers[0].conv = cache.layers[0].conv.bfloat16()
    model(prompt, cache=cache)
    assert not pieces
    model(prompt, cache=model.new_cache(1))
    assert len(pieces) == 2


@torch.no_grad()
def test_one_plan_for_all_rows_and_caches(tmp_path, pieces):
    """Other rows of a cache stay as they are."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    prompt, caches = ids(1, 10, vocab=61), [model.new_cache(3), model.new_cache(1)]
    expected = model(prompt, cache=caches[1])
    for row in (2, 0):
        assert torch.equal(model(prompt, cache=caches[0].select([row])), expected)
    assert len(pieces) == 3 * 2
    for layer in caches[0].layers:
        assert not layer.state[1].any() and not layer.conv[1].any() and torch.equal(layer.state[0], layer.state[2])


@torch.no_grad()
def test_a_model_may_change_between_two_prompts(tmp_path, pieces):
    model = megatron_ssm.load(saved(tmp_path, "mamba2", time_step_limit=(0.02, 0.03)))
    prompt = ids(1, 10, vocab=61)
    before = model(prompt, cache=model.new_cache(1))
    for layer in model.layers:
        layer.mixer.dt_limit = (0.5, 0.6)
    clamped = model(prompt, cache=model.new_cache(1))
    assert len(pieces) == 2 * 2 and not torch.allclose(before, clamped, atol=1e-4)
    hooked(model)
    changed = model(prompt, cache=model.new_cache(1))
    assert len(pieces) == 2 * 2 + 1 and not torch.allclose(changed, clamped, atol=1e-4)


def test_what_is_left_to_the_blocks(tmp_path, pieces, monkeypatch):
    """Gradients, padding, rows that are not consecutive, and more sequences than a piece has tokens."""
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    prompt, cache = ids(2, 5, vocab=61), model.new_cache(9)
    model(prompt, cache=model.new_cache(2))
    with torch.no_grad():
        model(prompt, cache=model.new_cache(2), attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1] * 5]))
        model(prompt, cache=cache.select([0, 3]))
        model(ids(9, 2, vocab=61), cache=model.new_cache(9))
        assert not pieces
        monkeypatch.setattr(native_prompt, "SHORTEST", 2)
        model(ids(8, 2, vocab=61), cache=model.new_cache(8))  # pieces of one token of each
        assert not pieces
        model(ids(4, 4, vocab=61), cache=model.new_cache(4))
        assert len(pieces) == 2
