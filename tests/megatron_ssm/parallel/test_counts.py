"""Counts of messages and of bytes in memory. Oracles: docs/concepts/all-reduce-count.md, and torch.distributed."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

import megatron_ssm
from hf import save_hf
from megatron_ssm.model.advise import all_reduces
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
    """The number of groups; 0 for Mamba-1 mixers, which have none."""
    changes = MODELS[name][1]
    return changes.get("n_groups", changes.get("mamba_ngroups", 0))


def block_uses(name):
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


def count_calls(function):
    """The calls of torch.distributed while function() runs: ({name: calls}, bytes of their inputs)."""
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


def mixer_sums(name, tp):
    """(all-reduces, floats in them) for one token in the mixer of one layer."""
    groups, changes = groups_of(name), MODELS[name][1]
    if groups == 0 and changes.get("n_mamba_heads", 1) >= tp:  # out_proj; x_proj is local, as each rank has whole heads
        return 1, HIDDEN
    if groups == 0:  # x_proj, over the ranks that share a head or over all, and out_proj
        return 2, RANK + 2 * STATE + HIDDEN
    if groups == 1:  # out_proj with the norm's sum of squares as one more column
        return 1, HIDDEN + 1
    if groups % tp == 0:
        return 1, HIDDEN
    return 2, groups + HIDDEN  # the norm's sums of squares, one for each group, and out_proj


def token_sums(name, tp):
    """(all-reduces, floats in them) for one token."""
    if tp == 1:
        return 0, 0
    sums, floats = mixer_sums(name, tp)
    others = 2 * block_uses(name) + 1  # attention and MLP of each use, and the embedding
    return LAYERS * sums + others, LAYERS * floats + others * HIDDEN


@worlds
@pytest.mark.parametrize("name", NAMES)
def test_all_reduces_of_a_decoded_token(ranks, tp, name, models):
    """2L+1 for Mamba-1, Zamba with heads < ranks, and Mamba-2 with 1 < groups < ranks; else L+1. Each use of a shared
    block adds 2. A prefill has as many, but longer ones."""
    prompt = 20

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(models[name][0], dist.group.WORLD, shared_memory=False)
        ids, cache, counts = torch.zeros(BATCH, prompt, dtype=torch.long), model.new_cache(BATCH), []
        for part in (ids, ids[:, :1]):
            model.counter.reset()
            counts.append(count_calls(lambda ids=part: model.local_logits(ids, cache=cache)))
            assert counts[-1] == (dict(model.counter.calls), model.counter.nbytes)
        gathered, _ = count_calls(lambda: model(ids[:, :1], cache=cache))
        return *counts, gathered

    calls, floats = token_sums(name, tp)
    calls = {"all_reduce": calls} if calls else {}
    for prefill, token, gathered in ranks(run, tp):
        assert token == (calls, 4 * BATCH * floats)
        assert prefill == (calls, 4 * BATCH * floats * prompt)
        assert gathered == (calls | {"all_gather": 1} if calls else {})  # the logits of all ranks


def messages_in(format, tp, numbers, exact):
    """{function of torch.distributed: input bytes} for one block output of `numbers`, with `exact` float32 appended."""
    size = {"fp16": 2, "bf16": 2}.get(format)
    whole = numbers * size if size else -(-numbers // 128) * 132
    if (tp - 1) * (tp - 2) * whole <= tp * 32 * 1024:  # one round, if two would save at most 32 KB
        return {"all_gather": whole + 4 * exact}
    chunk = -(-numbers // tp) * size if size else -(-numbers // (128 * tp)) * 132
    chunk += 4 * -(-exact // tp)
    return {"all_to_all_single": tp * chunk, "all_gather": chunk}


def bytes_sent(messages, tp):
    """The bytes that a rank sends."""
    times = {"all_reduce": 2 * (tp - 1) / tp, "all_gather": tp - 1, "all_to_all_single": (tp - 1) / tp}
    return sum(times[kind] * nbytes for kind, nbytes in messages.items())


FORMAT_MODELS = ("mamba", "mamba2-1-group", "zamba2-2-groups-biases")
FORMAT_NAMES = by_default(FORMAT_MODELS, MODELS)


@worlds
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_messages_in_a_format(ranks, tp, name, models):
    """Reduced block outputs use all-gathers, which contain the norm's sums of squares, in two rounds if they are long.
    Other sums are all-reduces, as in fp32. With a custom `reduce`, the sums of squares have an all-reduce of their own."""
    formats, lengths = ("fp16", "bf16", "int8"), (1, 20, 200)
    outputs, column = LAYERS + 2 * block_uses(name), groups_of(name) == 1

    @torch.no_grad()
    def run(rank):
        found = {}
        for format in formats:
            model = megatron_ssm.load(models[name][0], dist.group.WORLD, reduce=format, shared_memory=False)
            cache = model.new_cache(BATCH)
            for length in reversed(lengths):
                ids = torch.zeros(BATCH, length, dtype=torch.long)
                model.counter.reset()
                calls, nbytes = count_calls(
                    lambda ids=ids, model=model, cache=cache: model.local_logits(ids, cache=cache)
                )
                counted = {
                    kind.replace("all_to_all", "all_to_all_single"): n for kind, n in model.counter.calls.items()
                }
                assert (counted, model.counter.nbytes) == (calls, nbytes)
                found[format, length] = calls, nbytes, model.counter.sent
        native = partial(all_reduce, format="fp16", algorithm="native")
        model = megatron_ssm.load(models[name][0], dist.group.WORLD, reduce=native, shared_memory=False)
        return found, count_calls(lambda: model.local_logits(ids))

    all_reduces, floats = token_sums(name, tp)
    exact_floats = floats - outputs * HIDDEN - LAYERS * column  # per token: x_proj, the norms, the embedding
    for found, native in ranks(run, tp):
        if tp == 1:
            assert set(map(str, found.values())) == {str(({}, 0, 0))} and native == ({}, 0)
            continue
        for (format, length), (calls, nbytes, sent) in found.items():
            per_output = messages_in(format, tp, BATCH * length * HIDDEN, BATCH * length * column)
            messages = {kind: outputs * size for kind, size in per_output.items()}
            messages = {"all_reduce": 4 * BATCH * length * exact_floats} | messages
            if column:  # only the outputs of mixers contain sums of squares
                plain = messages_in(format, tp, BATCH * length * HIDDEN, 0)
                for kind in per_output:
                    messages[kind] -= 2 * block_uses(name) * (per_output[kind] - plain[kind])
            # Zamba's x_proj is summed among the ranks that share a head only.
            share = tp // MODELS[name][1].get("n_mamba_heads", 1)
            less = (tp - 1) / tp - (share - 1) / share if groups_of(name) == 0 and share > 1 else 0
            total_sent = bytes_sent(messages, tp) - 2 * less * 4 * BATCH * length * (exact_floats - HIDDEN)
            expected_calls = {"all_reduce": all_reduces - outputs} | {kind: outputs for kind in per_output}
            assert (calls, nbytes, sent) == (expected_calls, sum(messages.values()), total_sent), format
        columns = LAYERS * column
        assert native == (
            {"all_reduce": all_reduces + columns},
            BATCH * (4 * exact_floats + 2 * HIDDEN * outputs + 4 * columns),
        )


@worlds
@pytest.mark.parametrize("name", NAMES)
def test_all_reduces_of_a_training_step(ranks, tp, name, models):
    """Forward: those of a token, and two for the loss. Backward: the gradients of the inputs that all ranks use."""

    def run(rank):
        model = megatron_ssm.load(models[name][0], dist.group.WORLD, shared_memory=False)
        ids = torch.zeros(BATCH, 5, dtype=torch.long)
        losses = []
        forward, _ = count_calls(lambda: losses.append(model.loss(ids, ids)))
        backward, _ = count_calls(losses[0].backward)
        assert Counter(forward) + Counter(backward) == model.counter.calls
        return forward, backward

    groups, changes = groups_of(name), MODELS[name][1]
    forward = token_sums(name, tp)[0] + 2
    inputs = LAYERS + 1  # the inputs of every in_proj, and of the head
    sums = LAYERS * (mixer_sums(name, tp)[0] - 1)  # x_proj's, or the norm's
    biases = changes.get("use_bias", changes.get("add_bias_linear", False))
    tensors = 3 + biases  # those that hold B and C: in_proj's weight and bias, the convolution's two
    shared = LAYERS * tensors * (0 < groups < tp)
    adapters = MODELS[name][0] == "zamba2", "use_shared_attention_adapter" in changes
    inputs += block_uses(name) * (2 + sum(adapters))  # of attention, MLP and the second halves of adapters
    expected = ({}, {}) if tp == 1 else ({"all_reduce": forward}, {"all_reduce": inputs + sums + shared})
    assert ranks(run, tp) == [expected] * tp


# Memory


def state_bytes(name, tp, dtype):
    """Bytes of histories and fp32 states on a rank: 1/T of them, but all B and C of its groups in each history."""
    groups = groups_of(name)
    channels = INNER // tp + (2 * max(groups // tp, 1) * STATE if groups else 0)
    return LAYERS * BATCH * (channels * (KERNEL - 1) * dtype.itemsize + INNER // tp * STATE * 4)


def position_bytes(name, tp, dtype):
    """Bytes of the keys and values of one position, in all rows."""
    kv_heads = MODELS[name][1].get("num_key_value_heads", 0)
    return 2 * block_uses(name) * BATCH * kv_heads // tp * HEAD_DIM * dtype.itemsize


@worlds
@pytest.mark.parametrize("name", NAMES)
def test_cache_bytes(ranks, tp, name, models):
    """With max_length, keys and values are allocated once and never move; without it, their size is what is stored."""
    dtypes, longest, prompt = (torch.float32, torch.bfloat16), 9, 6
    ids = torch.zeros(BATCH, prompt, dtype=torch.long)

    def bytes_and_addresses(cache):
        storages = [t.untyped_storage() for layer in cache.states.values() for t in layer.tensors()]
        assert cache.nbytes == sum(storage.nbytes() for storage in storages)
        return cache.nbytes, [storage.data_ptr() for storage in storages]

    @torch.no_grad()
    def run(dtype):
        model = megatron_ssm.load(models[name][0], dist.group.WORLD, dtype=dtype)
        found = []
        for cache in (model.new_cache(BATCH), model.new_cache(BATCH, max_length=longest)):
            found.append(bytes_and_addresses(cache))
            for part in (ids, ids[:, :1]):
                model.local_logits(part, cache=cache)
                found.append(bytes_and_addresses(cache))
        sizes, addresses = zip(*found, strict=True)
        assert addresses[3] == addresses[4] == addresses[5]
        return sizes

    lengths = 0, prompt, prompt + 1, longest, longest, longest
    bytes_of = [(state_bytes(name, tp, dtype), position_bytes(name, tp, dtype)) for dtype in dtypes]
    expected = [tuple(state + length * position for length in lengths) for state, position in bytes_of]
    assert ranks(lambda rank: [run(dtype) for dtype in dtypes], tp) == [expected] * tp


REPLICATED = ("layernorm.weight", ".norm.weight", "norm_f.weight", "out_proj.bias", "down_proj.bias", ".linear.weight")


def is_replicated(model, name):
    """Whether every rank holds the whole Hugging Face tensor."""
    if "adapter_list" in name:
        layer, use = int(name.split(".")[2]), int(name.split("adapter_list.")[1].split(".")[0])
        untied = MODELS[model][1].get("tie_word_embeddings") is False
        return name.endswith(".0.weight") or (untied and HYBRIDS[use] != layer)  # an unused adapter for another layer
    return name.endswith(REPLICATED) and not name.endswith(("mixer.norm.weight", "mamba.norm.weight"))


def numbers_on_a_rank(model, name, shape, tp):
    """How many numbers of a Hugging Face tensor the first of `tp` ranks holds."""
    groups = groups_of(model)
    if is_replicated(model, name):
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
    """A rank holds 1/T of every tensor, except what is replicated: norms, biases after sums, Zamba's `linear`, the first
    halves of adapters, unused adapters, and the B and C of groups that several ranks share."""
    directory, shapes = models[name]

    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD)
        storages = [parameter.untyped_storage() for parameter in model.parameters()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())

    expected = 4 * sum(numbers_on_a_rank(name, n, shape, tp) for n, shape in shapes.items())
    first, *others = ranks(run, tp)
    assert first == expected
    assert all(other <= first for other in others)  # the last ranks may have fewer words


# Hybrids whose layers are units of a mixer and an MLP, or one of them

HYBRIDS_COUNTED = {  # name: (family, changes, the numbers in the sums of one layer after the other for T ranks)
    "nemotron_h": ("nemotron_h", dict(num_hidden_layers=3), lambda T: [HIDDEN + 2 * (T == 4)] + [HIDDEN] * 2),
    "bamba": ("bamba", dict(num_hidden_layers=2, mamba_n_groups=1), lambda T: [HIDDEN + 1] + [HIDDEN] * 3),
    "granitemoehybrid": ("granitemoehybrid", dict(num_hidden_layers=2, mamba_n_groups=4), lambda T: [HIDDEN] * 4),
    "falcon_h1": ("falcon_h1", dict(num_hidden_layers=2), lambda T: [HIDDEN] * 4),
    "falcon_h1 norm": (
        "falcon_h1", dict(num_hidden_layers=1, mamba_rms_norm=True, mamba_n_groups=1), lambda T: [2 * HIDDEN + 1, HIDDEN],
    ),
    "jamba": ("jamba", dict(num_hidden_layers=2), lambda T: [5 + 2 * STATE, HIDDEN, HIDDEN] + [HIDDEN] * 2),
    "qwen3.5": ("qwen3_5_text", dict(num_hidden_layers=2), lambda T: [HIDDEN] * 4),
    "olmo": ("olmo_hybrid", dict(num_hidden_layers=2), lambda T: [HIDDEN] * 2 + [2] + [HIDDEN] * 2),
}  # fmt: skip


@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize("name", HYBRIDS_COUNTED)
def test_all_reduces_of_hybrids(ranks, tp, name, tmp_path):
    """Nemotron-H L + 1; Bamba, Granite and Falcon-H1, whose mixers share a sum, 2L + 1; Jamba 3M + 2A + 1. With
    1 < groups < ranks, one more for each Mamba-2. The numbers are also those of `advise`."""
    family, changes, numbers = HYBRIDS_COUNTED[name]
    save_hf(tmp_path, family, hidden_size=HIDDEN, vocab_size=VOCAB, **changes)

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(tmp_path, dist.group.WORLD, shared_memory=False)
        cache = model.new_cache(BATCH)
        model(torch.zeros(BATCH, 9, dtype=torch.long), cache=cache)
        model.counter.reset()
        model.local_logits(torch.zeros(BATCH, 1, dtype=torch.long), cache=cache)
        return model.counter.calls["all_reduce"], model.counter.nbytes, list(all_reduces(model.config, tp))

    expected = [HIDDEN, *numbers(tp)]  # the embedding first
    extra = int(name == "nemotron_h" and tp == 4)  # of the mixer with 2 groups
    for calls, nbytes, predicted in ranks(run, tp):
        assert calls == len(expected) + extra == sum(count for _, count in predicted)
        assert nbytes == 4 * BATCH * sum(expected)
        assert nbytes == BATCH * sum(size * count for size, count in predicted)
