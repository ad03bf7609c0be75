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


WRONG_TYPES = [
    dict(temperature="x"), dict(temperature=None), dict(prompt=[1.7]), dict(prompt="abc"), dict(prompt=None), dict(prompt=3),
    dict(prompt=[[1], [2]]), dict(top_k=2.5), dict(top_k="a"), dict(top_p="x"), dict(repetition_penalty=[1.2]),
    dict(repetition_penalty=None), dict(max_new_tokens=2.5), dict(max_new_tokens="a"), dict(max_new_tokens=None),
    dict(min_new_tokens="a"), dict(min_new_tokens=0.5), dict(seed=1.5), dict(seed="a"), dict(stop_strings=[3]),
    dict(stop_strings=3), dict(stop_tokens=[1.5]), dict(stop_tokens=["a"]), dict(stop_tokens=1.5),
    dict(min_p="a"), dict(frequency_penalty=None),
]  # fmt: skip


@any_number_of_ranks
def test_arguments_of_another_type_are_one_error_on_every_rank(ranks, world):
    """And the engine goes on."""
    cases = [GOOD | change for change in WRONG_TYPES]
    answers, tokens = on_ranks(ranks, world, checkpoint("mamba2"), lambda model: add_all(model, cases))
    for change, answer in zip(WRONG_TYPES, answers, strict=True):
        assert answer is not None and answer[0] in ("TypeError", "ValueError") and "\n" not in answer[1], (
            change,
            answer,
        )
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
        assert all("got tokenizer=" in message for _, message in answers)
        assert tokens == alone


def test_a_request_of_another_engine():
    model = load(checkpoint("mamba2"))
    one, other = Engine(model), Engine(model)
    request = one.add([1, 2], max_new_tokens=3)
    other.add([1, 2], max_new_tokens=3)
    for use in (other.cancel, other.stream):
        assert attempt(use, request) == ("ValueError", "the request belongs to another engine")
    one.step()
    assert attempt(other.cancel, request) is not None and request.finished is None
    assert list(one.stream(request)) == request.tokens and request.finished == "length"
