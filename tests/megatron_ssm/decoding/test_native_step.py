"""Tokens computed by step.c. Oracles: the same model without C kernels, or on the whole sequence at once."""

import pytest
import torch
import torch.distributed as dist

import megatron_ssm
from megatron_ssm.decoding import native_step
from megatron_ssm.native import kernels
from serving import IDS, counted, one_by_one, saved
from sparsefusion.native.library import Library

pytestmark = pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")


@pytest.fixture
def native_calls(monkeypatch):
    """A list with one entry for each token and layer that step.c computes."""
    return counted(native_step.NativeLayers, monkeypatch.setattr)


SHAPES = [  # (family, changes, whether step.c supports them)
    ("mamba", dict(use_bias=True), True),
    ("mamba", dict(conv_kernel=8, state_size=256), True),
    ("mamba", dict(conv_kernel=9), False),
    ("mamba", dict(state_size=300), False),
    ("falcon_mamba", dict(time_step_rank=5), True),
    ("mamba2", dict(n_groups=2, use_bias=True), True),
    ("mamba2", dict(conv_kernel=9), False),
    ("mamba2", dict(state_size=257), False),
]


@pytest.mark.parametrize("family, changes, by_c", SHAPES)
def test_what_is_too_large_for_c_is_left_to_torch(family, changes, by_c, tmp_path, native_calls, monkeypatch):
    model = megatron_ssm.load(saved(tmp_path, family, **changes))
    ours = one_by_one(model, model)
    assert bool(native_calls) == by_c
    monkeypatch.setattr(kernels, "LIBRARY", Library("megatron_ssm", {}, "/nonexistent"))
    torch.testing.assert_close(ours, one_by_one(model, model), rtol=0, atol=5e-5)


BOTH_HYBRID = dict(layers_block_type=["hybrid"] * 2)
WIDE = dict(hidden_size=256, vocab_size=320)  # matrices for which there are other products of several rows than of one
MODELS = [
    ("mamba", dict(residual_in_fp32=True, use_bias=True)),
    ("mamba", dict(residual_in_fp32=False)),
    ("falcon_mamba", dict()),
    ("mamba2", dict(residual_in_fp32=True, use_bias=True, n_groups=2)),
    ("zamba2", dict()),
    ("zamba", dict(BOTH_HYBRID, n_mamba_heads=2)),
    ("zamba", dict(BOTH_HYBRID, n_mamba_heads=8, mamba_expand=3, mamba_dt_rank=2, mamba_proj_bias=True)),
]


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("options", (dict(), pytest.param(dict(dtype=torch.bfloat16), marks=pytest.mark.full)), ids=str)
@pytest.mark.parametrize("family, changes", [*MODELS, ("mamba2", dict(n_groups=1))])
def test_native_steps_equal_blocks(ranks, tp, options, family, changes, tmp_path):
    """Oracle: the same model with hooks, which make it call its layers."""
    directory = saved(tmp_path, family, **changes)
    for by_steps, again, by_blocks, count in ranks(lambda rank: steps_and_blocks(directory, **options), tp):
        assert count == 5 * 2 and torch.equal(by_steps, again)  # tokens and layers
        rounding = 2e-6 * by_blocks.abs().max()
        torch.testing.assert_close(by_steps, by_blocks, rtol=0, atol=0.02 if "dtype" in options else rounding)
        assert "dtype" in options or (by_steps - by_blocks).norm() < 1e-6 * by_blocks.norm()


def steps_and_blocks(directory, **options):
    """The logits by step.c, twice, and by the layers; and how many tokens and layers step.c computed the second time."""
    model = megatron_ssm.load(directory, dist.group.WORLD, **options)
    by_steps, count = one_by_one(model, model), counted(native_step.NativeLayers)
    again = one_by_one(model, model)
    for layer in model.layers:
        layer.norm.register_forward_hook(lambda *_: None)
    return by_steps, again, one_by_one(model, model), len(count)


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("weights", ("int8", "int4"))
def test_heads_of_quantized_models(ranks, tp, weights, tmp_path):
    """Each of Zamba's heads has its own columns of x_proj, which is of bfloat16 here, and the activations of float32."""
    directory = saved(tmp_path, "zamba", **WIDE, **BOTH_HYBRID, n_mamba_heads=4)
    for by_steps, again, by_blocks, count in ranks(lambda rank: steps_and_blocks(directory, weights=weights), tp):
        assert count == 5 * 2 and torch.equal(by_steps, again)
        assert (by_steps - by_blocks).norm() < 1e-3 * by_blocks.norm()


CALLS = [  # rows, the tokens that they read, and how many of these are kept
    ((0, 1), IDS[:, 4:6], (2, 1)), ((1,), IDS[1:, 5:9], (3,)), ((0, 1), IDS[:, 6:8], (1, 1)), ((1,), IDS[1:, :4], (4,)),
]  # fmt: skip


@torch.no_grad()
def kept(model, ahead):
    """Logits of the tokens of CALLS that are kept and of another one, and all states then. ahead: by speculative calls."""
    cache = model.new_cache(2)
    model.next_logits(IDS[:, :4], cache=cache, prompt=True)
    logits = []
    for rows, tokens, counts in CALLS:
        selected = cache.select(rows)
        of_rows = model.speculative_logits(tokens, selected) if ahead else [[]] * len(rows)
        if ahead:
            selected.accept(counts)
        for row, ids, count, found in zip(rows, tokens, counts, of_rows, strict=True):
            alone = cache.select([row])
            logits += found[:count] if ahead else [model.next_logits(i.view(1, 1), None, alone)[0] for i in ids[:count]]
    logits.append(model.next_logits(IDS[:, 8:], cache=cache))
    return [*logits, *(tensor for layer in cache.layers for tensor in (layer.conv, layer.state))]


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("options", (dict(), pytest.param(dict(dtype=torch.bfloat16), marks=pytest.mark.full)), ids=str)
@pytest.mark.parametrize("family, changes", [*MODELS, ("mamba2", dict(n_groups=1))])
def test_speculative_calls(ranks, tp, options, family, changes, tmp_path):
    """Oracles: decoding one by one, of which they have the bits, except in attention; and the same model with hooks."""
    directory = saved(tmp_path, family, **changes)

    def run(rank):
        model, count = megatron_ssm.load(directory, dist.group.WORLD, **options), counted(native_step.NativeLayers)
        by_calls, calls, singly = kept(model, ahead=True), len(count), kept(model, ahead=False)
        for layer in model.layers:
            layer.norm.register_forward_hook(lambda *_: None)
        return by_calls, singly, kept(model, ahead=True), calls

    atol = 0.02 if "dtype" in options else 1e-4
    for by_calls, singly, by_blocks, calls in ranks(run, tp):
        assert calls == 5 * 2  # calls and layers
        torch.testing.assert_close(by_calls, by_blocks, rtol=0, atol=atol)
        torch.testing.assert_close(by_calls, singly, rtol=0, atol=atol if "zamba" in family else 0)


WIDE_MODELS = [
    ("mamba", dict(WIDE, state_size=16)),
    ("falcon_mamba", dict(WIDE, state_size=16)),
    ("mamba2", dict(WIDE, num_heads=16, head_dim=32, state_size=64)),
]


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize(
    "options", (dict(), dict(dtype=torch.bfloat16), dict(weights="int8"), dict(weights="int4")), ids=str
)
@pytest.mark.parametrize("family, changes", WIDE_MODELS)
def test_speculative_calls_in_each_format(ranks, tp, options, family, changes, tmp_path):
    """As many tokens as a call may read have the bits of decoding one by one."""
    tokens = 16
    directory, ids = saved(tmp_path, family, **changes), torch.arange(20, 27 + tokens).view(1, -1)

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD, **options)
        ahead, plain = model.new_cache(1), model.new_cache(1)
        for cache in (ahead, plain):
            model.next_logits(ids[:, :7], cache=cache, prompt=True)
        logits = model.speculative_logits(ids[:, 7:], ahead)[0]
        ahead.accept([ids.shape[1] - 7])
        singly = [model.next_logits(ids[:, t : t + 1], None, plain)[0] for t in range(7, ids.shape[1])]
        states = [[t for layer in cache.layers for t in (layer.conv, layer.state)] for cache in (ahead, plain)]
        return [logits, *states[0]], [torch.stack(singly), *states[1]]

    for ours, theirs in ranks(run, tp):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ("mamba", "mamba2"))
def test_hooked_and_replaced_layers_are_called(family, tmp_path, native_calls):
    model = megatron_ssm.load(saved(tmp_path, family))
    called = []
    handle = model.layers[0].mixer.in_proj.register_forward_hook(lambda *_: called.append(1))
    one_by_one(model, model)
    assert (len(called), len(native_calls)) == (6, 5)  # the other layer's
    handle.remove()

    class Adapted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

        def whole(self, part):
            return self.inner.whole(part)

    for layer in model.layers:
        layer.mixer.out_proj = Adapted(layer.mixer.out_proj)
    with torch.no_grad():
        torch.testing.assert_close(one_by_one(model, model), model(IDS), rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", ("mamba", "mamba2"))
def test_a_replaced_mixer(family, tmp_path, native_calls):
    """The new mixer has only the attributes that a block needs."""
    model = megatron_ssm.load(saved(tmp_path, family))
    expected = one_by_one(model, model)

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.new_cache = inner, inner.new_cache

        def forward(self, *given):
            return self.inner(*given)

    model.layers[0].mixer = Wrapped(model.layers[0].mixer)
    native_calls.clear()
    torch.testing.assert_close(one_by_one(model, model), expected, rtol=0, atol=5e-5)
    assert len(native_calls) == 5  # the other layer's


def test_inference_mode_and_then_not(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "zamba2"))
    with torch.inference_mode():
        expected = one_by_one(model, model)
    assert torch.equal(one_by_one(model, model), expected)


def compiled_logits(model):
    """A compiled model's logits of IDS, in one call and with a cache."""
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        return compiled(IDS), one_by_one(compiled, model)


@pytest.mark.full
@torch.no_grad()
def test_a_compiled_model(tmp_path):
    """torch.compile traces the torch operators, because addresses in its graph would outlive their tensors."""
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    torch.testing.assert_close(torch.compile(model, backend="eager")(IDS), model(IDS), rtol=0, atol=5e-5)


@pytest.mark.full
@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("family", ("mamba", "mamba2"))
def test_compiled_models(ranks, tp, family, tmp_path):
    """On several ranks, torch.compile does not trace the calls into shared memory."""
    model = megatron_ssm.load(directory := saved(tmp_path, family))
    expected = one_by_one(model, model)
    for logits in ranks(lambda rank: compiled_logits(megatron_ssm.load(directory, dist.group.WORLD)), tp, timeout=120):
        for found in logits:
            torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("default", (torch.float64, torch.bfloat16), ids=str)
def test_torchs_default_dtype_does_not_matter(ranks, tp, default, tmp_path):
    """The norm's sums of squares, which are summed over the ranks, are always float32."""
    directory = saved(tmp_path, "mamba2", n_groups=1)
    model = megatron_ssm.load(directory)
    expected = one_by_one(model, model)

    def run(rank):
        torch.set_default_dtype(default)  # only in the process of this rank
        model = megatron_ssm.load(directory, dist.group.WORLD)
        return one_by_one(model, model)

    for logits in ranks(run, tp):
        torch.testing.assert_close(logits, expected, rtol=0, atol=5e-5)
