"""Tokens computed in one call of C from their ids to their logits. Oracle: the same model, step by step from Python."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook

import megatron_ssm
from megatron_ssm.decoding.native_tokens import NativeTokens
from megatron_ssm.native import kernels
from serving import IDS, one_by_one, saved

pytestmark = pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")

BF16 = dict(dtype=torch.bfloat16)
WIDE = dict(hidden_size=128, vocab_size=320)
MODELS = [
    ("mamba", dict(), dict()),
    ("mamba", dict(residual_in_fp32=True, tie_word_embeddings=False), BF16),
    ("mamba", dict(residual_in_fp32=False, vocab_size=320), BF16),
    ("mamba2", dict(), BF16),
    ("mamba2", dict(WIDE, num_heads=4, head_dim=64), dict(weights="int8")),
    ("falcon_mamba", WIDE, dict(BF16, weights="int8")),
    ("falcon_mamba", WIDE, dict(BF16, weights="int4")),
    ("mamba", dict(WIDE, tie_word_embeddings=False), dict(weights="int4")),
]


def add_up(tensor, group):
    """The sum, by a function of the user's."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


@pytest.fixture
def tokens(monkeypatch):
    """For each call of C whether it computed the token."""
    computed, logits = [], NativeTokens.logits

    def counted(self, *given):
        result = logits(self, *given)
        computed.append(result is not None)
        return result

    monkeypatch.setattr(NativeTokens, "logits", counted)
    return computed


@pytest.fixture
def without_c(monkeypatch):
    """A function after which tokens are computed step by step."""
    return lambda: monkeypatch.setattr(NativeTokens, "of", lambda *given: None)


@torch.no_grad()
def logits_and_cache(model, batch=2):
    """Logits of a prompt, of one token at a time, and this rank's of speculative ones; and all of the cache after them."""
    cache = model.new_cache(batch)
    parts = [model(IDS[:1, :4].expand(batch, -1), cache=cache)]
    for t in range(4, 9):
        step = IDS[:, t : t + 1].repeat(batch, 1)[:batch]
        parts.append(model(step, cache=cache))
    for _ in range(2):
        parts.append(model.speculative_logits(IDS[:1, :3].repeat(batch, 1), cache))
        cache.accept([2] * batch)
    return [*parts, cache.lengths, *(tensor for layer in cache.states.values() for tensor in layer.tensors())]


def moved(model, cache):
    """The parameters have new addresses."""
    model.bfloat16().float()


def without_states(model, cache):
    """The cache has other tensors."""
    for layer in cache.states.values():
        layer.fixed["state"] = layer.fixed["state"] * 2


@pytest.mark.parametrize("is_hooked", (False, True))
@pytest.mark.parametrize("change", (moved, without_states))
@pytest.mark.parametrize("family", ("mamba", "mamba2"))
@torch.no_grad()
def test_speculative_tokens_of_a_model_that_has_changed(family, change, is_hooked, tmp_path):
    """is_hooked: Python computes the first layer."""
    model = megatron_ssm.load(saved(tmp_path, family))
    if is_hooked:
        model.layers[0].register_forward_hook(lambda *_: None)
    cache = model.new_cache(2)
    model(IDS[:, :4], cache=cache)
    model.speculative_logits(IDS[:, 4:7], cache)
    with pytest.raises(RuntimeError, match="cannot be copied between speculative_logits and accept"):
        copy.deepcopy(cache)
    cache.accept([1, 2])
    model.speculative_logits(IDS[:, 4:7], cache)
    change(model, cache)
    before = [tensor.clone() for layer in cache.states.values() for tensor in layer.tensors()]
    with pytest.raises(RuntimeError, match="have moved since speculative_logits"):
        cache.accept([1, 2])
    after = [tensor for layer in cache.states.values() for tensor in layer.tensors()]
    assert all(map(torch.equal, before, after)) and cache.lengths.tolist() == [5, 6]


@torch.no_grad()
def test_a_hook_is_removed_before_speculative_tokens_are_accepted(tmp_path):
    """Oracle: another cache, whose tokens are accepted before."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    caches = [model.new_cache(2), model.new_cache(2)]
    hook = model.layers[0].register_forward_hook(lambda *_: None)
    for cache in caches:
        model(IDS[:, :4], cache=cache)
        model.speculative_logits(IDS[:, 4:7], cache)
    caches[0].accept([1, 2])
    hook.remove()
    caches[1].accept([1, 2])
    for expected, found in zip(*(cache.states.values() for cache in caches), strict=True):
        assert all(map(torch.equal, expected.tensors(), found.tensors()))


@pytest.mark.parametrize("family", ("mamba", "mamba2"))
@torch.no_grad()
def test_speculative_tokens_outlive_their_model(family, tmp_path):
    """Oracle: the same tokens, accepted before the model is deleted."""
    model = megatron_ssm.load(saved(tmp_path, family))
    caches = [model.new_cache(2), model.new_cache(2)]
    for cache in caches:
        model(IDS[:, :4], cache=cache)
        model.speculative_logits(IDS[:, 4:7], cache)
        if cache is caches[0]:
            cache.accept([1, 2])
    sizes = {parameter.shape for parameter in model.parameters()}
    del model
    gc.collect()
    junk = [torch.full(size, 1e6) for size in sizes for _ in range(20)]  # where the parameters were
    caches[1].accept([1, 2])
    for expected, found in zip(*(cache.states.values() for cache in caches), strict=True):
        assert all(map(torch.equal, expected.tensors(), found.tensors()))
    assert junk


@pytest.mark.parametrize("tp", (1, 2))
def test_a_cache_of_inference_mode_is_used_outside_of_it(ranks, tp, tmp_path):
    """The last rank's vocabulary is padded, so that C computes the tokens of the others only."""
    directory = saved(tmp_path, "zamba2", vocab_size=61), saved(tmp_path / "mamba2", "mamba2", vocab_size=61)

    @torch.no_grad()
    def run(rank):
        results = []
        for each in directory:
            model = megatron_ssm.load(each, dist.group.WORLD)
            with torch.inference_mode():
                cache = model.new_cache(2)
                cache.reserve(IDS.shape[1])
                parts = [model(IDS[:, :4], cache=cache)]
            parts += [model(IDS[:, t : t + 1], cache=cache) for t in range(4, IDS.shape[1])]
            results.append((torch.cat(parts, 1), model(IDS)))
        return results

    for results in ranks(run, tp):
        for by_tokens, at_once in results:
            torch.testing.assert_close(by_tokens, at_once, rtol=0, atol=2e-4)


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("family, changes, options", MODELS)
def test_a_call_of_c_has_the_bits_of_the_steps(family, changes, options, batch, threads, tmp_path, tokens, without_c):
    directory, before = saved(tmp_path, family, **changes), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        by_c = logits_and_cache(megatron_ssm.load(directory, **options), batch)
        assert tokens == [True] * 5  # the first call of each kind makes the plan
        without_c()
        by_steps = logits_and_cache(megatron_ssm.load(directory, **options), batch)
    finally:
        torch.set_num_threads(before)
    assert len(tokens) == 5 and all(map(torch.equal, by_c, by_steps))


def logits_of_ranks(directory, options):
    """`logits_and_cache` by C and step by step, what each way sent, and for each call of C whether it computed the token."""
    computed, results, logits, of = [], [], NativeTokens.logits, NativeTokens.of

    def counted(self, *given):
        result = logits(self, *given)
        computed.append(result is not None)
        return result

    NativeTokens.logits = counted
    for by_c in (True, False):
        NativeTokens.of = of if by_c else lambda *given: None
        model = megatron_ssm.load(directory, dist.group.WORLD, **options)
        results.append((logits_and_cache(model), model.counter))
    return *results, computed


@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize(
    "options", (dict(), dict(reduce="int8"), dict(reduce=add_up), BF16), ids=("fp32", "int8", "function", "bf16")
)
@pytest.mark.parametrize(
    "family, changes", (("mamba", dict(vocab_size=320)), ("mamba2", dict(vocab_size=64, n_groups=1)))
)
def test_ranks(ranks, tp, options, family, changes, tmp_path):
    """Also what is sent is the same. With a function of the user's, Python does the all-reduces."""
    directory = saved(tmp_path, family, **changes)
    for (by_c, sent), (by_steps, sent_by_steps), computed in ranks(
        lambda rank: logits_of_ranks(directory, options), tp
    ):
        assert computed == [True] * 5 and all(map(torch.equal, by_c, by_steps)) and sent == sent_by_steps


@pytest.mark.parametrize("tp", (2, 4))
def test_some_ranks_may_go_step_by_step(ranks, tp, tmp_path):
    """The last rank's slice of the vocabulary is padded, so it computes its logits from Python; all send the same."""
    directory = saved(tmp_path, "mamba2", vocab_size=61, n_groups=1)
    results = ranks(lambda rank: logits_of_ranks(directory, BF16), tp)
    assert [computed for *_, computed in results] == [[True] * 5] * (tp - 1) + [[]]
    for (by_c, sent), (by_steps, sent_by_steps), _ in results:
        assert all(map(torch.equal, by_c, by_steps)) and sent == sent_by_steps


@pytest.mark.parametrize("family", ("zamba", "zamba2"))
def test_models_with_attention_are_left_to_python(family, tmp_path, tokens):
    model = megatron_ssm.load(saved(tmp_path, family, layers_block_type=["hybrid"] * 2))
    one_by_one(model, model)
    assert not tokens


def decoded(model):
    """A cache of the model whose rows have read five tokens, the last of them alone."""
    cache = model.new_cache(2)
    for tokens in IDS[:, :5].split([4, 1], dim=1):
        model(tokens, cache=cache)
    return cache


@pytest.mark.parametrize("wrong, rule", ((61, "token id 61 is outside"), (-1, "token id -1 is outside")))
@torch.no_grad()
def test_ids_outside_the_vocabulary_change_nothing(wrong, rule, tmp_path, tokens):
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    cache, untouched = decoded(model), decoded(model)
    with pytest.raises(ValueError, match=rule):
        model(torch.tensor([[5], [wrong]]), cache=cache)
    assert tokens == [False]
    right = IDS[:, 5:6]
    assert torch.equal(model(right, cache=cache), model(right, cache=untouched)) and tokens == [False, True, True]
    assert cache.lengths.tolist() == [6, 6]


@torch.no_grad()
def test_inputs_of_other_kinds(tmp_path, tokens):
    """Ids of another dtype or for other rows go step by step, and rows that begin count as prompts."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2", time_step_limit=(0.02, 0.2)))
    right = IDS[:, 5:6].contiguous()
    expected = model(right, cache=decoded(model))
    assert tokens.pop()
    with_gaps = torch.stack([right, right], dim=-1)[..., 0]
    for given, by_c in ((right.int(), False), (with_gaps, True)):
        torch.testing.assert_close(model(given, cache=decoded(model)), expected, rtol=0, atol=0)
        assert tokens.pop() == by_c
    with pytest.raises(ValueError, match="a cache for 2 sequences was given 1"):
        model(right[:1], cache=decoded(model))
    assert not tokens.pop()
    torch.testing.assert_close(model(right, torch.ones(2, 1), decoded(model)), expected, rtol=0, atol=0)
    assert not tokens
    cache = decoded(model)
    cache.reset(1)
    begun = model(right, cache=cache)
    assert not tokens.pop()
    alone = model(right[1:], cache=model.new_cache(1))
    torch.testing.assert_close(begun[1:], alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_rows_of_a_cache(tmp_path, tokens):
    """Only the selected rows advance."""
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    cache, expected = model.new_cache(4), one_by_one(model, model)
    tokens.clear()
    model(IDS[:, :4], cache=cache.select([1, 2]))
    for t in range(4, 9):
        logits = model(IDS[:, t : t + 1], cache=cache.select([1, 2]))
        assert torch.equal(logits, expected[:, t : t + 1])
    assert tokens == [True] * 4 and cache.lengths.tolist() == [0, 9, 9, 0]
    alone = model(IDS[1:, :1], cache=cache.select([2]))
    assert alone.isfinite().all() and cache.lengths.tolist() == [0, 9, 10, 0]
    tokens.clear()
    model(IDS[:, :1], cache=cache.select([2, 1]))  # not in their order in memory
    assert not tokens and cache.lengths.tolist() == [0, 10, 11, 0]


@torch.no_grad()
def test_rows_that_count_from_the_end(tmp_path, tokens):
    """The lengths are a part of a larger tensor, whose other numbers stay as they are."""
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    cache, expected = model.new_cache(3), one_by_one(model, model)
    tokens.clear()
    around = torch.zeros(5, dtype=torch.int64)
    cache.lengths, cache.rows = around[1:4], slice(-1, None)
    for ids in IDS[:1].split([4, 1, 1, 1, 1, 1], dim=1):
        logits = model(ids, cache=cache)
    torch.testing.assert_close(logits, expected[:1, 8:], rtol=0, atol=5e-5)
    assert tokens == [True] * 4 and around.tolist() == [0, 0, 0, 9, 0]


@torch.no_grad()
def test_unusual_caches_and_calls(tmp_path, tokens):
    """Lengths of other kinds go step by step; so do calls with gradients, autocast or hooks of all modules."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    right = IDS[:, 5:6]
    expected = model(right, cache=decoded(model))
    assert tokens.pop()
    for lengths in (torch.tensor([5, 5], dtype=torch.int32), torch.tensor([5, 9, 5, 9])[::2]):
        cache = decoded(model)
        cache.lengths = lengths
        assert torch.equal(model(right, cache=cache), expected) and not tokens.pop()
        assert cache.lengths.tolist() == [6, 6]
    cache = decoded(model)
    cache.lengths = torch.tensor([5, 5, 5])
    with pytest.raises(ValueError, match="a cache for 3 sequences was given 2"):
        model(right, cache=cache)
    assert not tokens.pop()
    with pytest.raises(ValueError, match="logits_to_keep=-1"):
        model(right, cache=decoded(model), logits_to_keep=-1)
    cache = decoded(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(right, cache=cache)
    cache = decoded(model)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        torch.testing.assert_close(model(right, cache=cache), expected, rtol=0, atol=5e-5)
    finally:
        handle.remove()
    with torch.enable_grad():
        assert model(right, cache=decoded(model)).requires_grad
    assert not tokens


@pytest.mark.parametrize("tp", (2, 4))
def test_closed_models_say_so(ranks, tp, tmp_path):
    directory = saved(tmp_path, "mamba", vocab_size=320)

    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD)
        with torch.no_grad():
            cache = decoded(model)
            model(IDS[:, 5:6], cache=cache)
            model.close()
            with pytest.raises(RuntimeError, match="the shared memory of rank"):
                model(IDS[:, 6:7], cache=cache)
        return cache.lengths.tolist()

    assert ranks(run, tp) == [[6, 6]] * tp


@torch.no_grad()
def test_weights_that_c_cannot_read(tmp_path, tokens):
    """A final norm with gaps, embeddings of another dtype, and too few of them."""
    for change in ("gaps", "dtype", "rows"):
        model = megatron_ssm.load(saved(tmp_path, "mamba", tie_word_embeddings=False))
        if change == "gaps":
            model.norm_f.weight.data = torch.stack([model.norm_f.weight] * 2, dim=1)[:, 0]
        elif change == "dtype":
            model.embeddings.weight = torch.nn.Parameter(model.embeddings.weight.bfloat16())
        else:
            model.embeddings.weight = torch.nn.Parameter(model.embeddings.weight[:20].clone())
        logits = one_by_one(model, model)
        torch.testing.assert_close(logits, model(IDS), rtol=0, atol=5e-5)
        assert not tokens
    with pytest.raises(IndexError):
        model(torch.tensor([[20], [1]]), cache=decoded(model))


@torch.no_grad()
def test_without_memory_the_lengths_stay(tmp_path, monkeypatch):
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    cache = decoded(model)
    monkeypatch.setattr(kernels.LIBRARY, "functions", Failing(kernels.LIBRARY.functions))
    with pytest.raises(MemoryError, match="could not allocate"):
        model(IDS[:, 5:6], cache=cache)
    assert cache.lengths.tolist() == [5, 5]


class Failing:
    """The C library without memory for a token."""

    def __init__(self, functions):
        self._functions = functions

    def __getattr__(self, name):
        return (lambda *given: -2) if name == "decode_tokens" else getattr(self._functions, name)
