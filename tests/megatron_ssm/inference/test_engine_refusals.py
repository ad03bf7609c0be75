"""What an engine refuses. Oracles: tables of mistakes; the tokens of a good request that comes after them."""

import resource
import shutil

import pytest
import torch
import torch.distributed as dist

from megatron_ssm import Engine, generate, load
from serving import VOCAB, attempt, checkpoint, on_ranks

several_ranks = pytest.mark.parametrize("world", (2, 4))
any_number_of_ranks = pytest.mark.parametrize("world", (1, 2, 4))


# Requests


GOOD = dict(prompt=[1, 2, 3], max_new_tokens=3, temperature=0.9, seed=5, stop_strings=["none"])
DIFFERENT = dict(
    prompt=[1, 2, 4], max_new_tokens=4, temperature=0.91, top_k=3, top_p=0.9, repetition_penalty=1.5,
    stop_tokens=[3], stop_strings=["a"], seed=6, min_new_tokens=1, frequency_penalty=0.1, presence_penalty=0.1, min_p=0.1,
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


def served(engine, **request):
    """The tokens of one request."""
    return list(engine.stream(engine.add(**request)))


def add_all(model, cases):
    """What each request is answered; then one that is good must be as if there had been no others."""
    engine = Engine(model, slots=2, max_length=12)
    answers = [attempt(engine.add, **case) for case in cases]
    assert not engine.is_busy
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
    for answers, tokens in ranks(run, world):
        assert len(answers) == len(changes)
        for kind, message in answers:
            wrong = message.endswith(f"(rank {odd})")  # what one rank was asked is refused anyway: all say why
            assert kind == "ValueError" and (wrong or differ((kind, message), others)), message
        assert tokens == alone


WRONG_TYPES = [
    dict(temperature="x"), dict(temperature=None), dict(prompt=[1.7]), dict(prompt="abc"), dict(prompt=None), dict(prompt=3),
    dict(prompt=[[1], [2]]), dict(top_k=2.5), dict(top_k="a"), dict(top_p="x"), dict(repetition_penalty=[1.2]),
    dict(repetition_penalty=None), dict(max_new_tokens=2.5), dict(max_new_tokens="a"), dict(max_new_tokens=None),
    dict(min_new_tokens="a"), dict(min_new_tokens=0.5), dict(seed=1.5), dict(seed="a"), dict(stop_strings=[3]),
    dict(stop_strings=3), dict(stop_tokens=[1.5]), dict(stop_tokens=["a"]), dict(stop_tokens=1.5),
    dict(min_p="a"), dict(frequency_penalty=None),
]  # fmt: skip


@any_number_of_ranks
def test_arguments_of_another_type_are_one_value_error_on_every_rank(ranks, world):
    """And the engine goes on."""
    cases = [GOOD | change for change in WRONG_TYPES]
    answers, tokens = on_ranks(ranks, world, checkpoint("mamba2"), lambda model: add_all(model, cases))
    for change, answer in zip(WRONG_TYPES, answers, strict=True):
        assert answer is not None and answer[0] == "ValueError" and "\n" not in answer[1], (change, answer)
    assert len(tokens) == 3


@pytest.mark.parametrize("world", (1, 2))
def test_a_request_that_is_too_large_for_memory(ranks, world):
    """Every rank raises in `add`, and holds what it held."""

    def run(model):
        resource.setrlimit(resource.RLIMIT_AS, (2**40, resource.RLIM_INFINITY))  # where the kernel would promise more
        engine = Engine(model)
        before = list(engine.stream(engine.add(**GOOD))), engine.cache.nbytes
        error = attempt(engine.add, [1, 2], max_new_tokens=10**9)
        assert error is not None and not engine.is_busy
        assert (list(engine.stream(engine.add(**GOOD))), engine.cache.nbytes) == before
        return error[0]

    assert on_ranks(ranks, world, checkpoint("zamba2"), run) in ("RuntimeError", "MemoryError")


# Engines


def test_engines_that_cannot_be():
    model = load(checkpoint("mamba2"))
    for name in ("slots", "chunk", "block", "max_length", "prefix_bytes"):
        value = -1 if name == "prefix_bytes" else 0
        with pytest.raises(ValueError, match=f"{name}={value} must be an integer, at least"):
            Engine(model, **{name: value})


@pytest.mark.parametrize("name", ("slots", "chunk", "block", "max_length", "prefix_bytes"))
@pytest.mark.parametrize("value", (1.5, "a", True, [2]), ids=str)
def test_engines_of_another_type(name, value):
    with pytest.raises(ValueError) as caught:
        Engine(load(checkpoint("mamba2")), **{name: value})
    assert str(caught.value).startswith(f"{name}={value!r} must be an integer, at least ")


OPTIONS = dict(slots=3, chunk=2, block=5, max_length=20, prefix_bytes=1000, token_budget=9, speculate=2)


def differ(answer, others) -> bool:
    """Whether it says that these ranks were asked something else, and what."""
    message = f"tensor-parallel ranks {others} were asked something else than rank 0: "
    return answer[0] == "ValueError" and answer[1].startswith(message) and " instead of " in answer[1]


@several_ranks
def test_engines_that_differ_between_ranks(ranks, world):
    """In one option each: all of them say so when the first request comes."""

    def run(rank):
        model = load(checkpoint("mamba2"), dist.group.WORLD)
        engines = [Engine(model, **({name: value} if rank == 1 else {})) for name, value in OPTIONS.items()]
        answers = [attempt(engine.add, **GOOD) for engine in engines]
        assert not any(engine.is_busy for engine in engines)
        return answers, served(Engine(model), **GOOD)

    checkpoint("mamba2")
    for answers, tokens in ranks(run, world):
        assert len(answers) == len(OPTIONS) and all(differ(answer, [1]) for answer in answers) and len(tokens) == 3


@several_ranks
@pytest.mark.parametrize("running", (False, True))
def test_a_request_that_one_rank_cancels(ranks, world, running):
    """The next one is refused by all, until the others cancel it too."""

    def run(rank):
        engine = Engine(load(checkpoint("zamba2"), dist.group.WORLD))
        first, second = engine.add([1, 2], 5), engine.add([3], 5)
        if running:
            engine.step()
        if rank == world - 1:
            engine.cancel(first)
        answers = [attempt(engine.add, **GOOD) for _ in range(2)]
        engine.cancel(first)
        third = engine.add(**GOOD)
        assert third.id == 2 and len(list(engine.stream(third))) == 3
        return answers, list(engine.stream(second))

    alone = on_ranks(ranks, 1, checkpoint("zamba2"), lambda model: served(Engine(model), prompt=[3], max_new_tokens=5))
    for answers, tokens in ranks(run, world):
        assert len(answers) == 2 and all(differ(answer, [world - 1]) for answer in answers) and tokens == alone


# Calls that differ between ranks


def answers_of_calls(world, calls):
    """On every rank: the answers of `calls`(engine, request, is_odd), of which the last rank is the odd one."""
    directory = checkpoint("zamba2")

    def run(rank):
        engine = Engine(load(directory, dist.group.WORLD), slots=2)
        return calls(engine, engine.add([1, 2], 5), rank == world - 1)

    return run


@several_ranks
@pytest.mark.parametrize("is_running", (False, True))
def test_a_step_after_one_rank_alone_cancelled(ranks, world, is_running):
    """It is an error on every rank, until the others cancel the request too."""

    def calls(engine, first, is_odd):
        second = engine.add([3], 5)
        if is_running:
            engine.step()
        if is_odd:
            engine.cancel(first)
        answers = [
            attempt(engine.step),
            attempt(next, engine.stream(second)) if not is_running else attempt(engine.step),
        ]
        engine.cancel(first)
        return answers, list(engine.stream(second))

    alone = on_ranks(ranks, 1, checkpoint("zamba2"), lambda model: served(Engine(model), prompt=[3], max_new_tokens=5))
    for answers, tokens in ranks(answers_of_calls(world, calls), world, timeout=30):
        assert len(answers) == 2 and all(differ(answer, [world - 1]) for answer in answers), answers
        assert "unfinished requests" in answers[0][1] and tokens == alone


@several_ranks
def test_a_rank_that_adds_while_the_others_step(ranks, world):
    def calls(engine, first, is_odd):
        answer = attempt(engine.add, [3], 5) if is_odd else attempt(engine.step)
        return answer, list(engine.stream(first))

    alone = on_ranks(
        ranks, 1, checkpoint("zamba2"), lambda model: served(Engine(model), prompt=[1, 2], max_new_tokens=5)
    )
    for answer, tokens in ranks(answers_of_calls(world, calls), world, timeout=30):
        assert answer is not None and differ(answer, [world - 1]) and tokens == alone


@several_ranks
def test_ranks_that_step_different_engines_of_one_model(ranks, world):
    """The engines have as many requests, but other ones; or the same request, of which one engine has done more."""
    directory = checkpoint("zamba2")

    def run(rank):
        model, is_odd = load(directory, dist.group.WORLD, dtype=torch.float64), rank == world - 1
        engines = [Engine(model) for _ in range(4)]
        prompts = [1, 2], [3, 4, 5], [6, 7], [6, 7]
        requests = [engine.add(prompt, 5, seed=7) for engine, prompt in zip(engines, prompts, strict=True)]
        engines[2].step()
        answers = [attempt(engines[first + is_odd].step) for first in (0, 2)]
        return answers, [list(e.stream(r)) for e, r in zip(engines, requests, strict=True)]

    def alone(model):
        return [served(Engine(model), prompt=p, max_new_tokens=5) for p in ([1, 2], [3, 4, 5], [6, 7], [6, 7])]

    expected = on_ranks(ranks, 1, directory, alone)
    for answers, tokens in ranks(run, world, timeout=30):
        assert all(answer is not None and differ(answer, [world - 1]) for answer in answers), answers
        assert tokens == expected


@several_ranks
def test_pad_ids_that_are_wrong_or_differ_on_one_rank(ranks, world):
    """`generate` refuses them before the model runs; a wrong one would end one rank in the middle."""
    directory = checkpoint("mamba2")

    def run(rank):
        model, prompts = load(directory, dist.group.WORLD, dtype=torch.float64), torch.tensor([[1, 2], [3, 4]])
        pads = (1, None, 2**70) if rank == world - 1 else (0, 0, 0)
        answers = [attempt(generate, model, prompts, max_new_tokens=3, pad_token_id=pad) for pad in pads]
        return answers, generate(model, prompts, max_new_tokens=3).shape

    for (different, *wrong), shape in ranks(run, world, timeout=30):
        assert different is not None and differ(different, [world - 1])
        assert all(answer[0] == "ValueError" and answer[1].endswith(f"(rank {world - 1})") for answer in wrong)
        assert shape == (2, 3)


@several_ranks
def test_ranks_with_different_tokenizers(ranks, world, tmp_path):
    """They would find a stop string at different tokens: a request that has one is refused by all, also by `generate`."""
    same, other = checkpoint("mamba2"), tmp_path / "other"
    shutil.copytree(same, other)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":97', '"a":98').replace('"b":98', '"b":97', 1))
    assert path.read_text() != (same / "tokenizer.json").read_text()

    def run(rank):
        model = load(other if rank == world - 1 else same, dist.group.WORLD, dtype=torch.float64)
        engine, prompt = Engine(model), torch.tensor([[1, 2, 3]])
        answers = [
            attempt(engine.add, [1, 2, 3], stop_strings=["a"]),
            attempt(generate, model, prompt, max_new_tokens=3, stop_strings="a"),
        ]
        return answers, served(engine, prompt=[1, 2, 3], max_new_tokens=3)

    alone = on_ranks(ranks, 1, same, lambda model: served(Engine(model), prompt=[1, 2, 3], max_new_tokens=3))
    for answers, tokens in ranks(run, world, timeout=30):
        assert all(answer is not None and differ(answer, [world - 1]) for answer in answers), answers
        assert tokens == alone


def test_a_request_of_another_engine():
    model = load(checkpoint("mamba2"))
    one, other = Engine(model), Engine(model)
    request = one.add([1, 2], max_new_tokens=3)
    other.add([1, 2], max_new_tokens=3)
    for use in (other.cancel, other.stream):
        assert attempt(use, request) == ("ValueError", "the request is not one of this engine's")
    one.step()
    assert attempt(other.cancel, request) is not None and request.finished is None
    assert list(one.stream(request)) == request.tokens and request.finished == "length"
