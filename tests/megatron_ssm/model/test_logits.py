"""Logits. Oracle: transformers in fp32 with random weights, in one prefill and in its own cached decoding."""

import random

import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_ssm
from cases import DECODED, MARKED, SEQ, oracle
from hf import CONFIGS

__all__ = ["oracle"]

UNCLAMPED = 5e-3  # error of Zamba2's logits if a prompt is given in single tokens
BIASED = (
    "mamba-biases-untied", "mamba2-1-group-biases-tied", "mamba2-2-groups-biases-tied", "falcon-biases-untied",
    "zamba-2-heads-biases", "zamba2-4-groups-biases-adapters-untied",
)  # fmt: skip


def tokens_one_by_one(model, ids, cache, steps):
    """The logits after each of the last `steps` ids, given one at a time."""
    steps = range(ids.shape[1] - steps, ids.shape[1])
    return torch.cat([model(ids[:, i : i + 1], cache=cache) for i in steps], dim=1)


def random_cuts(seed, seq, smallest):
    """The boundaries of five pieces of a sequence, of which two have `smallest` tokens and the others a random length."""
    draw = random.Random(seed)
    inner = sorted(draw.sample(range(smallest, seq - 3 * smallest, smallest), 2))
    return [0, inner[0], inner[0] + smallest, inner[1] + smallest, inner[1] + 2 * smallest, seq]


def in_chunks(model, ids, cuts, mask=None):
    """The logits of a prefill in the given chunks; the mask is passed with the first."""
    cache = model.new_cache(len(ids))
    chunks = [
        model(ids[:, start:stop], None if start or mask is None else mask[:, :stop], cache)
        for start, stop in zip(cuts, cuts[1:], strict=False)
    ]
    return torch.cat(chunks, dim=1)


def transformers_error(oracle) -> float:
    """The largest error of transformers' own logits, which is close to the tolerance on some processors."""
    return (oracle.whole - oracle.exact).abs().max().item()


def check_against_transformers(ranks, tp, oracle, tolerance, times=2.5):
    """Compare prefill, decoding, and prefill in random chunks on `tp` ranks, which must all return the same logits.

    The RMS error of the prefill against float64 must also be at most `times` that of transformers.
    """
    ids = oracle.ids
    cuts = random_cuts(f"{oracle.name} {tp}", SEQ, oracle.smallest_piece)

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD)
        whole, cache = model(ids), model.new_cache(2)
        model(ids[:, :-DECODED], cache=cache)
        decoded = tokens_one_by_one(model, ids, cache, DECODED)
        assert cache.lengths.tolist() == [SEQ, SEQ]
        return whole, decoded, in_chunks(model, ids, cuts)

    whole = oracle.whole
    expected = whole, oracle.decoded, whole
    results = ranks(run, tp)
    errors = [(logits - oracle.exact).square().mean().sqrt() for logits in (results[0][0], whole)]
    assert errors[0] <= times * errors[1]
    for ours, theirs in zip(results[0], expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("tp", (pytest.param(1, marks=pytest.mark.full), 2, 4))
@pytest.mark.parametrize("name", MARKED)
def test_prefill_decode_and_chunks(ranks, tp, name, oracle):
    """Up to twice the tolerance if transformers itself has a large error (Zamba of 8 heads on a Cascade Lake: 7.5e-5)."""
    tolerance = oracle(name).tolerance
    allowed = min(max(tolerance, 2 * transformers_error(oracle(name))), 2 * tolerance)
    check_against_transformers(ranks, tp, oracle(name), allowed)


@pytest.mark.parametrize("tp", (1, 2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", ("zamba2-1-group", "zamba2-grouped-rope-1-use"))
def test_a_clamped_prompt_token_by_token(ranks, tp, name, oracle):
    """As in transformers, single tokens are not clamped, so the logits are closer to its steps than to its prefill."""
    oracle = oracle(name)
    ids = oracle.ids[:, :10]

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD)
        cache = model.new_cache(2)
        return torch.cat([model(ids[:, :1], cache=cache), tokens_one_by_one(model, ids, cache, 9)], dim=1)

    steps = oracle.decode(ids, 9)
    for logits in ranks(run, tp):
        torch.testing.assert_close(logits, oracle.logits(ids), rtol=0, atol=UNCLAMPED)
        torch.testing.assert_close(logits[:, 1:], steps, rtol=0, atol=oracle.tolerance)


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("name", ("mamba", "mamba2-dt-limit", "zamba-2-heads-biases", "zamba2-2-groups-adapters-rope"))
def test_a_sequence_of_one_token(ranks, tp, name, oracle):
    """A single first token is a prefill, clamped to time_step_limit; the following tokens are decoded."""
    oracle = oracle(name)
    ids = oracle.ids[:, : 1 + DECODED]

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD)
        cache = model.new_cache(2)
        return model(ids[:, :1], cache=cache), tokens_one_by_one(model, ids, cache, DECODED)

    expected = oracle.logits(ids[:, :1]), oracle.decode(ids, DECODED)
    for result in ranks(run, tp):
        torch.testing.assert_close(result, expected, rtol=0, atol=oracle.tolerance)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups", "zamba2-2-groups-adapters-rope"))
@torch.no_grad()
def test_a_batch_without_rows(name, dtype, oracle):
    """Its logits have no rows either, in a prefill, in decoding, and in the tokens that are generated."""
    ids = oracle(name).ids[:0]
    model = megatron_ssm.load(oracle(name).directory, dtype=dtype)
    cache = model.new_cache(0)
    found = [model(ids), *(model(part, cache=cache) for part in (ids, ids[:, :1], ids[:, :3]))]
    assert [logits.shape for logits in found] == [(0, seq, model.config.vocab_size) for seq in (SEQ, SEQ, 1, 3)]
    assert megatron_ssm.generate(model, ids).shape == (0, 0) and model.generate(ids).shape == ids.shape


@pytest.mark.parametrize("tp", (pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("seed", by_default(range(2), range(20)))
def test_random_configurations(ranks, tp, family, seed, oracle):
    """Some are ill-conditioned (a norm over two channels), so 8 times transformers' own error is added to the tolerance."""
    oracle = oracle((family, seed))
    check_against_transformers(ranks, tp, oracle, oracle.tolerance + 8 * transformers_error(oracle), times=8)


# Left padding


@pytest.mark.parametrize("tp", (1, 2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", BIASED)
def test_left_padding_changes_no_row(ranks, tp, name, oracle):
    """Rows of 40, 35 and 1 tokens and 6 more, in one call, in chunks, and decoded, equal each row alone."""
    oracle = oracle(name)
    lengths, prompt, more = (40, 35, 1), 40, 6
    cuts = [0, 41, 41 + oracle.smallest_piece, prompt + more]
    ids = torch.randint(oracle.vocab, (3, prompt + more), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : prompt - length] = 0

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD)
        cache = model.new_cache(3)
        prefill = model(ids[:, :prompt], mask[:, :prompt], cache)
        assert tuple(cache.lengths) == lengths
        then = tokens_one_by_one(model, ids, cache, more)
        return model(ids, mask), in_chunks(model, ids, cuts, mask), prefill, then

    alone = [ids[row : row + 1, prompt - length :] for row, length in enumerate(lengths)]
    whole, decoded = [oracle.logits(row) for row in alone], [oracle.decode(row, more) for row in alone]
    for one_call, chunks, prefill, then in ranks(run, tp):
        for row, length in enumerate(lengths):
            for padded in (one_call, chunks):
                torch.testing.assert_close(padded[row, -length - more :], whole[row][0], rtol=0, atol=oracle.tolerance)
            first = prefill[row, -length:]
            torch.testing.assert_close(first, whole[row][0, :length], rtol=0, atol=oracle.tolerance)
            torch.testing.assert_close(then[row], decoded[row][0], rtol=0, atol=oracle.tolerance)


def error_message(model, *arguments, **keywords):
    """The message of the ValueError that a call must raise; asserts that it is one line."""
    with pytest.raises(ValueError) as caught:
        model(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("name", ("mamba2-2-groups", "zamba2-1-group"))
def test_invalid_masks_and_ids(ranks, tp, name, oracle):
    """Every rank raises the same error before anything is sent, and the model can still be used."""
    oracle = oracle(name)
    ids = oracle.ids[:, :4]

    def mask(*row):
        return torch.tensor([[1, 1, 1, 1], row])

    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD)
        cache = model.new_cache(2)
        with torch.no_grad():
            model(ids, cache=cache)
        model.counter.reset()
        found = [
            error_message(model, ids, mask(1, 1, 1, 0)),
            error_message(model, ids, mask(0, 1, 0, 1)),
            error_message(model, ids, mask(1, 1, 2, 1)),
            error_message(model, ids, mask(-1, 1, 1, 1)),
            error_message(model, ids, mask(0.5, 1.0, 1.0, 1.0)),
            error_message(model, ids, mask(0, 0, 0, 0)),
            error_message(model, ids, mask(0, 1, 1, 1), cache),
            error_message(model, ids, mask(1, 1, 1, 1)[:, :3]),
            error_message(model, ids[:, :0]),
            error_message(model, ids[0]),
            error_message(model, ids[:1], cache=cache),
            error_message(model, ids + oracle.vocab),
            error_message(model, ids - oracle.vocab),
        ]
        assert not model.counter.calls
        with torch.no_grad():
            model(ids, mask(1, 1, 1, 1), cache)  # a mask of ones is like no mask
        return found

    found, *others = ranks(run, tp)
    assert all(other == found for other in others)
    hints = ["left", "left", "0 or 1", "0 or 1", "0 or 1", "row 1", "after 4 tokens", "(2, 3)", "at least one", "(4,)"]
    for message, hint in zip(found, [*hints, "2 rows", "vocabulary of 61", "vocabulary of 61"], strict=True):
        assert hint in message


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups", "zamba2-1-group"))
def test_logits_to_keep(ranks, tp, name, oracle):
    oracle = oracle(name)

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD)
        local = model.local_logits(oracle.ids, logits_to_keep=3)
        assert local.shape == (2, 3, -(-oracle.vocab // tp))
        cache = model.new_cache(2)
        model(oracle.ids[:, :-1], cache=cache, logits_to_keep=1)
        last = model(oracle.ids[:, -1:], cache=cache)
        return [model(oracle.ids, logits_to_keep=keep) for keep in (0, 1, 3, SEQ, SEQ + 1)] + [last]

    whole = oracle.whole
    for results in ranks(run, tp):
        for kept, keep in zip(results, (SEQ, 1, 3, SEQ, SEQ, 1), strict=True):
            torch.testing.assert_close(kept, whole[:, -keep:], rtol=0, atol=oracle.tolerance)


def test_logits_to_keep_is_not_negative(oracle):
    with pytest.raises(ValueError, match="logits_to_keep=-3 must be at least 0"):
        megatron_ssm.load(oracle("mamba").directory)(oracle("mamba").ids, logits_to_keep=-3)


# Other dtypes


@pytest.mark.parametrize("tp", (1, 4))
@pytest.mark.parametrize("name", (*BIASED[:5], "zamba2-grouped-rope-1-use"))
def test_bf16_is_close_to_fp32(ranks, tp, name, oracle):
    oracle = oracle(name)

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD, dtype=torch.bfloat16)
        kept = {n.rpartition(".")[2] for n, p in model.named_parameters() if p.dtype == torch.float32}
        assert kept == {"A_log", "D", "dt_bias"}
        cache = model.new_cache(2)
        assert {t.dtype for layer in cache.states.values() for n, t in layer.fixed.items() if n == "state"} == {
            torch.float32
        }
        prefill = model(oracle.ids[:, :-DECODED], cache=cache)
        return torch.cat([prefill, tokens_one_by_one(model, oracle.ids, cache, DECODED)], dim=1)

    expected = oracle.whole
    for ours in ranks(run, tp):
        assert ours.dtype == torch.float32
        assert (ours - expected).std() <= 0.05 * expected.std()
        assert (ours.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.95


class AssertsFloat64(TorchDispatchMode):
    """Fails on any operation whose result has another floating-point dtype."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                assert tensor.dtype == torch.float64, f"{function} returned {tensor.dtype}"
        return result


def float64_logits(oracle, group=None):
    """The logits of our float64 model in one call, in decoding, and with left padding."""
    model = megatron_ssm.load(oracle.directory, group, dtype=torch.float64)
    with AssertsFloat64():
        cache, mask = model.new_cache(2), torch.ones_like(oracle.ids)
        mask[1, :7] = 0
        model.loss(oracle.ids, oracle.ids).backward()
        with torch.no_grad():
            model(oracle.ids[:, :-DECODED], cache=cache)
            decoded = tokens_one_by_one(model, oracle.ids, cache, DECODED)
            return torch.cat([model(oracle.ids), decoded, model(oracle.ids, mask)[:, 7:]], dim=1)


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", by_default((BIASED[0], BIASED[2], BIASED[5]), (*BIASED, "mamba2-4-groups")))
def test_float64_is_float64_throughout(ranks, tp, name, oracle):
    """Every operation, also of loss and backward, is in float64, and TP N equals TP 1 to 1e-10."""
    oracle = oracle(name)
    alone = float64_logits(oracle)
    for logits in ranks(lambda rank: float64_logits(oracle, dist.group.WORLD), tp):
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-10)
