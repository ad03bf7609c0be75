"""Decoding by the kernels of step.c; oracle: the same model without C kernels, or given the whole sequence at once."""

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
import torch.distributed as dist

import megatron_ssm
from hf import save_hf
from megatron_ssm import kernels, steps
from sparsefusion.native import Library

IDS = torch.arange(18).view(2, 9) % 61
pytestmark = pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")


def saved(directory, family, **changes):
    """The directory of a small model."""
    save_hf(directory, family, num_hidden_layers=2, **changes)
    return directory


@torch.no_grad()
def one_by_one(model, cached, first=4):
    """Logits of a prompt, then of one token after the other, by `model`, with a cache of `cached`'s."""
    cache = cached.new_cache(2)
    parts = [model(IDS[:, :first], cache=cache)]
    return torch.cat(parts + [model(IDS[:, t : t + 1], cache=cache) for t in range(first, IDS.shape[1])], dim=1)


@pytest.fixture
def taken(monkeypatch):
    """One entry for each token that goes through a layer by step.c."""
    count, called = [], steps.Step.__call__
    monkeypatch.setattr(steps.Step, "__call__", lambda *given: (count.append(1), called(*given))[1])
    return count


SHAPES = [  # family, changes, whether step.c takes them
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
def test_what_is_too_large_for_c_is_left_to_torch(family, changes, by_c, tmp_path, taken, monkeypatch):
    model = megatron_ssm.load(saved(tmp_path, family, **changes))
    ours = one_by_one(model, model)
    assert bool(taken) == by_c
    monkeypatch.setattr(kernels, "LIBRARY", Library("megatron_ssm", {}, "/nonexistent"))
    torch.testing.assert_close(ours, one_by_one(model, model), rtol=0, atol=5e-5)


ALIKE = [
    ("mamba", dict(residual_in_fp32=True, use_bias=True)),
    ("mamba", dict(residual_in_fp32=False)),
    ("falcon_mamba", dict()),
    ("mamba2", dict(residual_in_fp32=True, use_bias=True, n_groups=2)),
    ("zamba2", dict()),
]


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("options", (dict(), dict(dtype=torch.bfloat16)), ids=str)
@pytest.mark.parametrize("family, changes", [*ALIKE, ("mamba2", dict(n_groups=1))])
def test_steps_are_what_blocks_are(ranks, tp, options, family, changes, tmp_path):
    """Oracle: the same model with its layers called, as hooks make it."""
    directory = saved(tmp_path, family, **changes)

    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD, **options)
        by_steps = one_by_one(model, model)
        for layer in model.layers:
            layer.norm.register_forward_hook(lambda *_: None)
        return by_steps, one_by_one(model, model)

    atol = 0.02 if "dtype" in options else 1e-5
    for by_steps, by_blocks in ranks(run, tp):
        torch.testing.assert_close(by_steps, by_blocks, rtol=0, atol=atol)


@pytest.mark.parametrize("family", ("mamba", "mamba2"))
def test_layers_with_hooks_or_in_the_place_of_others_are_called(family, tmp_path, taken):
    model = megatron_ssm.load(saved(tmp_path, family))
    called = []
    handle = model.layers[0].mixer.in_proj.register_forward_hook(lambda *_: called.append(1))
    one_by_one(model, model)
    assert (len(called), len(taken)) == (6, 5)  # the other layer's
    handle.remove()

    class Adapted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

        def forward(self, x):
            return 2 * self.inner(x)

        def whole(self, part):
            return self.inner.whole(part)

    for layer in model.layers:
        layer.mixer.out_proj = Adapted(layer.mixer.out_proj)
    with torch.no_grad():
        torch.testing.assert_close(one_by_one(model, model), model(IDS), rtol=0, atol=5e-5)


def moved(model):
    """Every parameter's numbers are elsewhere, and others."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def replaced(model):
    """A parameter is another one."""
    mixer = model.layers[1].mixer
    mixer.A_log = torch.nn.Parameter(mixer.A_log + 1)


def hooked(model):
    """A layer has a hook."""
    model.layers[1].norm.register_forward_hook(lambda _, __, y: 2 * y)


def called_otherwise(model):
    """A layer is called by a function of its own."""
    out_proj = model.layers[1].mixer.out_proj
    forward = out_proj.forward
    out_proj.forward = lambda x: 2 * forward(x)


def rounded(model):
    """Another type."""
    model.bfloat16()


def edited(model):
    """Other numbers in the same places."""
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


CHANGES = [
    *product(("mamba", "mamba2"), (moved, replaced, hooked, called_otherwise, rounded, edited)),
    ("zamba2", moved),
]


@pytest.mark.parametrize("family, change", CHANGES)
@torch.no_grad()
def test_a_model_may_change_between_two_tokens(family, change, tmp_path):
    """Oracle: a copy of the model and its cache, which has decoded nothing."""
    model = megatron_ssm.load(saved(tmp_path, family))
    cache = model.new_cache(2)
    for tokens in IDS.split([4, 1, 1, 1, 1, 1], dim=1)[:4]:
        model(tokens, cache=cache)
    copied, its_cache = copy.deepcopy(model), copy.deepcopy(cache)
    before = copy.deepcopy(model)(IDS[:, :1], cache=copy.deepcopy(cache))
    for changed in (model, copied):
        change(changed)
    logits = model(IDS[:, :1], cache=cache)
    torch.testing.assert_close(logits, copied(IDS[:, :1], cache=its_cache), rtol=0, atol=0)
    assert (logits - before).abs().max() > 1e-3


@torch.no_grad()
def test_copies_threads_and_several_caches_do_not_meet(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    expected = one_by_one(model, model)
    first, second = model.new_cache(2), model.new_cache(3)
    model(IDS[:, :4], cache=first)
    model(IDS[:1, :4].expand(2, -1), cache=second.select([1, 2]))
    model(IDS[1:, :2], cache=second.select([0]))
    for t in range(4, 9):
        assert torch.equal(model(IDS[:, t : t + 1], cache=first), expected[:, t : t + 1])
        both = model(IDS[:1, t : t + 1].expand(2, -1), cache=second.select([1, 2]))
        torch.testing.assert_close(both, expected[:1, t : t + 1].expand(2, -1, -1), rtol=0, atol=5e-6)
        alone = model(IDS[1:, t - 2 : t - 1], cache=second.select([0]))
        torch.testing.assert_close(alone, expected[1:, t - 2 : t - 1], rtol=0, atol=5e-5)
    with ThreadPoolExecutor(4) as threads:
        for logits in threads.map(lambda _: one_by_one(model, model), range(100)):
            assert torch.equal(logits, expected)
    assert torch.equal(one_by_one(copy.deepcopy(model), model), expected)


@torch.no_grad()
def test_parameters_that_lie_apart(tmp_path, taken):
    """As an optimizer with a buffer of its own leaves them."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    expected = one_by_one(model, model)
    taken.clear()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    torch.testing.assert_close(one_by_one(model, model), expected, rtol=0, atol=5e-5)
    assert not taken


def test_inference_mode_and_then_not(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "zamba2"))
    with torch.inference_mode():
        expected = one_by_one(model, model)
    assert torch.equal(one_by_one(model, model), expected)


@pytest.mark.parametrize("family", ("mamba", "mamba2"))
def test_compiled_models(family, tmp_path):
    """torch.compile traces the torch twins: addresses that it took along would outlive their tensors."""
    model = megatron_ssm.load(saved(tmp_path, family))
    with torch.no_grad():
        expected = model(IDS)
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(IDS), expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(one_by_one(compiled, model), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("default", (torch.float64, torch.bfloat16), ids=str)
def test_torchs_default_dtype_does_not_matter(ranks, tp, default, tmp_path):
    """The norm's sums of squares, which ride between ranks, are float32 whatever it is."""
    directory = saved(tmp_path, "mamba2", n_groups=1)
    model = megatron_ssm.load(directory)
    expected = one_by_one(model, model)

    def run(rank):
        torch.set_default_dtype(default)  # this process is a rank, and ends with the test
        model = megatron_ssm.load(directory, dist.group.WORLD)
        return one_by_one(model, model)

    for logits in ranks(run, tp):
        torch.testing.assert_close(logits, expected, rtol=0, atol=5e-5)
