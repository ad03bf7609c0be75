"""Continuous batching. Oracle: each request's tokens are those of its solo run, whatever arrives and leaves when."""

import gc
import random
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from chosen import by_default

from megatron_ssm import Engine, generate, load
from megatron_ssm.engine.request import Request
from megatron_ssm.engine.text import load_tokenizer
from serving import FAMILIES, VOCAB, checkpoint, families, ids, on_ranks

worlds = pytest.mark.parametrize("world", (1, 2))


# Random scenarios


@dataclass
class Arrival:
    """A request, the step before which it is added, and the one before which it is cancelled (None: never)."""

    prompt: list
    options: dict
    step: int
    cancelled: int | None
    solo: list = field(default_factory=list)


@cache
def scenario(directory, seed):
    """(options of an engine, arrivals) drawn from `seed`; prompts share their beginnings, and stops do stop."""
    model, draw = load(directory, dtype=torch.float64), random.Random(seed)
    engine = dict(
        slots=draw.choice((1, 2, 3, 5)),
        chunk=draw.choice((None, 1, 3, 7)),
        max_length=draw.choice((None, 40)),
        prefix_bytes=(60_000, 10**8, 0)[seed % 3],  # a few snapshots, all, none
        block=draw.choice((1, 4, 5)),
    )
    stem = [draw.randrange(VOCAB) for _ in range(14)]
    arrivals, step = [], 0
    for _ in range(10):
        tail = [draw.randrange(VOCAB) for _ in range(draw.randint(0, 6))]
        prompt = stem[: draw.randint(0 if tail else 1, len(stem))] + tail
        step += draw.choice((0, 0, 0, 1, 4, 9))
        options = sampling(draw)
        solo = generate(model, torch.tensor([prompt]), **options)[0].tolist()
        options |= stops(draw, solo, model.directory)
        solo = generate(model, torch.tensor([prompt]), **options)[0].tolist()
        cancelled = step + draw.randint(0, 8) if draw.random() < 0.25 else None
        arrivals.append(Arrival(prompt, options, step, cancelled, solo))
    return engine, arrivals


def sampling(draw):
    """Random options of one request."""
    options = dict(max_new_tokens=draw.randint(1, 12))
    if draw.random() < 0.5:
        options |= dict(temperature=draw.choice((0.7, 1.5)), seed=draw.randrange(3))
        options |= draw.choice((dict(), dict(top_k=5), dict(top_p=0.8), dict(top_k=200, top_p=0.9)))
    if draw.random() < 0.3:
        new = dict(frequency_penalty=0.8, presence_penalty=-0.3)
        options |= draw.choice((dict(repetition_penalty=0.8), dict(repetition_penalty=1.5), new))
    return options


def stops(draw, solo, directory):
    """What ends a run that would give `solo`, in half of all cases."""
    if draw.random() < 0.5:
        return {}
    if draw.random() < 0.4:
        text = load_tokenizer(directory).decode(solo)
        start = draw.randrange(max(1, len(text)))
        return dict(stop_strings=[text[start : start + draw.randint(1, 2)] or "none"])
    return dict(stop_tokens=draw.sample(solo, 1), min_new_tokens=draw.choice((0, 0, 3, 30)))


def play(model, settings, arrivals):
    """(tokens, end, reused) of each request, and the engine; every step is checked on the way."""
    engine, requests, step = Engine(model, **settings), {}, 0
    while len(requests) < len(arrivals) or engine.is_busy:
        for index, arrival in enumerate(arrivals):
            if arrival.step == step:
                requests[index] = engine.add(arrival.prompt, **arrival.options)
            if arrival.cancelled == step:
                engine.cancel(requests[index])
        before = {request: len(request.tokens) for request in requests.values()}
        advanced = engine.step()
        assert len(advanced) <= settings["slots"]
        assert [request.id for request in advanced] == sorted({request.id for request in advanced})
        for request, count in before.items():
            assert len(request.tokens) == count + (request in advanced)
        assert engine.prefix_cache.nbytes <= settings["prefix_bytes"]
        step += 1
    return [(r.tokens, r.finished, r.reused) for _, r in sorted(requests.items())], engine


def check(arrivals, outcome, prefilled):
    """Compare with the solo runs; what was prefilled is what no snapshot spared."""
    least = most = 0
    for arrival, (tokens, end, reused) in zip(arrivals, outcome, strict=True):
        unread = len(arrival.prompt) - reused
        most += unread
        least += unread if tokens else 0
        if end == "cancelled":
            assert arrival.cancelled is not None and tokens == arrival.solo[: len(tokens)]
            continue
        assert tokens == arrival.solo
        full = len(tokens) == arrival.options["max_new_tokens"]
        assert end in ({"stop", "length"} if full else {"stop"})
    assert least <= prefilled <= most


def played(model, settings, arrivals):
    outcome, engine = play(model, settings, arrivals)
    return outcome, engine.prefilled_tokens


@worlds
@pytest.mark.parametrize("family", by_default(("mamba2", "zamba2"), FAMILIES))
def test_a_request_is_continued_as_if_alone(ranks, world, family):
    run_scenarios(ranks, world, checkpoint(family), range(2))


@pytest.mark.full
@pytest.mark.parametrize("world", (1, 2, 4))
@families
def test_many_requests_are_continued_as_if_alone(ranks, world, family):
    run_scenarios(ranks, world, checkpoint(family), range(2, 11), timeout=300)


def run_scenarios(ranks, world, directory, seeds, **options):
    scenarios = [scenario(directory, seed) for seed in seeds]
    results = on_ranks(ranks, world, directory, lambda model: [played(model, *s) for s in scenarios], **options)
    for (_, arrivals), (outcome, prefilled) in zip(scenarios, results, strict=True):
        check(arrivals, outcome, prefilled)
    assert any(reused for outcome, _ in results for _, _, reused in outcome)
    ends = {end for outcome, _ in results for _, end, _ in outcome}
    assert ends == {"stop", "length", "cancelled"}


# Coming and going


def test_an_idle_engine_does_nothing():
    engine = Engine(load(checkpoint("mamba2")))
    assert engine.step() == [] and not engine.is_busy
    request = engine.add([1, 2], max_new_tokens=2)
    assert list(engine.stream(request)) == list(engine.stream(request)) == request.tokens
    engine.cancel(request)  # too late
    assert request.finished == "length" and engine.step() == []


def test_slots_are_given_in_the_order_of_arrival_and_free_at_once():
    """With two slots, three requests of 2, 4 and 2 tokens: the third starts in the step after the first's last."""
    engine = Engine(load(checkpoint("zamba")), slots=2)
    first, second, third = (engine.add([i + 1], max_new_tokens=n) for i, n in enumerate((2, 4, 2)))
    steps = []
    while engine.is_busy:
        steps.append(engine.step())
    assert steps == [[first, second], [first, second], [second, third], [second, third]]


def test_cancelling():
    """One that waits, one whose prompt is half read and one that is decoding; their slots are free in the next step."""
    prompt = ids(23).tolist()
    model = load(checkpoint("zamba2"), dtype=torch.float64)
    engine = Engine(model, slots=2, chunk=2)
    decoding, reading = engine.add([1], max_new_tokens=9), engine.add(prompt, max_new_tokens=9)
    waiting, last = engine.add([3], max_new_tokens=9), engine.add(prompt[:5], max_new_tokens=3)
    engine.step()
    for request in (decoding, reading, waiting):
        engine.cancel(request)
    assert [len(r.tokens) for r in (decoding, reading, waiting)] == [1, 0, 0]
    assert {r.finished for r in (decoding, reading, waiting)} == {"cancelled"}
    assert list(engine.stream(reading)) == []
    assert list(engine.stream(last)) == generate(model, torch.tensor([prompt[:5]]), max_new_tokens=3)[0].tolist()
    assert (engine.prefilled_tokens, len(decoding.tokens), engine.is_busy) == (1 + 2 + 5, 1, False)


def test_two_streams_of_one_engine():
    """Drawn in turns: each gives its own tokens and steps the other along."""
    model = load(checkpoint("mamba"), dtype=torch.float64)
    engine = Engine(model)
    requests = [engine.add([i], max_new_tokens=6) for i in (4, 5)]
    pairs = list(zip(*map(engine.stream, requests), strict=True))
    for row, column in zip((4, 5), zip(*pairs, strict=True), strict=True):
        assert list(column) == generate(model, torch.tensor([[row]]), max_new_tokens=6)[0].tolist()


@pytest.mark.parametrize("world", (1, 2, pytest.param(4, marks=pytest.mark.full)))
def test_without_a_seed_all_ranks_draw_the_same_and_each_request_others(ranks, world):
    def run(model):
        engine = Engine(model, slots=4)
        requests = [engine.add([1, 2], 8, temperature=2.0) for _ in range(3)]
        again = engine.add([1, 2], 8, temperature=2.0, seed=requests[1].seed)
        while engine.is_busy:
            engine.step()
        return [request.tokens for request in (*requests, again)]

    first, second, third, again = on_ranks(ranks, world, checkpoint("mamba2"), run)
    assert again == second and len({str(row) for row in (first, second, third)}) == 3


# Memory


def served(engine, draw, requests):
    """Any number of requests, some of them cancelled, and no trace left but what the prefix cache may keep."""
    stem = [draw.randrange(VOCAB) for _ in range(12)]
    running = []
    for number in range(requests):
        prompt = stem[: draw.choice((0, 6, 12))] + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 3))]
        options = draw.choice((dict(), dict(temperature=1.0, repetition_penalty=1.2)))
        running.append(engine.add(prompt, max_new_tokens=draw.randint(1, 3), stop_tokens=[number % VOCAB], **options))
        if draw.random() < 0.1:
            engine.cancel(draw.choice(running))
        if number % 4 == 0:
            engine.step()
        running = [request for request in running if request.finished is None]
    while engine.is_busy:
        engine.step()


def tensors():
    """How many tensors there are, and their bytes."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is torch.Tensor]
    return len(found), sum(t.numel() * t.element_size() for t in found)


@pytest.mark.parametrize("family,prefix_bytes", [("mamba", 0), pytest.param("zamba2", 100_000, marks=pytest.mark.full)])
def test_a_thousand_requests_leave_nothing_behind(family, prefix_bytes):
    draw = random.Random(1)
    engine = Engine(load(checkpoint(family)), slots=8, max_length=32, prefix_bytes=prefix_bytes, block=6)
    served(engine, draw, 100)
    count, nbytes = tensors()
    served(engine, draw, 1000)
    assert engine.prefix_cache.nbytes <= prefix_bytes
    count_after, nbytes_after = tensors()
    kept, work = 64, 2**20  # calls of tapes, each with an arena
    assert abs(nbytes_after - nbytes) <= prefix_bytes + work and count_after <= count + prefix_bytes // 1000 + kept
    assert not [o for o in gc.get_objects() if type(o) is Request]
