"""Generation by context ranks: prompts in chunks that the ranks share, then tokens that all of them decode.

Oracle: the same calls of a model on one rank, in float64. Chunks do not divide over the ranks, and some are too short to.
"""

import pytest
import torch
import torch.distributed as dist
from chosen import by_default, full

import megatron_ssm
from attention2d import Ring
from cases import SCHEDULES, groups_of, oracle
from megatron_ssm import Engine
from serving import FAMILIES, attempt, checkpoint, ids

__all__ = ["oracle"]

CHUNKS = (37, 30, 1, 1, 1)  # the last ones are decoded


def logits_of_chunks(model, ids):
    """The logits of the chunks, one after the other, of whole sequences; and the cache after them."""
    cache, spread = model.new_cache(len(ids)), model.schedule
    logits = []
    for chunk in ids.split(CHUNKS, dim=1):
        seq = chunk.shape[1]
        if spread is None or seq == 1:
            logits.append(model(chunk, cache=cache))
        else:
            logits.append(spread.unshard(model(spread.shard(chunk), cache=cache, seq=seq), 1, seq))
    return logits, cache


@pytest.mark.parametrize(
    "name, tp, cp, schedule",
    (
        ("mamba-biases-untied", 1, 3, "ring"), ("falcon", 2, 2, "contiguous"), full("mamba2-1-group", 2, 2, "ring"),
        ("mamba2-dt-limit", 1, 4, "usp"), ("zamba-2-heads-biases", 2, 2, "all-gather"), full("mamba", 1, 4, "ring"),
        full("falcon", 1, 4, "ring"), ("mamba2-2-groups", 1, 4, "ring"), full("zamba-4-heads-grouped-untied", 1, 4, "2d"),
        ("zamba-4-heads-grouped-untied", 1, 2, "ulysses"), ("zamba2-2-groups-adapters-rope", 1, 4, "2d"),
    ),
)  # fmt: skip
def test_chunks_of_a_prompt_then_decoding_equal_one_rank(ranks, name, tp, cp, schedule, oracle):
    """The logits of all chunks; afterwards the whole state is on every rank, and the keys are spread evenly."""
    oracle = oracle(name, torch.float64)

    @torch.no_grad()
    def run(rank):
        tensor, context = groups_of(rank, tp, cp)
        model = megatron_ssm.load(oracle.directory, tensor, context=SCHEDULES[schedule](context), dtype=torch.float64)
        logits, cache = logits_of_chunks(model, oracle.ids)
        return logits, [tuple(layer.fixed.values()) for layer in cache.states.values()], cache.kv_lengths[:, 0]

    one = megatron_ssm.load(oracle.directory, dtype=torch.float64)
    with torch.no_grad():
        expected, cache = logits_of_chunks(one, oracle.ids)
    results = ranks(run, tp * cp)
    for logits, states, kv_lengths in results:
        for mine, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
        if tp == 1:
            for mine, state in zip(states, cache.states.values(), strict=True):
                torch.testing.assert_close(mine, tuple(state.fixed.values()), rtol=0, atol=1e-10)
        if name.startswith("zamba"):
            assert kv_lengths.sum() == sum(CHUNKS) and kv_lengths.max() - kv_lengths.min() <= 2
    assert all(torch.equal(results[0][0][-1], logits[-1]) for logits, *_ in results)


@pytest.mark.parametrize("cp", (2, 3))
@pytest.mark.parametrize("tokens", (1, 5, 24))
def test_next_logits_without_a_cache(ranks, cp, tokens):
    """Also of prompts that are too short to be divided: every rank then computes all tokens."""
    directory, prompt = checkpoint("zamba2"), ids(2, tokens)

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(directory, context=Ring(dist.group.WORLD), dtype=torch.float64)
        return model.next_logits(prompt)

    one = megatron_ssm.load(directory, dtype=torch.float64)
    with torch.no_grad():
        expected = one.next_logits(prompt)
    for logits in ranks(run, cp):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


REQUESTS = ((3, 6), (50, 7), (23, 5), (1, 4), (64, 3))  # (length of the prompt, new tokens)


@pytest.mark.parametrize("cp", (2, 3))
@pytest.mark.parametrize("family", by_default(("falcon_mamba", "zamba2", "falcon_h1", "qwen3_5_text"), FAMILIES))
def test_an_engine_gives_the_tokens_of_one_rank(ranks, family, cp):
    """Prompts of several lengths, read in chunks, beside others that are decoded; and again from the prefix cache."""
    directory = checkpoint(family)

    def serve(model):
        engine = Engine(model, slots=2, chunk=24, prefix_bytes=2**20, block=16)
        requests = []
        for _ in range(2):
            for seed, (prompt, new) in enumerate(REQUESTS):
                requests.append(engine.add(ids(1, prompt, seed=seed)[0].tolist(), new, temperature=seed % 2, seed=seed))
            while engine.is_busy:
                engine.step()
        return [request.tokens for request in requests], engine.prefilled_tokens

    def run(rank):
        return serve(megatron_ssm.load(directory, context=Ring(dist.group.WORLD), dtype=torch.float64))

    expected = serve(megatron_ssm.load(directory, dtype=torch.float64))
    assert all(result == expected for result in ranks(run, cp))


@pytest.mark.parametrize("tp, cp", ((1, 2), (2, 2)))
def test_generate_with_rows_of_different_lengths(ranks, tp, cp):
    """Without a seed, all ranks draw the same tokens."""
    directory = checkpoint("zamba2")
    prompts, mask = ids(3, 40), torch.ones(3, 40, dtype=torch.int64)
    mask[1, :9], mask[2, :38] = 0, 0

    def run(rank):
        tensor, context = groups_of(rank, tp, cp)
        model = megatron_ssm.load(directory, tensor, context=Ring(context), dtype=torch.float64)
        greedy = megatron_ssm.generate(model, prompts, mask, max_new_tokens=6, repetition_penalty=1.2)
        return greedy, megatron_ssm.generate(model, prompts, mask, max_new_tokens=6, temperature=1.0)

    one = megatron_ssm.load(directory, dtype=torch.float64)
    expected = megatron_ssm.generate(one, prompts, mask, max_new_tokens=6, repetition_penalty=1.2)
    (first, drawn), *others = ranks(run, tp * cp)
    assert torch.equal(first, expected)
    assert all(torch.equal(first, greedy) and torch.equal(drawn, sample) for greedy, sample in others)


@pytest.mark.parametrize("cp", (2, pytest.param(3, marks=pytest.mark.full)))
def test_chunks_under_autocast(ranks, cp):
    """They differ from fp32 as one rank's do, also where a chunk attends keys of an earlier one."""
    directory = checkpoint("zamba2")

    def logits(model, is_enabled=True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, is_enabled):
            cache = model.new_cache(1)
            parts = [model.next_logits(chunk, cache=cache, prompt=True) for chunk in ids(1, 48).split(24, dim=1)]
            return torch.cat(parts)

    one = megatron_ssm.load(directory)
    exact = logits(one, is_enabled=False)
    limit = 1.5 * (logits(one) - exact).abs().max()
    for found in ranks(lambda rank: logits(megatron_ssm.load(directory, context=Ring(dist.group.WORLD))), cp):
        assert (found - exact).abs().max() < limit


@pytest.mark.parametrize("cp", (2, pytest.param(3, marks=pytest.mark.full)))
def test_wrong_calls_are_one_error_on_every_rank(ranks, cp):
    """Of `generate` also those that are wrong on the last rank only."""
    directory = checkpoint("zamba2")

    def run(rank):
        is_last = rank == cp - 1
        model = megatron_ssm.load(directory, context=Ring(dist.group.WORLD), dtype=torch.float64)
        tokens = ids(1, 24)
        with torch.no_grad():
            cache = model.new_cache(1, max_length=30)
            model(model.schedule.shard(tokens), cache=cache)
        calls = {
            "cannot be interpreted as an integer": lambda: megatron_ssm.generate(
                model, tokens, max_new_tokens="3" if is_last else 3
            ),
            "arguments differ across ranks": lambda: megatron_ssm.generate(model, tokens, max_new_tokens=2 + is_last),
            "there is no beam search on context ranks": lambda: model.generate(tokens, num_beams=2),
            "does not fit into a cache of max_length=30": lambda: model(model.schedule.shard(tokens), cache=cache),
            "seq=30: expected": lambda: model(model.schedule.shard(tokens), cache=cache, seq=30),
            "was not made by the new_cache": lambda: model(
                tokens[:, :1], cache=megatron_ssm.load(directory, dtype=torch.float64).new_cache(1)
            ),
        }
        errors = {}
        with torch.no_grad():
            for words, call in calls.items():
                errors[words] = attempt(call)
        errors["have no gradient"] = attempt(lambda: model(tokens[:, :1], cache=cache))
        return errors, megatron_ssm.generate(model, tokens, max_new_tokens=2)

    expected = megatron_ssm.generate(megatron_ssm.load(directory, dtype=torch.float64), ids(1, 24), max_new_tokens=2)
    for errors, tokens in ranks(run, cp):
        assert torch.equal(tokens, expected)
        for words, error in errors.items():
            expected_type = "TypeError" if "interpreted" in words else "ValueError"
            assert error is not None and error[0] == expected_type and words in error[1], (words, error)
