"""Decoding by the kernels of step.c; oracle: the same model without C kernels, or given the whole sequence at once."""

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
    """How often step.c was asked and said yes."""
    count, takes = [], steps.takes_step
    monkeypatch.setattr(steps, "takes_step", lambda *given: takes(*given) and not count.append(1))
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
