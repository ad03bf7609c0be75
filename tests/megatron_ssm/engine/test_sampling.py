"""Sampling. Oracles: transformers' logits processors; a sampler of one row at a time, in float64; known distributions."""

import math
from collections import Counter
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import serving
from megatron_ssm import generate, load
from megatron_ssm.engine.sampling import Sampling, choose_tokens, descending
from megatron_ssm.parallel.ranks import Ranks
from serving import LENGTHS, MASK, mamba2, on_ranks, save_table, small_checkpoint
from serving import SMALL_VOCAB as VOCAB

__all__ = ["mamba2", "small_checkpoint"]
SEED, STEPS = 11, 8
ids = partial(serving.ids, vocab=VOCAB)
worlds = pytest.mark.parametrize("world", (1, 2, pytest.param(4, marks=pytest.mark.full)))
every_world = pytest.mark.parametrize("world", (1, 2, 4))


# Against the naive sampler


def naive(model, prompt, steps, seed, temperature=0.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0,
          frequency_penalty=0.0, presence_penalty=0.0):  # fmt: skip
    """The tokens, each from the whole text so far read anew, and how far each choice was from another one.

    That is the distance of the uniform to the edges of its token, or of the token's probability to its neighbours'.
    """
    processors = [TemperatureLogitsWarper(temperature)] if temperature else []
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p else []
    processors += [MinPLogitsWarper(min_p)] if min_p else []
    generator, text, tokens, margins = torch.Generator().manual_seed(seed), prompt[None], [], []
    for _ in range(steps):
        scores = RepetitionPenaltyLogitsProcessor(repetition_penalty)(text, model(text)[:, -1].double())
        counts = torch.tensor([tokens.count(token) for token in range(VOCAB)])
        scores = scores - frequency_penalty * counts.double() - presence_penalty * (counts > 0).double()
        for processor in processors:
            scores = processor(text, scores)
        p = scores[0].softmax(0).tolist()
        order = sorted((token for token in range(VOCAB) if p[token]), key=lambda token: (-p[token], token))
        drawn = torch.rand((), generator=generator, dtype=torch.float64).item() if temperature else 0.0
        edges = list(accumulate(p[token] for token in order))
        place = next(i for i, edge in enumerate(edges) if edge > drawn * edges[-1])
        token, neighbours = order[place], order[max(0, place - 1) : place] + order[place + 1 : place + 2]
        margins.append(min([abs(edge - drawn) for edge in edges] + [abs(p[n] / p[token] - 1) for n in neighbours]))
        tokens.append(token)
        text = torch.cat([text, torch.tensor([[token]])], dim=1)
    return tokens, margins


OPTIONS = {
    "greedy, penalty": dict(repetition_penalty=1.7),
    "temperature": dict(temperature=1.3),
    "top_k": dict(temperature=1.0, top_k=5),
    "top_k, more than a rank has": dict(temperature=2.0, top_k=40),
    "top_k, more than there are": dict(temperature=0.9, top_k=1000),
    "top_p": dict(temperature=1.5, top_p=0.8),
    "top_p, the first token": dict(temperature=1.0, top_p=1e-9),
    "top_p, all": dict(temperature=1.0, top_p=1.0),
    "greedy, penalties of new tokens": dict(frequency_penalty=0.3, presence_penalty=0.5),
    "penalties below zero": dict(temperature=1.0, frequency_penalty=-0.4, presence_penalty=-1.5),
    "min_p": dict(temperature=1.5, min_p=0.3),
    "everything": dict(temperature=1.1, top_k=30, top_p=0.9, repetition_penalty=1.4),
    "everything new": dict(
        temperature=1.3,
        top_k=30,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=0.6,
        presence_penalty=0.4,
    ),
}


@pytest.fixture(scope="module")
def drawn(small_checkpoint):
    """{option: [(tokens, margins) of each row alone]}."""
    model = load(small_checkpoint[0], dtype=torch.float64)
    with torch.no_grad():
        return {
            name: [naive(model, ids(4, 9)[row, -n:], STEPS, SEED + row, **options) for row, n in enumerate(LENGTHS)]
            for name, options in OPTIONS.items()
        }


def sampled(model, names=OPTIONS):
    return {name: generate(model, ids(4, 9), MASK, STEPS, seed=SEED, **OPTIONS[name]).tolist() for name in names}


@worlds
def test_every_way_to_sample_is_that_of_the_naive_sampler(ranks, world, small_checkpoint, drawn):
    """A left-padded batch on several ranks in float64: each row exactly as if it were alone."""
    assert on_ranks(ranks, world, small_checkpoint[0], sampled) == {
        name: [tokens for tokens, _ in rows] for name, rows in drawn.items()
    }


@worlds
def test_in_single_precision_tokens_differ_only_at_a_boundary(ranks, world, small_checkpoint, drawn):
    names = ("temperature", "everything", "everything new")
    tokens = on_ranks(ranks, world, small_checkpoint[0], lambda model: sampled(model, names), torch.float32)
    for name in names:
        for row, (expected, margins) in zip(tokens[name], drawn[name], strict=True):
            certain = next((i for i, margin in enumerate(margins) if margin < 1e-6), STEPS)
            assert certain > STEPS - 2
            assert row[:certain] == expected[:certain], name


# Seeds


@worlds
def test_seeds(ranks, world, mamba2):
    """Equal ones give equal tokens, different ones others; None is another one each time, the same on all ranks."""

    def sample(model):
        return [generate(model, ids(4, 7), max_new_tokens=4, temperature=2.0, seed=seed).tolist() for seed in seeds]

    seeds = (5, 5, 6, -5, 2**64 - 4, None, None)
    first, again, *others = on_ranks(ranks, world, mamba2[0], sample)
    assert again == first
    assert len({str(tokens) for tokens in (first, *others)}) == len(seeds) - 1


# Equal logits, and known ones


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_the_order_of_numbers(dtype):
    """Oracle: torch's stable sort. Few different numbers of both signs, also zeros, infinite and subnormal ones."""
    some = torch.tensor([-math.inf, -2.5, -1e-7, -0.0, 0.0, 1e-40, 1.0, 3e4, math.inf])
    index = torch.randint(len(some), (3, 500), generator=torch.Generator().manual_seed(0))
    values = torch.cat([some[index], torch.linspace(-1, 1, 1500).view(3, 500)], dim=-1).to(dtype)
    assert torch.equal(descending(values), values.sort(dim=-1, descending=True, stable=True).indices)
    assert descending(values[:, :0]).shape == (3, 0)
    worst = torch.tensor([[0.0, math.nan, 1.0], [0.0, -math.nan, math.inf]], dtype=dtype)
    assert torch.equal(descending(worst)[:, 0], torch.tensor([1, 1]))


def test_a_logit_that_is_infinite_is_chosen():
    """From NaN, nothing is."""
    model = torch.tensor([[1.0, math.inf, 0.0, 0.0], [math.nan] * 4])
    generators = [torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)]
    for top_k in (None, 3):
        assert choose_tokens(model, Sampling(1.0, top_k), generators, Ranks(None)).tolist() == [1, -1]


TIED = [{0, 1, 2, 3, 4}, {1, 3}, {3, 4}, {4}, {2, 4}]  # after t, these have logit -1 and the others -2
TIES = torch.tensor([[-1.0 if u in tied else -2.0 for u in range(5)] for tied in TIED])


@pytest.fixture(scope="module")
def ties(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ties")
    save_table(directory, TIES)
    return directory


@every_world
def test_the_lowest_id_wins_a_tie(ranks, world, ties):
    """Five ids over four ranks are 2, 2, 1 and none: those that lack ids must not win with what fills their slices."""

    def greedy(model):
        prompts = torch.arange(5)[:, None]
        first = generate(model, prompts, max_new_tokens=1)
        penalized = generate(model, prompts, max_new_tokens=1, repetition_penalty=3.0)
        return first.flatten().tolist(), penalized.flatten().tolist()

    first, penalized = on_ranks(ranks, world, ties, greedy)
    assert first == [min(tied) for tied in TIED]
    assert penalized == [min(tied - {t} or {0}) for t, tied in enumerate(TIED)]  # t itself then has -3 or -6


@worlds
@pytest.mark.parametrize("top_k", (1, 2, 3, 10))
def test_top_k_keeps_the_lowest_ids_of_a_tie(ranks, world, ties, top_k):
    def sample(model):
        prompts = torch.arange(5).repeat(40)[:, None]
        return generate(model, prompts, max_new_tokens=1, temperature=1.0, top_k=top_k, seed=0).view(40, 5).T.tolist()

    for t, tokens in enumerate(on_ranks(ranks, world, ties, sample)):
        assert set(tokens) == set(sorted(range(5), key=lambda u: (-TIES[t, u], u))[:top_k])


@pytest.mark.parametrize("options", [dict(), dict(top_k=6), dict(top_p=0.7), dict(top_k=12, top_p=0.8)], ids=str)
def test_frequencies_are_the_distribution(tmp_path, options):
    """4,000 rows draw one token each from a known distribution of 20: chi-square, with these seeds."""
    reference = save_table(tmp_path, torch.randn(20, 20, generator=torch.Generator().manual_seed(1)))
    prompt, rows = torch.tensor([[3]]), 4000
    scores = reference(prompt).logits[:, -1].detach().double() / 1.5
    scores = TopKLogitsWarper(options["top_k"])(prompt, scores) if "top_k" in options else scores
    scores = TopPLogitsWarper(options["top_p"])(prompt, scores) if "top_p" in options else scores
    expected = (scores[0].softmax(0) * rows).tolist()
    tokens = generate(load(tmp_path), prompt.expand(rows, 1), max_new_tokens=1, temperature=1.5, seed=100, **options)
    counts = Counter(tokens.flatten().tolist())
    survivors = {token for token in range(20) if expected[token]}
    assert set(counts) == survivors and min(expected[token] for token in survivors) > 5
    freedom = len(survivors) - 1
    assert sum((counts[t] - expected[t]) ** 2 / expected[t] for t in survivors) < freedom + 3 * math.sqrt(2 * freedom)


# What is sent


@worlds
@pytest.mark.parametrize(
    "options,numbers",
    [
        (dict(), 2),
        (dict(temperature=1.0, top_k=3, seed=0), 6),
        (dict(temperature=1.0, top_k=3, top_p=0.5, repetition_penalty=2.0, seed=0), 6),
        (dict(temperature=1.0, top_k=1000, seed=0), None),
        (dict(temperature=1.0, seed=0), None),
    ],
)
def test_what_a_token_gathers(ranks, world, mamba2, options, numbers):
    """A sequence: 2 numbers greedily, 2k with top-k, else (None) the slice; counted at the door of torch."""

    def run(model):
        sent = {"all_reduce": [], "all_gather": []}

        def counted(kind, index):
            inner = getattr(dist, kind)

            def call(*args, **kwargs):
                sent[kind].append(args[index].numel() * args[index].element_size())
                return inner(*args, **kwargs)

            setattr(dist, kind, call)  # this process is a rank, and ends with the test

        counted("all_reduce", 0)
        counted("all_gather", 1)
        generate(model, ids(3, 5), max_new_tokens=4, **options)
        return sent, dict(model.counter.calls), model.counter.nbytes

    sent, calls, nbytes = on_ranks(ranks, world, mamba2[0], run, torch.float32, shared_memory=False)
    numbers = numbers or math.ceil(VOCAB / world)
    assert sent["all_gather"] == ([] if world == 1 else [4 * 3 * numbers] * 4)
    assert {kind: len(sizes) for kind, sizes in sent.items() if sizes} == calls
    assert sum(sum(sizes) for sizes in sent.values()) == nbytes
