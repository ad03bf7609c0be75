"""What is sent and what is held, counted; oracles: the formulas of ssm.md A1, A3, A6, and torch.distributed itself."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import megatron_ssm
from hf import save_hf

LAYERS, HIDDEN, STATE, KERNEL, VOCAB, BATCH = 3, 32, 8, 4, 61, 2
INNER, RANK = 2 * HIDDEN, HIDDEN // 16

worlds = pytest.mark.parametrize("tp", (1, 2, 4))
MODELS = {  # name: (family, changes, groups; 0 for Mamba-1, which has none)
    "mamba": ("mamba", dict(use_bias=True), 0),
    "mamba2-1-group": ("mamba2", dict(n_groups=1, use_bias=True), 1),
    "mamba2-2-groups": ("mamba2", dict(n_groups=2), 2),
    "mamba2-4-groups": ("mamba2", dict(n_groups=4, tie_word_embeddings=True), 4),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: (directory, {Hugging Face name: shape})}"""
    made = {}
    shape = dict(num_hidden_layers=LAYERS, hidden_size=HIDDEN, state_size=STATE, conv_kernel=KERNEL, vocab_size=VOCAB)
    for name, (family, changes, _) in MODELS.items():
        directory = tmp_path_factory.mktemp(name)
        model = save_hf(directory, family, **shape, **changes)
        made[name] = directory, {name: parameter.shape for name, parameter in model.named_parameters()}
    return made


def tallied(function):
    """What torch.distributed was called for while function() ran: (calls by name, bytes); every call goes through."""
    calls, sizes = Counter(), []

    def counting(name, original):
        def call(*arguments, **keywords):
            calls[name] += 1
            sizes.append(arguments[1 if name == "all_gather" else 0].nbytes)
            return original(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "broadcast", "reduce", "all_to_all_single", "send", "recv"):
            patch.setattr(dist, name, counting(name, getattr(dist, name)))
        function()
    return dict(calls), sum(sizes)


# Messages


def sums_of_a_token(groups, tp):
    """(all-reduces, the floats in them) of one token."""
    if tp == 1:
        return 0, 0
    if groups == 0:  # x_proj and out_proj
        sums, floats = 2, RANK + 2 * STATE + HIDDEN
    elif groups == 1:  # out_proj with the norm's sum of squares as one more column
        sums, floats = 1, HIDDEN + 1
    elif groups % tp == 0:
        sums, floats = 1, HIDDEN
    else:  # the norm's sums of squares, one for each group, and out_proj
        sums, floats = 2, groups + HIDDEN
    return LAYERS * sums + 1, LAYERS * floats + HIDDEN  # and the embedding


@worlds
@pytest.mark.parametrize("name", MODELS)
def test_all_reduces_of_a_decoded_token(ranks, tp, name, models):
    """2L+1 for Mamba-1, and for Mamba-2 at 1 < groups < ranks; else L+1. A prefill has as many, and longer."""
    prompt = 20

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(models[name][0], dist.group.WORLD)
        ids, cache, counts = torch.zeros(BATCH, prompt, dtype=torch.long), model.new_cache(BATCH), []
        for part in (ids, ids[:, :1]):
            model.counter.reset()
            counts.append(tallied(lambda ids=part: model.local_logits(ids, cache=cache)))
            assert counts[-1] == (dict(model.counter.calls), model.counter.nbytes)
        gathered, _ = tallied(lambda: model(ids[:, :1], cache=cache))
        return *counts, gathered

    calls, floats = sums_of_a_token(MODELS[name][2], tp)
    calls = {"all_reduce": calls} if calls else {}
    for prefill, token, gathered in ranks(run, tp):
        assert token == (calls, 4 * BATCH * floats)
        assert prefill == (calls, 4 * BATCH * floats * prompt)
        assert gathered == (calls | {"all_gather": 1} if calls else {})  # of the logits, for every rank


@worlds
@pytest.mark.parametrize("name", MODELS)
def test_all_reduces_of_a_training_step(ranks, tp, name, models):
    """Forward: those of a token and the loss's two. Backward: the gradients of what each rank used for its part."""

    def run(rank):
        model = megatron_ssm.load(models[name][0], dist.group.WORLD)
        ids = torch.zeros(BATCH, 5, dtype=torch.long)
        losses = []
        forward, _ = tallied(lambda: losses.append(model.loss(ids, ids)))
        backward, _ = tallied(losses[0].backward)
        assert Counter(forward) + Counter(backward) == model.counter.calls
        return forward, backward

    _, changes, groups = MODELS[name]
    forward = sums_of_a_token(groups, tp)[0] + 2
    inputs = LAYERS + 1  # of every in_proj, and of the head
    sums = LAYERS * (groups == 0 or 1 < groups < tp)  # x_proj's, or the norm's
    tensors = 3 + changes.get("use_bias", False)  # that hold B and C: in_proj's weight and bias, the convolution's two
    shared = LAYERS * tensors * (0 < groups < tp)
    expected = ({}, {}) if tp == 1 else ({"all_reduce": forward}, {"all_reduce": inputs + sums + shared})
    assert ranks(run, tp) == [expected] * tp


# Memory


@worlds
@pytest.mark.parametrize("name", MODELS)
def test_cache_bytes(ranks, tp, name, models):
    """1/T of it on each rank, but every rank holds the history of its groups' B and C; the state is fp32."""
    dtypes = torch.float32, torch.bfloat16

    def held(dtype):
        cache = megatron_ssm.load(models[name][0], dist.group.WORLD, dtype=dtype).new_cache(BATCH)
        storages = [t.untyped_storage() for layer in cache.layers for t in (layer.conv, layer.state)]
        assert cache.nbytes == sum(storage.nbytes() for storage in storages)
        return cache.nbytes

    groups = MODELS[name][2]
    channels = INNER // tp + (2 * max(groups // tp, 1) * STATE if groups else 0)
    history, state = channels * (KERNEL - 1), INNER // tp * STATE * 4
    expected = [LAYERS * BATCH * (history * dtype.itemsize + state) for dtype in dtypes]
    assert ranks(lambda rank: [held(dtype) for dtype in dtypes], tp) == [expected] * tp


def numbers_on_a_rank(name, shape, groups, tp):
    """How many numbers of a Hugging Face tensor the first of `tp` ranks holds."""
    if name.endswith((".norm.weight", "norm_f.weight", "out_proj.bias")) and "mixer.norm" not in name:
        return shape.numel()
    if name.endswith(("embeddings.weight", "lm_head.weight")):
        return -(-shape[0] // tp) * shape[1]
    if groups and ("in_proj" in name or "conv1d" in name):
        bc = 2 * groups * STATE
        return shape[1:].numel() * ((shape[0] - bc) // tp + bc // min(groups, tp))
    return shape.numel() // tp


@worlds
@pytest.mark.parametrize("name", MODELS)
def test_parameter_bytes(ranks, tp, name, models):
    """1/T of every tensor, except norms, out_proj's bias, and the B and C of groups that several ranks share."""
    place, shapes = models[name]

    def run(rank):
        model = megatron_ssm.load(place, dist.group.WORLD)
        storages = [parameter.untyped_storage() for parameter in model.parameters()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())

    expected = 4 * sum(numbers_on_a_rank(n, shape, MODELS[name][2], tp) for n, shape in shapes.items())
    first, *others = ranks(run, tp)
    assert first == expected
    assert all(other <= first for other in others)  # of the vocabulary
