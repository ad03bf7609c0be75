"""What is sent and what is held, counted; oracles: docs/concepts/all-reduce-count.md, and torch.distributed."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

import megatron_ssm
from hf import save_hf
from sparsefusion import all_reduce

LAYERS, HIDDEN, STATE, KERNEL, VOCAB, BATCH = 3, 32, 8, 4, 61, 2
INNER, RANK = 2 * HIDDEN, HIDDEN // 16
HYBRIDS, HEAD_DIM = (1, 2), 8  # of the shared block

worlds = pytest.mark.parametrize("tp", (1, 2, 4))
PLAIN = dict(num_hidden_layers=LAYERS, state_size=STATE, conv_kernel=KERNEL)
ZAMBA = dict(
    layers_block_type=["linear_attention", "hybrid", "hybrid"], num_hidden_layers=LAYERS, mamba_d_state=STATE,
    mamba_d_conv=KERNEL, num_attention_heads=8, num_key_value_heads=4,
)  # fmt: skip
ADAPTERS = dict(ZAMBA, num_key_value_heads=8, use_shared_attention_adapter=True)
MODELS = {  # name: (family, changes)
    "mamba": ("mamba", dict(PLAIN, use_bias=True)),
    "falcon": ("falcon_mamba", PLAIN),
    "mamba2-1-group": ("mamba2", dict(PLAIN, n_groups=1, use_bias=True)),
    "mamba2-2-groups": ("mamba2", dict(PLAIN, n_groups=2)),
    "mamba2-4-groups": ("mamba2", dict(PLAIN, n_groups=4, tie_word_embeddings=True)),
    "zamba-1-head": ("zamba", dict(ZAMBA, n_mamba_heads=1)),
    "zamba-2-heads-biases": ("zamba", dict(ZAMBA, n_mamba_heads=2, mamba_proj_bias=True)),
    "zamba-8-heads-untied": ("zamba", dict(ZAMBA, n_mamba_heads=8, tie_word_embeddings=False)),
    "zamba2-1-group": ("zamba2", dict(ZAMBA, mamba_ngroups=1)),
    "zamba2-2-groups-biases": ("zamba2", dict(ADAPTERS, mamba_ngroups=2, add_bias_linear=True)),
    "zamba2-4-groups-untied": (
        "zamba2", dict(ADAPTERS, mamba_ngroups=4, num_mem_blocks=1, tie_word_embeddings=False),
    ),
}  # fmt: skip


NAMES = by_default(MODELS.keys() - {"falcon", "mamba2-4-groups", "zamba-1-head", "zamba-8-heads-untied"}, MODELS)


def groups_of(name):
    """0 for the kinds of Mamba-1, which have none."""
    changes = MODELS[name][1]
    return changes.get("n_groups", changes.get("mamba_ngroups", 0))


def uses_of(name):
    """How many layers use a shared block."""
    return len(HYBRIDS) * ("zamba" in name)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: (directory, {Hugging Face name: shape})}"""
    made = {}
    for name, (family, changes) in MODELS.items():
        directory = tmp_path_factory.mktemp(name)
        model = save_hf(directory, family, hidden_size=HIDDEN, vocab_size=VOCAB, **changes)
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


def sums_of_a_mixer(name, tp):
    """(all-reduces, the floats in them) of one token in one layer's mixer."""
    groups, changes = groups_of(name), MODELS[name][1]
    if groups == 0 and changes.get("n_mamba_heads", 1) >= tp:  # out_proj; each rank has whole heads' x_proj
        return 1, HIDDEN
    if groups == 0:  # x_proj, over all ranks or those that share a head, and out_proj
        return 2, RANK + 2 * STATE + HIDDEN
    if groups == 1:  # out_proj with the norm's sum of squares as one more column
        return 1, HIDDEN + 1
    if groups % tp == 0:
        return 1, HIDDEN
    return 2, groups + HIDDEN  # the norm's sums of squares, one for each group, and out_proj


def sums_of_a_token(name, tp):
    """(all-reduces, the floats in them) of one token."""
    if tp == 1:
        return 0, 0
    sums, floats = sums_of_a_mixer(name, tp)
    others = 2 * uses_of(name) + 1  # attention and MLP of each use, and the embedding
    return LAYERS * sums + others, LAYERS * floats + others * HIDDEN


@worlds
@pytest.mark.parametrize("name", NAMES)
def test_all_reduces_of_a_decoded_token(ranks, tp, name, models):
    """2L+1 for Mamba-1, Zamba at heads < ranks, and Mamba-2 at 1 < groups < ranks; else L+1; and 2 for each use of a
    shared block. A prefill has as many, and longer."""
    prompt = 20

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(models[name][0], dist.group.WORLD, shared_memory=False)
        ids, cache, counts = torch.zeros(BATCH, prompt, dtype=torch.long), model.new_cache(BATCH), []
        for part in (ids, ids[:, :1]):
            model.counter.reset()
            counts.append(tallied(lambda ids=part: model.local_logits(ids, cache=cache)))
            assert counts[-1] == (dict(model.counter.calls), model.counter.nbytes)
        gathered, _ = tallied(lambda: model(ids[:, :1], cache=cache))
        return *counts, gathered

    calls, floats = sums_of_a_token(name, tp)
    calls = {"all_reduce": calls} if calls else {}
    for prefill, token, gathered in ranks(run, tp):
        assert token == (calls, 4 * BATCH * floats)
        assert prefill == (calls, 4 * BATCH * floats * prompt)
        assert gathered == (calls | {"all_gather": 1} if calls else {})  # of the logits, for every rank


def messages_in(format, tp, numbers, exact):
    """{function of torch.distributed: bytes handed in} of one block output: `numbers`, and `exact` float32 beside them."""
    size = {"fp16": 2, "bf16": 2}.get(format)
    whole = numbers * size if size else -(-numbers // 128) * 132
    if (tp - 1) * (tp - 2) * whole <= tp * 32 * 1024:  # one round, as two save no more than 32 KB
        return {"all_gather": whole + 4 * exact}
    chunk = -(-numbers // tp) * size if size else -(-numbers // (128 * tp)) * 132
    chunk += 4 * -(-exact // tp)
    return {"all_to_all_single": tp * chunk, "all_gather": chunk}


def sent_of(messages, tp):
    """Bytes that leave a rank."""
    times = {"all_reduce": 2 * (tp - 1) / tp, "all_gather": tp - 1, "all_to_all_single": (tp - 1) / tp}
    return sum(times[kind] * nbytes for kind, nbytes in messages.items())


SOME = ("mamba", "mamba2-1-group", "zamba2-2-groups-biases")
SOMETIMES = by_default(SOME, MODELS)


@worlds
@pytest.mark.parametrize("name", SOMETIMES)
def test_messages_in_a_format(ranks, tp, name, models):
    """Of block outputs in fewer bytes: all-gathers, with the norm's sum of squares behind them, in two rounds if they are
    long; all else is as many all-reduces as in fp32. A caller's all-reduce has the squares summed by one of their own."""
    formats, lengths = ("fp16", "bf16", "int8"), (1, 20, 200)
    outputs, column = LAYERS + 2 * uses_of(name), groups_of(name) == 1

    @torch.no_grad()
    def run(rank):
        found = {}
        for format in formats:
            model = megatron_ssm.load(models[name][0], dist.group.WORLD, reduce=format, shared_memory=False)
            cache = model.new_cache(BATCH)
            for length in reversed(lengths):
                ids = torch.zeros(BATCH, length, dtype=torch.long)
                model.counter.reset()
                calls, nbytes = tallied(lambda ids=ids, model=model, cache=cache: model.local_logits(ids, cache=cache))
                counted = {
                    kind.replace("all_to_all", "all_to_all_single"): n for kind, n in model.counter.calls.items()
                }
                assert (counted, model.counter.nbytes) == (calls, nbytes)
                found[format, length] = calls, nbytes, model.counter.sent
        native = partial(all_reduce, format="fp16", algorithm="native")
        model = megatron_ssm.load(models[name][0], dist.group.WORLD, reduce=native, shared_memory=False)
        return found, tallied(lambda: model.local_logits(ids))

    in_fp32, floats = sums_of_a_token(name, tp)
    exactly = floats - outputs * HIDDEN - LAYERS * column  # of a token: x_proj, the norms, the embedding
    for found, native in ranks(run, tp):
        if tp == 1:
            assert set(map(str, found.values())) == {str(({}, 0, 0))} and native == ({}, 0)
            continue
        for (format, length), (calls, nbytes, sent) in found.items():
            of_one = messages_in(format, tp, BATCH * length * HIDDEN, BATCH * length * column)
            messages = {kind: outputs * size for kind, size in of_one.items()}
            messages = {"all_reduce": 4 * BATCH * length * exactly} | messages
            if column:  # it rides with the mixers' outputs only
                plain = messages_in(format, tp, BATCH * length * HIDDEN, 0)
                for kind in of_one:
                    messages[kind] -= 2 * uses_of(name) * (of_one[kind] - plain[kind])
            # Zamba's x_proj is summed among the ranks that share a head only.
            share = tp // MODELS[name][1].get("n_mamba_heads", 1)
            less = (tp - 1) / tp - (share - 1) / share if groups_of(name) == 0 and share > 1 else 0
            of_all = sent_of(messages, tp) - 2 * less * 4 * BATCH * length * (exactly - HIDDEN)
            expected_calls = {"all_reduce": in_fp32 - outputs} | {kind: outputs for kind in of_one}
            assert (calls, nbytes, sent) == (expected_calls, sum(messages.values()), of_all), format
        columns = LAYERS * column
        assert native == (
            {"all_reduce": in_fp32 + columns},
            BATCH * (4 * exactly + 2 * HIDDEN * outputs + 4 * columns),
        )


@worlds
@pytest.mark.parametrize("name", NAMES)
def test_all_reduces_of_a_training_step(ranks, tp, name, models):
    """Forward: those of a token and the loss's two. Backward: the gradients of what each rank used for its part."""

    def run(rank):
        model = megatron_ssm.load(models[name][0], dist.group.WORLD, shared_memory=False)
        ids = torch.zeros(BATCH, 5, dtype=torch.long)
        losses = []
        forward, _ = tallied(lambda: losses.append(model.loss(ids, ids)))
        backward, _ = tallied(losses[0].backward)
        assert Counter(forward) + Counter(backward) == model.counter.calls
        return forward, backward

    groups, changes = groups_of(name), MODELS[name][1]
    forward = sums_of_a_token(name, tp)[0] + 2
    inputs = LAYERS + 1  # of every in_proj, and of the head
    sums = LAYERS * (sums_of_a_mixer(name, tp)[0] - 1)  # x_proj's, or the norm's
    biases = changes.get("use_bias", changes.get("add_bias_linear", False))
    tensors = 3 + biases  # that hold B and C: in_proj's weight and bias, the convolution's two
    shared = LAYERS * tensors * (0 < groups < tp)
    adapters = MODELS[name][0] == "zamba2", "use_shared_attention_adapter" in changes
    inputs += uses_of(name) * (2 + sum(adapters))  # of attention and MLP, and between the two halves of adapters
    expected = ({}, {}) if tp == 1 else ({"all_reduce": forward}, {"all_reduce": inputs + sums + shared})
    assert ranks(run, tp) == [expected] * tp


# Memory


def state_bytes(name, tp, dtype):
    """Of the convolutions' histories and the fp32 states: 1/T, but every rank has its groups' B and C in its history."""
    groups = groups_of(name)
    channels = INNER // tp + (2 * max(groups // tp, 1) * STATE if groups else 0)
    return LAYERS * BATCH * (channels * (KERNEL - 1) * dtype.itemsize + INNER // tp * STATE * 4)


def position_bytes(name, tp, dtype):
    """Of the keys and values of one position in every row."""
    kv_heads = MODELS[name][1].get("num_key_value_heads", 0)
    return 2 * uses_of(name) * BATCH * kv_heads // tp * HEAD_DIM * dtype.itemsize


@worlds
@pytest.mark.parametrize("name", NAMES)
def test_cache_bytes(ranks, tp, name, models):
    """Keys and values have room for max_length from the start, and nothing moves; or for what has been stored."""
    dtypes, longest, prompt = (torch.float32, torch.bfloat16), 9, 6
    ids = torch.zeros(BATCH, prompt, dtype=torch.long)

    def held(cache):
        storages = [t.untyped_storage() for layer in cache.layers for t in layer.tensors()]
        assert cache.nbytes == sum(storage.nbytes() for storage in storages)
        return cache.nbytes, [storage.data_ptr() for storage in storages]

    @torch.no_grad()
    def run(dtype):
        model = megatron_ssm.load(models[name][0], dist.group.WORLD, dtype=dtype)
        found = []
        for cache in (model.new_cache(BATCH), model.new_cache(BATCH, max_length=longest)):
            found.append(held(cache))
            for part in (ids, ids[:, :1]):
                model.local_logits(part, cache=cache)
                found.append(held(cache))
        sizes, places = zip(*found, strict=True)
        assert places[3] == places[4] == places[5]
        return sizes

    lengths = 0, prompt, prompt + 1, longest, longest, longest
    bytes_of = [(state_bytes(name, tp, dtype), position_bytes(name, tp, dtype)) for dtype in dtypes]
    expected = [tuple(state + length * position for length in lengths) for state, position in bytes_of]
    assert ranks(lambda rank: [run(dtype) for dtype in dtypes], tp) == [expected] * tp


WHOLE = ("layernorm.weight", ".norm.weight", "norm_f.weight", "out_proj.bias", "down_proj.bias", ".linear.weight")


def is_whole(model, name):
    """Whether every rank holds all of a Hugging Face tensor."""
    if "adapter_list" in name:
        layer, use = int(name.split(".")[2]), int(name.split("adapter_list.")[1].split(".")[0])
        untied = MODELS[model][1].get("tie_word_embeddings") is False
        return name.endswith(".0.weight") or (untied and HYBRIDS[use] != layer)  # another layer's, and unused
    return name.endswith(WHOLE) and not name.endswith(("mixer.norm.weight", "mamba.norm.weight"))


def numbers_on_a_rank(model, name, shape, tp):
    """How many numbers of a Hugging Face tensor the first of `tp` ranks holds."""
    groups = groups_of(model)
    if is_whole(model, name):
        return shape.numel()
    if name.endswith(("embeddings.weight", "embed_tokens.weight", "lm_head.weight")):
        return -(-shape[0] // tp) * shape[1]
    if groups and ("in_proj" in name or "conv1d" in name):
        bc = 2 * groups * STATE
        return shape[1:].numel() * ((shape[0] - bc) // tp + bc // min(groups, tp))
    return shape.numel() // tp


@worlds
@pytest.mark.parametrize("name", NAMES)
def test_parameter_bytes(ranks, tp, name, models):
    """1/T of every tensor, except norms, biases of sums, Zamba's `linear`, the first halves of adapters, unused adapters,
    and the B and C of groups that several ranks share."""
    place, shapes = models[name]

    def run(rank):
        model = megatron_ssm.load(place, dist.group.WORLD)
        storages = [parameter.untyped_storage() for parameter in model.parameters()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())

    expected = 4 * sum(numbers_on_a_rank(name, n, shape, tp) for n, shape in shapes.items())
    first, *others = ranks(run, tp)
    assert first == expected
    assert all(other <= first for other in others)  # of the vocabulary
