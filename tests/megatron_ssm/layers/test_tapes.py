"""Tokens and prompts that a tape computes. Oracles: the same model layer by layer, and token by token."""

import copy
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

import megatron_ssm
from cases import CASES, EXPERTS, groups_of, with_layers
from commfabric.native.library import Library
from megatron_ssm import families
from megatron_ssm.kernels import kernels, products
from megatron_ssm.layers import tape_operations, tapes
from megatron_ssm.model.adapters import adapter_parameters
from serving import IDS, one_by_one, saved

pytestmark = pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")

HYBRID = dict(layers_block_type=["hybrid"] * 2)
ROTARY = dict(HYBRID, use_shared_attention_adapter=True, use_mem_rope=True, mamba_ngroups=2, add_bias_linear=True)
WITH_EXPERTS = [(family, with_layers(changes)) for name, (family, changes) in CASES.items() if "expert" in name]
WIDE_EXPERTS = dict(hidden_size=256, moe_intermediate_size=128, shared_expert_intermediate_size=128)
MODELS = [
    ("mamba", dict(use_bias=True)),
    ("mamba", dict(residual_in_fp32=False)),
    ("falcon_mamba", dict()),
    ("mamba2", dict(use_bias=True, n_groups=2)),
    ("mamba2", dict(n_groups=1, vocab_size=61)),
    ("zamba", dict(HYBRID, n_mamba_heads=2, hidden_act="silu")),
    ("zamba", dict(HYBRID, n_mamba_heads=8, mamba_expand=3, mamba_dt_rank=2, mamba_proj_bias=True)),
    ("zamba2", ROTARY),
    ("zamba2", dict(HYBRID, num_attention_heads=8, num_key_value_heads=4, hidden_act="gelu_pytorch_tanh")),
    ("nemotron_h", dict(use_bias=True)),
    ("nemotron_h", dict(layers_block_type=["mlp", "full_attention"], mlp_bias=True)),
    ("granitemoehybrid", dict(attention_bias=True)),
    ("bamba", dict(head_dim=12)),
    ("falcon_h1", dict()),
    ("jamba", dict(mamba_proj_bias=True)),
    ("qwen3_5_text", dict()),
    ("qwen3_5_text", dict(linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32)),
    ("qwen3_next", dict()),
    ("olmo_hybrid", dict()),
    *WITH_EXPERTS,
]
models = pytest.mark.parametrize("family, changes", MODELS)
DTYPES = (dict(), pytest.param(dict(dtype=torch.bfloat16), marks=pytest.mark.full))
# Rows, the tokens that they read, and how many of these are kept.
CALLS = [
    ((0, 1), IDS[:, 4:6], (2, 1)), ((1,), IDS[1:, 5:9], (3,)), ((0, 1), IDS[:, 6:8], (1, 1)), ((1,), IDS[1:, :4], (4,)),
]  # fmt: skip


def without_tapes(model):
    """Let the model compute layer by layer."""
    model._tapes.logits = model._tapes.read_prompt = lambda *_: None
    return model


def stops(model, kind=tapes.DECODE):
    """How many layers of the model's tape are left to Python; None if there is no tape."""
    tape = model._tapes.tape(model, kind)
    return None if tape is None else len(tape.builder.stops)


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
    return [*logits, *(tensor for state in cache.states.values() for tensor in state.fixed.values())]


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("options", DTYPES, ids=str)
@models
def test_tokens_equal_those_of_layers(ranks, tp, options, family, changes, tmp_path):
    """Decoded, and read speculatively with some of them taken back: the states are also those of decoding one by one."""
    directory = saved(tmp_path, family, **changes)

    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD, **options)
        by_tape, again, ahead, singly = (
            one_by_one(model, model),
            one_by_one(model, model),
            kept(model, 1),
            kept(model, 0),
        )
        without = stops(model), stops(model, tapes.SPECULATE)
        without_tapes(model)
        return by_tape, again, one_by_one(model, model), ahead, singly, kept(model, ahead=True), without

    for by_tape, again, by_layers, ahead, singly, ahead_by_layers, without in ranks(run, tp):
        assert without == (0, 0) and torch.equal(by_tape, again)
        largest = float(by_layers.abs().max())
        share = 0.04 if "zamba" in family else 0.02  # shared blocks amplify rounding
        atol = max(0.06, share * largest) if "dtype" in options else 5e-5 if "zamba" in family else 2e-6 * largest
        torch.testing.assert_close(by_tape, by_layers, rtol=0, atol=atol)
        torch.testing.assert_close(ahead, ahead_by_layers, rtol=0, atol=max(1e-4, 2 * atol))
        torch.testing.assert_close(ahead, singly, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", (dict(), dict(dtype=torch.bfloat16), dict(weights="int8"), dict(weights="int4")), ids=str
)
@pytest.mark.parametrize(
    "family, changes",
    [
        ("mamba", {}),
        ("mamba2", dict(num_heads=16, head_dim=32)),
        ("zamba2", HYBRID),
        ("qwen3_5_moe_text", dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)),
        ("nemotron_h", dict(EXPERTS, layers_block_type=["moe", "linear_attention", "moe"], moe_intermediate_size=64)),
    ],
)
def test_each_format_of_weights(options, family, changes, tmp_path):
    """Any number of tokens of a call have the bits of decoding one by one."""
    directory = saved(tmp_path, family, hidden_size=256, vocab_size=320, **changes)
    model = megatron_ssm.load(directory, **options)
    dtype = options.get("dtype", torch.float32)
    tokens = max(n for n in range(1, 9) if products.has_kernel(dtype, dtype, n, 256))
    ids = torch.arange(20, 27 + tokens).view(1, -1)
    ahead, plain = model.new_cache(1), model.new_cache(1)
    with torch.no_grad():
        for cache in (ahead, plain):
            model.next_logits(ids[:, :7], cache=cache, prompt=True)
        found = model.speculative_logits(ids[:, 7:], ahead)[0]
        singly = [model.next_logits(ids[:, t : t + 1], None, plain)[0] for t in range(7, ids.shape[1])]
        by_tape = one_by_one(model, model)
        assert stops(model) == 0
        by_layers = one_by_one(without_tapes(model), model)
    assert torch.equal(found, torch.stack(singly))
    assert (by_tape - by_layers).norm() < (0.02 if "dtype" in options else 2e-3) * by_layers.norm()


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("weights", ("int8", "int4"))
def test_quantized_experts_that_ranks_split_in_blocks(ranks, tp, weights, tmp_path):
    """Three blocks of channels, of which one of two ranks has two. Oracles: the model layer by layer, and one rank."""
    kinds = ["moe", "linear_attention", "moe"]
    sizes = dict(hidden_size=128, moe_intermediate_size=192, moe_shared_expert_intermediate_size=128)
    sizes |= dict(mamba_num_heads=8, mamba_head_dim=32)
    directory = saved(tmp_path, "nemotron_h", **EXPERTS | sizes, layers_block_type=kinds)

    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD, weights=weights)
        shapes = [tuple(each.matrix().shape) for each in (model.layers[0].mixer.up, model.layers[0].mixer.down)]
        results = []
        for _ in range(2):
            tokens = megatron_ssm.generate(model, IDS[:, :5], max_new_tokens=6)
            results.append((one_by_one(model, model), tokens, stops(model)))
            without_tapes(model)
        return shapes, *results

    alone = megatron_ssm.load(directory, weights=weights)
    alone = one_by_one(alone, alone)
    for rank, (shapes, by_tape, by_layers) in enumerate(ranks(run, tp)):
        channels = 192 if tp == 1 else (128, 64)[rank]
        assert shapes == [(8 * channels, 128), (8 * 128, channels)] and by_tape[2] == 0
        torch.testing.assert_close(by_tape[0], by_layers[0], rtol=0, atol=2e-3)
        torch.testing.assert_close(by_tape[0], alone, rtol=0, atol=2e-3)
        assert torch.equal(by_tape[1], by_layers[1])


@pytest.mark.parametrize("tp, ep", [(1, 2), (2, 2), pytest.param(1, 4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "family, changes, options",
    [
        *((*each, {}) for each in WITH_EXPERTS),
        ("qwen3_5_moe_text", WIDE_EXPERTS, dict(weights="int8")),
        ("qwen3_5_moe_text", WIDE_EXPERTS, dict(dtype=torch.bfloat16)),
    ],
)
def test_experts_of_several_ranks(ranks, tp, ep, family, changes, options, tmp_path):
    """A prompt in pieces, decoded tokens, and tokens that are read speculatively, of ranks with the same tokens."""
    config = families.read(saved(tmp_path, family, **changes))
    if any(spec.experts % ep for _, spec in config.operators):
        pytest.skip("the experts do not divide over the ranks")
    prompt = torch.arange(2 * 300).view(2, -1) % 61

    @torch.no_grad()
    def results(model):
        cache = model.new_cache(2)
        return model(prompt, cache=cache), one_by_one(model, model), *kept(model, ahead=True)

    def run(rank):
        tensor, others = groups_of(rank, tp, ep)
        model = megatron_ssm.load(tmp_path, tensor, expert_group=others, **options)
        found = results(model), results(model)
        left = [stops(model, kind) for kind in (tapes.DECODE, tapes.SPECULATE)]
        return *found, results(without_tapes(model)), left

    everywhere = ranks(run, tp * ep)
    for by_tape, again, by_layers, left in everywhere:
        assert left == [0, 0] and all(map(torch.equal, by_tape, again))
        for pair in zip(by_tape, by_layers, strict=True):
            ours, theirs = (each.nan_to_num(neginf=0) for each in pair)  # of a rank with fewer words than others
            assert (ours - theirs).norm() <= (0.03 if options else 1e-6) * theirs.norm()
        if tp == 1:
            assert all(map(torch.equal, by_tape, everywhere[0][0]))


@pytest.mark.parametrize("options", DTYPES, ids=str)
@pytest.mark.parametrize("length", (5, 300))
@models
def test_prompts_equal_those_of_layers(options, length, family, changes, tmp_path, monkeypatch):
    """Also in chunks, with attention in Python."""
    monkeypatch.setattr(tapes, "CHUNK", 128)
    monkeypatch.setattr(tapes, "EXPERT_CHUNK", 128)
    model = megatron_ssm.load(saved(tmp_path, family, **changes), **options)
    prompt = torch.randint(61, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        caches = [model.new_cache(2) for _ in range(2)]
        ours = model(prompt, cache=caches[0])
        tape = model._tapes.tape(model, tapes.PROMPT)
        assert all(name.endswith("attention") for name in tape.builder.names if " stop" in name)
        theirs = without_tapes(model)(prompt, cache=caches[1])
    if options:
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for one, other in zip(*(cache.states.values() for cache in caches), strict=True):
        for name in one.fixed:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-4 if not options else 0.05)


@pytest.mark.parametrize("family, changes", [("mamba2", {}), ("zamba2", ROTARY), ("qwen3_next", {})])
def test_scattered_rows(family, changes, tmp_path):
    model = megatron_ssm.load(saved(tmp_path, family, **changes))
    with torch.no_grad():
        caches = [model.new_cache(5) for _ in range(2)]
        prompts, token = torch.arange(30).view(5, 6), torch.tensor([[7], [8], [9]])
        for cache in caches:
            model.next_logits(prompts, cache=cache, prompt=True)
        ours = model.next_logits(token, None, caches[0].select([4, 0, 1]))
        alone = [
            model.next_logits(t[None], None, caches[1].select([row])) for t, row in zip(token, (4, 0, 1), strict=True)
        ]
    assert stops(model) == 0 and caches[0].lengths.tolist() == [7, 7, 6, 6, 7]
    assert torch.equal(ours, torch.cat(alone))
    for one, other in zip(*(cache.states.values() for cache in caches), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one.fixed)


@pytest.mark.parametrize(
    "targets", (("in_proj", "out_proj"), ("q_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "linear"))
)
@pytest.mark.parametrize("dtype, limit", ((torch.float32, 1e-5), (torch.bfloat16, 0.05)))
def test_low_rank_adapters(targets, dtype, limit, tmp_path):
    """The factors are float32 over bfloat16, too."""
    model = megatron_ssm.load(saved(tmp_path, "zamba2", **ROTARY), dtype=dtype)
    megatron_ssm.add_lora(model, 2, 4.0, targets)
    with torch.no_grad():
        for _, parameter in adapter_parameters(model):
            assert parameter.dtype is torch.float32
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    ours = one_by_one(model, model)
    assert stops(model) == 0
    theirs = one_by_one(without_tapes(model), model)
    assert (ours - theirs).norm() < limit * theirs.norm()


# What Python computes, and what is noticed

TOO_LARGE = [("mamba", dict(conv_kernel=9)), ("mamba", dict(state_size=300)), ("mamba2", dict(state_size=257))]


@pytest.mark.parametrize("family, changes", TOO_LARGE)
def test_layers_that_c_does_not_support(family, changes, tmp_path):
    model = megatron_ssm.load(saved(tmp_path, family, **changes))
    assert stops(model) is None
    assert one_by_one(model, model).isfinite().all()


def test_a_layer_with_a_hook_is_a_stop(tmp_path):
    model, called = megatron_ssm.load(saved(tmp_path, "zamba2", **ROTARY)), []
    before = one_by_one(model, model)
    model.layers[1].mixer.in_proj.register_forward_hook(lambda *_: called.append(1))
    hooked = one_by_one(model, model)
    assert stops(model) == 1 and len(called) == 6
    torch.testing.assert_close(hooked, before, rtol=0, atol=1e-4)
    assert "Python" in model._tapes.tape(model, tapes.DECODE).describe()


CHANGES = {
    "a number": lambda model: setattr(model.layers[0].norm, "eps", 0.5),
    "a parameter in place": lambda model: model.layers[1].mixer.A_log.data.mul_(2),
    "a parameter": lambda model: setattr(
        model.layers[0].mixer, "D", torch.nn.Parameter(torch.ones_like(model.layers[0].mixer.D))
    ),
    "a module": lambda model: setattr(model, "norm_f", copy.deepcopy(model.layers[1].norm)),
    "a hook": lambda model: model.layers[1].norm.register_forward_hook(lambda _, __, y: 2 * y),
    "loaded values": lambda model: model.load_state_dict({n: 1.1 * p for n, p in model.state_dict().items()}),
    "another method": lambda model: setattr(model.layers[0], "forward", lambda x, *_: x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_between_two_tokens_are_noticed(change, tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    with torch.no_grad():
        caches = [model.new_cache(2) for _ in range(2)]
        for cache in caches:
            model(IDS[:, :4], cache=cache)
            model(IDS[:, 4:5], cache=cache)
        change(model)
        ours = model(IDS[:, 5:6], cache=caches[0])
        torch.testing.assert_close(ours, without_tapes(model)(IDS[:, 5:6], cache=caches[1]), rtol=0, atol=1e-5)


def test_parameters_that_have_moved_are_found_by_the_next_prompt(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    one_by_one(model, model)
    for parameter in model.parameters():
        parameter.data = 1.1 * parameter.data
    torch.testing.assert_close(one_by_one(model, model), one_by_one(without_tapes(model), model), rtol=0, atol=1e-5)


def test_what_has_moved_cannot_be_accepted(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "zamba2", **ROTARY))
    with torch.no_grad():
        cache = model.new_cache(2)
        model.next_logits(IDS[:, :4], cache=cache, prompt=True)
        model.speculative_logits(IDS[:, 4:6], cache)
        cache.allocate(64)
        with pytest.raises(RuntimeError, match="reallocated since speculative_logits"):
            cache.accept([1, 1])


@torch.no_grad()
def test_a_cache_is_freed_when_its_user_drops_it(tmp_path):
    """Though the tapes of its prompt, its tokens and its speculative tokens are kept."""
    model = megatron_ssm.load(saved(tmp_path, "zamba2"))
    cache = model.new_cache(2)
    model.next_logits(IDS[:, :4], cache=cache, prompt=True)
    model.next_logits(IDS[:, 4:5], cache=cache)
    model.speculative_logits(IDS[:, 5:7], cache)
    cache.accept([1, 1])
    layout = weakref.ref(cache.layout)
    del cache
    assert layout() is None


def test_ids_outside_the_vocabulary_change_nothing(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    with torch.no_grad():
        cache = model.new_cache(2)
        model(IDS[:, :4], cache=cache)
        states = [tensor.clone() for tensor in cache.tensors()]
        with pytest.raises(ValueError, match="61"):
            model(torch.tensor([[1], [61]]), cache=cache)
    assert cache.lengths.tolist() == [4, 4] and all(map(torch.equal, states, cache.tensors()))


def test_copies_and_threads_have_tapes_of_their_own(tmp_path):
    model, found = megatron_ssm.load(saved(tmp_path, "zamba2", **ROTARY)), []
    expected = one_by_one(model, model)
    copied = copy.deepcopy(model)
    copied.layers[0].norm.eps = 0.5
    threads = [threading.Thread(target=lambda m=m: found.append(one_by_one(m, m))) for m in (model, copied)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(torch.equal(each, expected) for each in found) == 1
    assert torch.equal(one_by_one(model, model), expected)


def test_without_the_library(tmp_path, monkeypatch):
    model = megatron_ssm.load(saved(tmp_path, "zamba2", **ROTARY))
    ours = one_by_one(model, model)
    monkeypatch.setattr(kernels, "LIBRARY", Library("megatron_ssm", {}, "/nonexistent"))
    torch.testing.assert_close(ours, one_by_one(model, model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tp", (1, 2))
def test_the_users_reduction_may_return_another_dtype(ranks, tp, tmp_path):
    directory = saved(tmp_path, "mamba2", n_groups=1)

    def run(rank):
        def reduce(tensor, group):
            total = tensor.double()
            dist.all_reduce(total, group=group)
            return total

        model = megatron_ssm.load(directory, dist.group.WORLD, reduce=reduce)
        return one_by_one(model, model), one_by_one(without_tapes(model), model)

    for ours, theirs in ranks(run, tp):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_token_takes_few_calls_of_python(tmp_path):
    """A Zamba2 of 24 layers, of which four use shared blocks with adapters."""
    kinds = ["hybrid" if i % 6 == 5 else "linear_attention" for i in range(24)]
    sizes = dict(hidden_size=64, num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True)
    raw = dict(
        model_type="zamba2", vocab_size=512, num_hidden_layers=24, layers_block_type=kinds, num_attention_heads=4,
        n_mamba_heads=8, mamba_d_state=16, adapter_rank=8, intermediate_size=256, **sizes,
    )  # fmt: skip
    model, calls = megatron_ssm.initialize(megatron_ssm.build(megatron_ssm.layers.families.from_dict(raw))), []
    with torch.no_grad():
        cache, token = model.new_cache(1, 64), torch.tensor([[3]])
        model.next_logits(IDS[:1], cache=cache, prompt=True)
        model.next_logits(token, cache=cache)

        def profile(frame, event, _):
            if event == "call" and any(name in frame.f_code.co_filename for name in ("megatron_ssm", "sparsefusion")):
                calls.append(frame.f_code.co_qualname)

        sys.setprofile(profile)
        model.next_logits(token, cache=cache)
        sys.setprofile(None)
    assert 0 < len(calls) <= 60, calls


def test_operations_are_those_of_c():
    assert tape_operations.Op.n.size == 64 and tape_operations.Tape.threads.offset % 4 == 0
    names = " ".join(tape_operations.KINDS).upper().split()
    header = (kernels.LIBRARY.path.parent / "tape.h").read_text() if hasattr(kernels.LIBRARY, "path") else None
    if header is not None:
        listed = header[header.index("EMBED") : header.index("STOP\n") + 4].replace(",", " ").split()
        assert listed == names


@torch.no_grad()
@pytest.mark.parametrize("family, changes", [("mamba2", {}), ("zamba2", HYBRID)])
def test_a_layer_that_is_appended(family, changes, tmp_path):
    """Oracle: the same model without a cache, whose layers are called one by one."""
    model = megatron_ssm.load(saved(tmp_path, family, **changes))
    ids = torch.arange(6).view(1, -1)
    cache = model.new_cache(1)
    before = model(ids, cache=cache)[:, -1]
    model(ids[:, :1], cache=cache)
    model.layers.append(copy.deepcopy(model.layers[0]))
    cache = model.new_cache(1)
    decoded = [model(ids[:, t : t + 1], cache=cache) for t in range(6)]
    with torch.enable_grad():
        expected = model(ids)
    assert not torch.allclose(expected[:, -1], before)
    torch.testing.assert_close(torch.cat(decoded, 1), expected.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids, cache=model.new_cache(1)), expected.detach(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cache_of_thousands_of_rows(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    ids, cache, alone = torch.arange(6).view(1, -1), model.new_cache(9000), model.new_cache(1)
    for t in range(6):
        logits = model(ids[:, t : t + 1], cache=cache.select([8999]))
        assert torch.equal(logits, model(ids[:, t : t + 1], cache=alone))
    assert int(cache.lengths.sum()) == 6
