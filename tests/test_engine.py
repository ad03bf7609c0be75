"""Continuous batching. Oracle: each request's tokens are those of its solo run, whatever arrives and leaves when."""

import gc
import random
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.distributed as dist

from megatron_ssm import Engine, generate, load
from megatron_ssm.request import Request
from megatron_ssm.text import load_tokenizer
from serving import VOCAB, attempt, checkpoint, families, ids, on_ranks, on_ranks_of_families

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
        options["repetition_penalty"] = draw.choice((0.8, 1.5))
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
    while len(requests) < len(arrivals) or engine.busy:
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
        assert engine.prefixes.nbytes <= settings["prefix_bytes"]
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
@families
def test_a_request_is_continued_as_if_alone(ranks, world, family):
    run_scenarios(ranks, world, checkpoint(family), range(3))


@pytest.mark.full
@pytest.mark.parametrize("world", (1, 2, 4))
@families
def test_many_requests_are_continued_as_if_alone(ranks, world, family):
    run_scenarios(ranks, world, checkpoint(family), range(3, 11), timeout=300)


def run_scenarios(ranks, world, directory, seeds, **options):
    scenarios = [scenario(directory, seed) for seed in seeds]
    results = on_ranks(ranks, world, directory, lambda model: [played(model, *s) for s in scenarios], **options)
    for (_, arrivals), (outcome, prefilled) in zip(scenarios, results, strict=True):
        check(arrivals, outcome, prefilled)
    assert any(reused for outcome, _ in results for _, _, reused in outcome)
    ends = {end for outcome, _ in results for _, end, _ in outcome}
    assert ends == {"stop", "length", "cancelled"}


# Prefixes


class Recording(Engine):
    """An engine that keeps the logits from which each request's tokens are chosen, as {id: [(width,), ...]}."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.logits = {}

    def _choose(self, slots):
        for slot in slots:
            self.logits.setdefault(slot.request.id, []).append(slot.logits.clone())
        super()._choose(slots)


def serve(engine, prompt, **options):
    """One request from its arrival to its end: (request, its logits, the tokens of prompts read for it)."""
    before, request = engine.prefilled_tokens, engine.add(prompt, **options)
    assert list(engine.stream(request)) == request.tokens
    return request, torch.stack(engine.logits.pop(request.id)), engine.prefilled_tokens - before


PROMPT = ids(23).tolist()
BLOCK = 4
# name: prompts that were read before, the prompt, how much of it they spare
HITS = {
    "none": ([PROMPT[1:]], PROMPT[:9], 0),
    "shorter than a block": ([PROMPT], PROMPT[:3], 0),
    "at the end of a block": ([PROMPT[:8]], PROMPT[:15], 8),
    "at the end of a prompt": ([PROMPT[:10]], PROMPT[:15], 10),
    "one token left": ([PROMPT[:10]], PROMPT[:11], 10),
    "one token left after a block": ([PROMPT], PROMPT[:9], 8),
    "nothing left": ([PROMPT[:10]], PROMPT[:10], 10),
    "nothing left after a block": ([PROMPT], PROMPT[:12], 12),
    "the longest of several": ([PROMPT[:5], PROMPT[:11], PROMPT[:7], PROMPT[:6] + [0] * 9], PROMPT, 11),
    "another continuation": ([PROMPT[:8] + [0] * 9, PROMPT[:9] + [1] * 9], PROMPT[:14], 8),
    "one block after another": ([PROMPT[:8], PROMPT[:14]], PROMPT[:22], 14),
}


def hits(model, names=HITS):
    """{name: (reused, tokens read, the largest difference from the logits of a cold run)}."""
    cold, results = Recording(model, slots=1), {}
    for name in names:
        earlier, prompt, _ = HITS[name]
        engine = Recording(model, slots=2, prefix_bytes=10**7, block=BLOCK)
        for one in earlier:
            serve(engine, one, max_new_tokens=1)
        expected, expected_logits, _ = serve(cold, prompt, max_new_tokens=3)
        request, logits, read = serve(engine, prompt, max_new_tokens=3)
        assert request.tokens == expected.tokens, name
        results[name] = request.reused, read, difference(model, logits, expected_logits)
    return results


def difference(model, logits, expected):
    """The largest one among the ids that exist."""
    existing = slice(model.embeddings.stop - model.embeddings.start)
    return float((logits - expected)[..., existing].abs().max())


@worlds
def test_what_was_read_before_is_not_read_again(ranks, world):
    """And the logits are those of a cold run."""
    for results in on_ranks_of_families(ranks, world, hits):
        for family, found in results.items():
            for name, (reused, read, largest) in found.items():
                _, prompt, spared = HITS[name]
                assert (reused, read) == (spared, len(prompt) - spared), (family, name)
                assert largest < 1e-10, (family, name)


@worlds
@families
def test_logits_after_a_prefix_in_single_precision(ranks, world, family):
    """Of Zamba2 they are as near as the family's are to transformers'."""
    directory, names = checkpoint(family), ["at the end of a block", "one token left", "nothing left"]
    for found in ranks(lambda rank: hits(load(directory, dist.group.WORLD), names), world):
        assert max(largest for _, _, largest in found.values()) < (3e-4 if family == "zamba2" else 2e-5)


@worlds
def test_a_prompt_in_pieces_is_read_as_by_one_call_of_the_model(ranks, world):
    def run(model):
        whole = model.local_logits(torch.tensor([PROMPT]), logits_to_keep=1)[0]
        for settings in (dict(), dict(chunk=1), dict(chunk=5, prefix_bytes=10**7, block=BLOCK)):
            _, logits, read = serve(Recording(model, slots=1, **settings), PROMPT, max_new_tokens=1)
            assert read == len(PROMPT)
            assert difference(model, logits, whole) < 1e-10

    on_ranks_of_families(ranks, world, run)


@worlds
def test_equal_prompts_that_arrive_together(ranks, world):
    """Each reads its own, the snapshot is kept once; those that come later read nothing."""

    def run(model):
        engine = Recording(model, slots=3, prefix_bytes=10**7, block=BLOCK)
        together = [engine.add(PROMPT, max_new_tokens=3) for _ in range(3)]
        while engine.busy:
            engine.step()
        later, _, read = serve(engine, PROMPT, max_new_tokens=3)
        assert {len(PROMPT)} == {engine.prefilled_tokens // 3} and read == 0
        return [request.tokens for request in (*together, later)], len(engine.prefixes)

    tokens, entries = on_ranks(ranks, world, checkpoint("zamba2"), run)
    assert all(row == tokens[0] for row in tokens)
    assert entries == len(PROMPT) // BLOCK + 1


# What is refused


GOOD = dict(prompt=[1, 2, 3], max_new_tokens=3, temperature=0.9, seed=5, stop_strings=["none"])
DIFFERENT = dict(
    prompt=[1, 2, 4], max_new_tokens=4, temperature=0.91, top_k=3, top_p=0.9, repetition_penalty=1.5,
    stop_tokens=[3], stop_strings=["a"], seed=6, min_new_tokens=1,
)  # fmt: skip
WRONG = {
    "at least one token": dict(prompt=[]),
    f"token id {VOCAB} is outside the vocabulary of {VOCAB}": dict(prompt=[1, VOCAB]),
    "token id -1 is outside": dict(prompt=[-1]),
    "max_new_tokens=0 must be at least 1": dict(max_new_tokens=0),
    "3 tokens and 10 new ones do not fit into max_length=12": dict(max_new_tokens=10),
    "temperature=-1 must be": dict(temperature=-1),
    "temperature=nan must be": dict(temperature=float("nan")),
    "top_k=0 must be": dict(top_k=0),
    "top_p=1.5 must be": dict(top_p=1.5),
    "repetition_penalty=0 must be": dict(repetition_penalty=0),
    "must fit in 64 bits": dict(seed=2**64),
    "stop string is empty": dict(stop_strings=["a", ""]),
}
several_ranks = pytest.mark.parametrize("world", (2, 4))
any_number_of_ranks = pytest.mark.parametrize("world", (1, 2, 4))


def add_all(model, cases):
    """What each request is answered; then one that is good must be as if there had been no others."""
    engine = Engine(model, slots=2, max_length=12)
    answers = [attempt(engine.add, **case) for case in cases]
    assert not engine.busy
    good = engine.add(**GOOD)
    assert good.id == 0
    return answers, list(engine.stream(good))


@any_number_of_ranks
def test_what_cannot_be_done_is_one_value_error_on_every_rank(ranks, world):
    cases = [GOOD | change for change in WRONG.values()]
    answers, tokens = on_ranks(ranks, world, checkpoint("mamba2"), lambda model: add_all(model, cases))
    for expected, answer in zip(WRONG, answers, strict=True):
        assert answer is not None and answer[0] == "ValueError" and expected in answer[1], expected
    assert len(tokens) == 3


@several_ranks
@pytest.mark.parametrize("odd", ("first", "last"))
def test_a_request_that_differs_between_ranks_is_refused_by_all(ranks, world, odd):
    """Whatever differs, and also where it is wrong on one rank only."""
    changes = [{name: value} for name, value in DIFFERENT.items()] + list(WRONG.values())
    changes += [dict(seed=None), dict(prompt=[[1], [2, 3]]), dict(prompt=None), dict(temperature="hot")]
    changes += [dict(prompt=torch.ones(2, 2)), dict(prompt=[float("inf")]), dict(stop_strings=[""])]
    odd, directory = 0 if odd == "first" else world - 1, checkpoint("mamba2")
    alone = on_ranks(ranks, 1, directory, lambda model: add_all(model, []))[1]

    def run(rank):
        model = load(directory, dist.group.WORLD, dtype=torch.float64)
        return add_all(model, [GOOD | change if rank == odd else GOOD for change in changes])

    others = list(range(1, world)) if odd == 0 else [odd]
    message = (
        f"tensor-parallel ranks {others} were asked something else than rank 0 (now or earlier, or with other options)"
    )
    for answers, tokens in ranks(run, world):
        assert answers == [("ValueError", message)] * len(changes)
        assert tokens == alone


@any_number_of_ranks
def test_without_a_seed_all_ranks_draw_the_same_and_each_request_others(ranks, world):
    def run(model):
        engine = Engine(model, slots=4)
        requests = [engine.add([1, 2], 8, temperature=2.0) for _ in range(3)]
        again = engine.add([1, 2], 8, temperature=2.0, seed=requests[1].seed)
        while engine.busy:
            engine.step()
        return [request.tokens for request in (*requests, again)]

    first, second, third, again = on_ranks(ranks, world, checkpoint("mamba2"), run)
    assert again == second and len({str(row) for row in (first, second, third)}) == 3


def test_engines_that_cannot_be():
    model = load(checkpoint("mamba2"))
    for name in ("slots", "chunk", "block", "max_length", "prefix_bytes"):
        value = -1 if name == "prefix_bytes" else 0
        with pytest.raises(ValueError, match=f"{name}={value} must be an integer, at least"):
            Engine(model, **{name: value})


# Coming and going


def test_an_idle_engine_does_nothing():
    engine = Engine(load(checkpoint("mamba2")))
    assert engine.step() == [] and not engine.busy
    request = engine.add([1, 2], max_new_tokens=2)
    assert list(engine.stream(request)) == list(engine.stream(request)) == request.tokens
    engine.cancel(request)  # too late
    assert request.finished == "length" and engine.step() == []


def test_slots_are_given_in_the_order_of_arrival_and_free_at_once():
    """With two slots, three requests of 2, 4 and 2 tokens: the third starts in the step after the first's last."""
    engine = Engine(load(checkpoint("zamba")), slots=2)
    first, second, third = (engine.add([i + 1], max_new_tokens=n) for i, n in enumerate((2, 4, 2)))
    steps = []
    while engine.busy:
        steps.append(engine.step())
    assert steps == [[first, second], [first, second], [second, third], [second, third]]


def test_cancelling():
    """One that waits, one whose prompt is half read and one that is decoding; their slots are free in the next step."""
    model = load(checkpoint("zamba2"), dtype=torch.float64)
    engine = Engine(model, slots=2, chunk=2)
    decoding, reading = engine.add([1], max_new_tokens=9), engine.add(PROMPT, max_new_tokens=9)
    waiting, last = engine.add([3], max_new_tokens=9), engine.add(PROMPT[:5], max_new_tokens=3)
    engine.step()
    for request in (decoding, reading, waiting):
        engine.cancel(request)
    assert [len(r.tokens) for r in (decoding, reading, waiting)] == [1, 0, 0]
    assert {r.finished for r in (decoding, reading, waiting)} == {"cancelled"}
    assert list(engine.stream(reading)) == []
    assert list(engine.stream(last)) == generate(model, torch.tensor([PROMPT[:5]]), max_new_tokens=3)[0].tolist()
    assert (engine.prefilled_tokens, len(decoding.tokens), engine.busy) == (1 + 2 + 5, 1, False)


def test_two_streams_of_one_engine():
    """Drawn in turns: each gives its own tokens and steps the other along."""
    model = load(checkpoint("mamba"), dtype=torch.float64)
    engine = Engine(model)
    requests = [engine.add([i], max_new_tokens=6) for i in (4, 5)]
    pairs = list(zip(*map(engine.stream, requests), strict=True))
    for row, column in zip((4, 5), zip(*pairs, strict=True), strict=True):
        assert list(column) == generate(model, torch.tensor([[row]]), max_new_tokens=6)[0].tolist()


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
    while engine.busy:
        engine.step()


def tensors():
    """How many tensors there are, and their bytes."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is torch.Tensor]
    return len(found), sum(t.numel() * t.element_size() for t in found)


@pytest.mark.parametrize("family,prefix_bytes", [("mamba", 0), ("zamba2", 100_000)])
def test_a_thousand_requests_leave_nothing_behind(family, prefix_bytes):
    draw = random.Random(1)
    engine = Engine(load(checkpoint(family)), slots=8, max_length=32, prefix_bytes=prefix_bytes, block=6)
    served(engine, draw, 100)
    count, nbytes = tensors()
    served(engine, draw, 1000)
    assert engine.prefixes.nbytes <= prefix_bytes
    count_after, nbytes_after = tensors()
    assert abs(nbytes_after - nbytes) <= prefix_bytes and count_after <= count + prefix_bytes // 1000
    assert not [o for o in gc.get_objects() if type(o) is Request]
