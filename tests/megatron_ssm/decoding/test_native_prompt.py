"""Prompts that step.c reads in pieces. Oracle: the same model with hooks, which make it call its layers."""

import pytest
import torch

import megatron_ssm
from megatron_ssm.decoding import decode_plan, native_prompt
from megatron_ssm.native import kernels, products
from serving import IDS, counted, hooked, ids, saved

pytestmark = pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")
needs_tiles = pytest.mark.skipif(not products.has_tile_products(), reason="no AMX")

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
    return counted(native_prompt.NativePrompt, monkeypatch.setattr)


def close(options, ours, theirs):
    atol = 0.03 if options else 5e-5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


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


@needs_tiles
@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("options", [*FORMATS, dict(weights="int8"), dict(weights="int4")], ids=str)
@pytest.mark.parametrize("family", ("mamba", "mamba2"))
@torch.no_grad()
def test_long_prompts_by_tiles(family, options, threads, tmp_path, monkeypatch, limited_threads):
    """Products by AMX, whose forms are not left to a measurement here; sizes that are not whole tiles."""
    limited_threads(threads)
    sizes = dict(hidden_size=128, **(dict(num_heads=8, head_dim=32) if family == "mamba2" else dict(time_step_rank=10)))
    model = megatron_ssm.load(saved(tmp_path, family, **sizes), **options)
    monkeypatch.setattr(native_prompt.NativeLayers, "__call__", None)
    for module in ("megatron_ssm.decoding.native_step", "megatron_ssm.ops.matrices"):
        monkeypatch.setattr(f"{module}.product_form", tile_form)
    count = counted(native_prompt.NativePrompt, monkeypatch.setattr)
    prompt = ids(1, 300, vocab=61)
    cache = model.new_cache(1)
    ours, state = model(prompt, cache=cache), cache.layers[1].state
    assert len(count) == 2
    hooked_outputs(model)
    cache = model.new_cache(1)
    close(options, ours, model(prompt, cache=cache))
    close(options, state, cache.layers[1].state)


def tile_form(stored, x, rows):
    return "float32 by AMX" if stored is torch.float32 else "bfloat16 by AMX"


@pytest.fixture
def limited_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


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


def test_what_is_left_to_the_blocks(tmp_path, pieces):
    """Gradients, padding, rows that are not consecutive, and more sequences than a piece has tokens."""
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    prompt, cache = ids(2, 5, vocab=61), model.new_cache(9)
    model(prompt, cache=model.new_cache(2))
    with torch.no_grad():
        model(prompt, cache=model.new_cache(2), attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1] * 5]))
        model(prompt, cache=cache.select([0, 3]))
        model(ids(9, 2, vocab=61), cache=model.new_cache(9))
        assert not pieces
        model(ids(8, 2, vocab=61), cache=model.new_cache(8))
        assert len(pieces) == 2
