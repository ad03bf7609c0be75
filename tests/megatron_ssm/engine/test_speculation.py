"""Speculative decoding. Oracles: decoding token by token; a search of all matches; the same requests without proposals."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

import megatron_ssm
from commfabric.native.library import Library
from hf import save_hf
from megatron_ssm import Engine, load
from megatron_ssm.engine import speculation
from megatron_ssm.engine.speculation import History, SpeculativeDecoder
from megatron_ssm.kernels import kernels
from serving import FAMILIES, VOCAB, attempt, checkpoint, families, ids, on_ranks

worlds = pytest.mark.parametrize("world", (1, 2))


# Taking tokens back


def state_of(cache):
    """All tensors of a cache, keys and values only as far as they count."""
    stored = [
        tensor[row, : cache.lengths[row]]
        for layer in cache.states.values()
        for tensor in layer.per_token.values()
        for row in range(len(cache.lengths))
    ]
    return [cache.lengths, *(t for layer in cache.states.values() for t in layer.fixed.values()), *stored]


@torch.no_grad()
def speculated(model, rows, counts):
    """What decoding gives of which only the first `counts` tokens of `rows` count: by a speculative call, and one by one.

    [logits after these tokens, those after one more token of all rows, tensors of the cache] each.
    """
    prompts, tokens, last = ids(4, 6, seed=1), ids(len(rows), 5, seed=2), ids(4, 1, seed=3)
    ahead, plain = model.new_cache(4), model.new_cache(4)
    for cache in (ahead, plain):
        model.next_logits(prompts, cache=cache, prompt=True)
    before = [t.clone() for t in state_of(ahead)]
    selected = ahead.select(rows)
    logits = model.speculative_logits(tokens, selected)
    assert all(torch.equal(*pair) for pair in zip(before, state_of(ahead), strict=True))
    selected.accept(counts)
    kept = [(i, t) for i, count in enumerate(counts) for t in range(count)]
    single = [model.next_logits(tokens[i : i + 1, t : t + 1], None, plain.select([rows[i]]))[0] for i, t in kept]
    found = [torch.stack([logits[place] for place in kept]), model.next_logits(last, cache=ahead), *state_of(ahead)]
    return found, [torch.stack(single), model.next_logits(last, cache=plain), *state_of(plain)]


@worlds
@pytest.mark.parametrize(
    "rows, counts", [((0, 1, 2, 3), (1, 5, 3, 2)), ((2,), (4,)), ((3, 0), (5, 5)), ((1, 2), (1, 1))]
)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@families
def test_tokens_are_taken_back_exactly(ranks, world, rows, counts, dtype, family):
    directory = checkpoint(family)

    def run(rank):
        model = load(directory, dist.group.WORLD, dtype=dtype)
        close = dict(rtol=0, atol=1e-11 if dtype == torch.float64 else 2e-4)
        for ours, theirs in zip(*speculated(model, rows, counts), strict=True):
            torch.testing.assert_close(ours, theirs, **close)

    ranks(run, world)


# Proposals


@pytest.mark.parametrize("seed", range(10))
def test_lookup_against_a_search_of_all_matches(seed):
    draw = random.Random(seed)
    tokens = [draw.randrange(draw.choice((2, 3, 9))) for _ in range(draw.randint(1, 60))]
    if draw.random() < 0.5:
        tokens += tokens[: draw.randint(1, len(tokens))]
    cut = draw.randint(1, len(tokens))
    request = SimpleNamespace(prompt=tuple(tokens[:cut]), tokens=tokens[cut:], max_new_tokens=100)
    history = History(request)

    def matched(end):
        """How many tokens up to `end` are those at the end of all."""
        lengths = range(min(end, speculation.LONGEST_MATCH), 0, -1)
        return next((n for n in lengths if tokens[end - n : end] == tokens[len(tokens) - n :]), 0)

    best = max(range(1, len(tokens)), key=lambda end: (matched(end), end), default=None)
    for count in (1, 2, 7):
        found = history.lookup(count)
        if best is None or matched(best) < speculation.SHORTEST_MATCH:
            assert found == []
            continue
        expected = list(tokens)
        while len(expected) < len(tokens) + count:
            expected.append(expected[best + len(expected) - len(tokens)])
        assert found == expected[len(tokens) :]


def test_a_lookup_searches_only_the_last_tokens(monkeypatch):
    monkeypatch.setattr(speculation, "LOOKUP_WINDOW", 8)
    request = SimpleNamespace(prompt=(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2), tokens=[], max_new_tokens=1)
    assert History(request).lookup(3) == []
    request.prompt = (9, 9, 9, 4, 1, 2, 5, 6, 7, 1, 2)
    assert History(request).lookup(3) == [5, 6, 7]


# In an engine


STEM = ids(9, seed=8).tolist()
REQUESTS = [  # some continuations repeat their prompts or themselves, one is always the same token
    dict(prompt=STEM * 3, max_new_tokens=24),
    dict(prompt=STEM * 2 + STEM[:4], max_new_tokens=15, temperature=0.3, seed=1, logprobs=2),
    dict(prompt=[5], max_new_tokens=40, logit_bias={9: 1e3}),
    dict(prompt=[7, 8] * 4, max_new_tokens=16, temperature=0.4, top_k=2, seed=2, frequency_penalty=-0.2),
    dict(prompt=STEM, max_new_tokens=1),
    dict(prompt=STEM * 2, max_new_tokens=20, temperature=1.5, top_p=0.3, seed=3, logit_bias={STEM[0]: 3.0}),
]


def served(model, requests, **options):
    """[(tokens, log-probabilities, end)] of the requests, which come one by one, and the number of steps."""
    engine, added, steps = Engine(model, **options), [], 0
    while engine.is_busy or len(added) < len(requests):
        if len(added) < len(requests) and steps % 3 == 0:
            added.append(engine.add(**requests[len(added)]))
        before = {request: len(request.tokens) for request in added}
        advanced = engine.step()
        assert {request for request, count in before.items() if len(request.tokens) > count} == set(advanced)
        steps += 1
    return [(r.tokens, [token for token, _ in r.logprobs], r.finished) for r in added], steps


def stopping(model):
    """REQUESTS, some of which end within what is proposed: at a stop token, or where a stop string is complete."""
    plain, _ = served(model, REQUESTS)
    stops = [{}, dict(stop_tokens=plain[1][0][12]), {}, {}, {}, dict(stop_tokens=plain[5][0][17], min_new_tokens=15)]
    return [request | stop for request, stop in zip(REQUESTS, stops, strict=True)]


@worlds
@pytest.mark.parametrize("family", by_default(("mamba", "mamba2", "zamba2"), FAMILIES))
def test_requests_get_the_same_tokens_as_without(ranks, world, family):
    """Greedy and sampled, with stops in the middle of proposals, few and many slots, limits and a budget."""
    directory = checkpoint(family)
    requests = stopping(load(directory, dtype=torch.float64))
    options = [
        dict(slots=1, speculate=7), dict(slots=3, speculate=4, max_length=120, chunk=5),
        dict(slots=6, speculate=2, token_budget=9, prefix_bytes=10**6, block=4),
    ]  # fmt: skip

    def run(model):
        return [[served(model, requests, **(each | change)) for each in options] for change in (dict(speculate=0), {})]

    plain, ahead = on_ranks(ranks, world, directory, run)
    for (expected, steps), (found, fewer) in zip(plain, ahead, strict=True):
        assert [row[::2] for row in found] == [row[::2] for row in expected]
        for (_, ours, _), (_, theirs, _) in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-9)
        assert fewer <= steps
    assert ahead[0][1] < 0.85 * plain[0][1] and {end for _, _, end in plain[0][0]} == {"stop", "length"}


@worlds
@pytest.mark.parametrize("family", by_default(("mamba2",), FAMILIES))
def test_a_draft_model(ranks, world, family, tmp_path, monkeypatch):
    """The model itself, whose proposals are right, and another one, whose are not; also for prompts it has not read yet."""
    monkeypatch.setattr(speculation, "relative_size", lambda draft, model: 0.01)
    directory, requests = checkpoint(family), REQUESTS
    save_hf(tmp_path, "mamba", num_hidden_layers=1, vocab_size=VOCAB, seed=5)

    def run(rank):
        model, other = (load(each, dist.group.WORLD, dtype=torch.float64) for each in (directory, tmp_path))
        return [
            served(model, requests, slots=2),
            served(model, requests, slots=2, draft=model, speculate=3),
            served(model, requests, slots=2, draft=other),
            served(model, requests[:1], slots=1),
            served(model, requests[:1], slots=1, draft=model, speculate=3),
        ]

    for plain, same, other, alone, ahead in ranks(run, world):
        assert [row[::2] for row in same[0]] == [row[::2] for row in other[0]] == [row[::2] for row in plain[0]]
        assert alone[0] == ahead[0] and (alone[1], ahead[1]) == (24, 8)


@worlds
@pytest.mark.parametrize("limit, longest", ((dict(chunk=4), 4), (dict(chunk=8, token_budget=7), 6), ({}, 31)))
def test_a_draft_model_reads_in_chunks(ranks, world, limit, longest, monkeypatch):
    """Prompts, and what requests have got while the draft was not asked: it is asked after 20 tokens of the first.

    Without limits, it then reads the first prompt and these tokens but for the last 16, which it reads with its proposals.
    """
    monkeypatch.setattr(speculation, "relative_size", lambda draft, model: 0.01)
    best_count = SpeculativeDecoder._best_count

    def late(self, histories, available):
        return best_count(self, histories, available) if len(histories[0]._request.tokens) >= 20 else 0

    monkeypatch.setattr(SpeculativeDecoder, "_best_count", late)
    next_logits, read = megatron_ssm.Model.next_logits, []

    def noted(model, ids, mask=None, cache=None, prompt=False):
        read.extend([(model, ids.shape[1])] if prompt else [])
        return next_logits(model, ids, mask, cache, prompt)

    monkeypatch.setattr(megatron_ssm.Model, "next_logits", noted)
    directory = checkpoint("mamba2")
    requests = [
        dict(prompt=STEM * 3, max_new_tokens=60),
        dict(prompt=STEM * 2, max_new_tokens=60, temperature=1.0, seed=3),
    ]

    def run(rank):
        model, draft = (load(directory, dist.group.WORLD, dtype=torch.float64) for _ in range(2))
        plain, ahead = (
            served(model, requests, slots=2, **limit, **each) for each in ({}, dict(draft=draft, speculate=3))
        )
        lengths = [length for each, length in read if each is draft]
        return plain, ahead, max(lengths), sum(lengths)

    for (plain, steps), (ahead, fewer), most, total in ranks(run, world):
        assert [row[::2] for row in ahead] == [row[::2] for row in plain] and fewer < steps
        assert most == longest and total > len(STEM) * 5


@pytest.mark.parametrize("family", by_default(("mamba", "mamba2"), FAMILIES))
def test_without_the_c_library(family, monkeypatch):
    monkeypatch.setattr(kernels, "LIBRARY", Library("megatron_ssm", {}, "/nonexistent"))
    model = load(checkpoint(family))
    (plain, steps), (ahead, fewer) = (served(model, REQUESTS[:3], slots=1, speculate=most) for most in (0, 7))
    assert [row[::2] for row in ahead] == [row[::2] for row in plain] and fewer < steps


def test_few_proposals_are_made_where_they_are_wrong(monkeypatch):
    """A model whose random text has no repetitions, and a prompt that has: only few of its proposals are tried."""
    calls = []
    original = megatron_ssm.Model.speculative_logits
    monkeypatch.setattr(megatron_ssm.Model, "speculative_logits", lambda *given: (calls.append(1), original(*given))[1])
    monkeypatch.setattr(History, "lookup", lambda self, most: [VOCAB - 1] * most)  # never sampled: its logit is banned
    engine = Engine(load(checkpoint("mamba")), slots=1, speculate=8)
    request = engine.add([1, 2], 400, temperature=5.0, seed=1, logit_bias={VOCAB - 1: -1e9})
    steps = sum(1 for _ in engine.stream(request))
    assert steps == 400 and 3 <= len(calls) <= 16


def test_models_that_cannot_speculate(tmp_path):
    model = load(checkpoint("mamba2"))
    save_hf(tmp_path, "mamba", num_hidden_layers=1, vocab_size=VOCAB + 1)
    error = attempt(Engine, model, draft=load(tmp_path))
    assert error == ("ValueError", "the draft model has a vocabulary of 258, the model one of 257: they must be equal")
    assert attempt(Engine, model, speculate=-1) == ("ValueError", "speculate=-1 must be an integer, at least 0")


@pytest.mark.parametrize("cp", (2, 4))
def test_context_ranks_cannot_speculate(ranks, cp):
    from attention2d import AllGather

    directory = checkpoint("mamba2")

    def run(rank):
        model = load(directory, context=AllGather(dist.group.WORLD))
        return attempt(Engine, model, speculate=2)

    for answer in ranks(run, cp):
        assert answer == ("ValueError", "speculative decoding is not supported on context ranks")


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_a_draft_model_on_other_ranks(ranks, world):
    directory = checkpoint("mamba2")

    def run(rank):
        return attempt(Engine, load(directory, dist.group.WORLD), draft=load(directory))

    for answer in ranks(run, world):
        assert answer is not None and f"over 1 ranks on cpu, the model over {world} on cpu" in answer[1]
