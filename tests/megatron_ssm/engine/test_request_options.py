"""Log-probabilities and biases of requests. Oracles: the whole sequence at once in float64; transformers' processors."""

import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from transformers import AutoModelForCausalLM

from megatron_ssm import Engine, load
from serving import FAMILIES, VOCAB, attempt, checkpoint, ids, on_ranks

worlds = pytest.mark.parametrize("world", (1, 2))
PROMPT = ids(7).tolist()


def finished(engine, *requests):
    """The requests, after all steps."""
    while engine.is_busy:
        engine.step()
    return requests


def expected_log_probabilities(model, tokens, count):
    """For each token but the first, what `Request.logprobs` holds, from the logits of the whole sequence."""
    with torch.no_grad():
        scores = model.local_logits(torch.tensor([tokens]), cache=model.new_cache(1), prompt=True)[0].log_softmax(-1)
    best = scores.sort(dim=-1, descending=True, stable=True)
    rows = [
        (
            scores[t, token].item(),
            list(zip(best.indices[t, :count].tolist(), best.values[t, :count].tolist(), strict=True)),
        )
        for t, token in enumerate(tokens[1:])
    ]
    return rows


def assert_same(found, expected):
    """Equal ids, and log-probabilities to 1e-9."""
    assert len(found) == len(expected)
    for (own, best), (expected_own, expected_best) in zip(found, expected, strict=True):
        assert own == pytest.approx(expected_own, abs=1e-9)
        assert [token for token, _ in best] == [token for token, _ in expected_best]
        assert [p for _, p in best] == pytest.approx([p for _, p in expected_best], abs=1e-9)


@worlds
@pytest.mark.parametrize(
    "family", by_default(("mamba", "mamba2"), [f for f in FAMILIES if f not in ("zamba2", "nemotron_h")])
)
def test_log_probabilities_are_those_of_the_whole_sequence(ranks, world, family):
    """Of new tokens and of prompts, also of prompts in chunks; whatever temperature, bias and penalty are.

    Zamba2 and Nemotron-H are left out: they do not clamp dt while they decode, as they do for the whole sequence.
    """

    def run(model):
        engine = Engine(model, slots=4, chunk=3, prefix_bytes=10**6, block=2)
        first, *others = (
            engine.add(PROMPT, 6, logprobs=3, prompt_logprobs=True),
            engine.add(PROMPT[:1], 4, logprobs=0, prompt_logprobs=True),
            engine.add(PROMPT, 5, temperature=1.5, seed=1, logprobs=2, logit_bias={5: 4.0}, repetition_penalty=1.4),
            engine.add(PROMPT, 5),
        )
        finished(engine)
        again = engine.add(PROMPT, 6, logprobs=1, prompt_logprobs=True)  # its prefixes are kept, but not their logits
        finished(engine)
        return [(r.tokens, r.logprobs, r.prompt_logprobs, r.reused) for r in (first, *others, again)]

    directory = checkpoint(family)
    (first, single, sampled, plain, again) = on_ranks(ranks, world, directory, run)
    model = load(directory, dtype=torch.float64)
    for (tokens, found, of_prompt, _), prompt, count in (
        (first, PROMPT, 3), (single, PROMPT[:1], 0), (sampled, PROMPT, 2), (again, PROMPT, 1),
    ):  # fmt: skip
        expected = expected_log_probabilities(model, prompt + tokens, count)
        assert_same(found, expected[len(prompt) - 1 :])
        if of_prompt:
            assert of_prompt[0] is None
            assert_same(of_prompt[1:], expected[: len(prompt) - 1])
    assert len(first[2]) == len(again[2]) == len(PROMPT) and len(single[2]) == 1 and again[3] == 0
    assert plain[1:3] == ([], []) and sampled[2] == [] and first[0] == plain[0] + first[0][5:]


def test_a_long_prompt_is_scored_in_pieces(monkeypatch):
    monkeypatch.setattr("megatron_ssm.engine.prompt_reader.SCORED", 4)
    model = load(checkpoint("mamba2"), dtype=torch.float64)
    prompt = ids(19).tolist()
    engine = Engine(model)
    (request,) = finished(engine, engine.add(prompt, 1, prompt_logprobs=True))
    assert_same(request.prompt_logprobs[1:], expected_log_probabilities(model, prompt, 0))


@pytest.mark.parametrize("family", ("mamba", "zamba"))
def test_all_ids_as_alternatives(family):
    model = load(checkpoint(family), dtype=torch.float64)
    engine = Engine(model)
    (request,) = finished(engine, engine.add(PROMPT, 2, logprobs=VOCAB))
    for _, best in request.logprobs:
        assert sorted(token for token, _ in best) == list(range(VOCAB))
        assert sum(torch.tensor([p for _, p in best]).exp()) == pytest.approx(1, abs=1e-6)


@worlds
def test_biased_greedy_search_gives_the_tokens_of_transformers(ranks, world):
    """Oracle: transformers' `sequence_bias`, of one token each. A large bias makes a token certain, or impossible."""
    directory = checkpoint("mamba2")
    biases = {7: 1.0, 200: 2.5, 256: 1.5, 31: -4.0}
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64), do_sample=False,
        max_new_tokens=12, pad_token_id=0, sequence_bias=[[[token], bias] for token, bias in biases.items()],
    )[0, len(PROMPT) :].tolist()  # fmt: skip

    def run(model):
        engine = Engine(model, slots=5)
        requests = [engine.add(PROMPT, 12, logit_bias=bias) for bias in (biases, None, {9: 10000}, {})]
        requests.append(engine.add(PROMPT, 12, logit_bias={requests[0].prompt[0]: -1e4}, temperature=3.0, seed=2))
        return [request.tokens for request in finished(engine, *requests)]

    biased, plain, certain, empty, without = on_ranks(ranks, world, directory, run)
    assert biased == expected != plain == empty and certain == [9] * 12 and PROMPT[0] not in without


def test_what_requests_refuse():
    engine = Engine(load(checkpoint("mamba2")))
    for expected, options in (
        ("logit_bias: token id 257 is outside the vocabulary of 257", dict(logit_bias={VOCAB: 1.0})),
        ("logit_bias: token id -1 is outside", dict(logit_bias={-1: 1.0})),
        ("logit_bias: the bias nan of token 3 must be a finite number", dict(logit_bias={3: float("nan")})),
        ("logprobs=-1 must be from 0", dict(logprobs=-1)),
        ("logprobs=258 exceeds the vocabulary of 257", dict(logprobs=VOCAB + 1)),
    ):
        answer = attempt(engine.add, PROMPT, **options)
        assert answer is not None and answer[0] == "ValueError" and expected in answer[1], (expected, answer)
    assert not engine.is_busy


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_requests_whose_options_differ_between_ranks(ranks, world):
    """Each difference is one error on all ranks, in which the prefix key is not shown."""
    changes = [dict(logit_bias={1: 2.0}), dict(logprobs=1), dict(prompt_logprobs=True), dict(prefix_key="secret")]
    directory = checkpoint("mamba2")

    def run(rank):
        engine = Engine(load(directory, dist.group.WORLD))
        return [attempt(engine.add, PROMPT, **(change if rank == 1 else {})) for change in changes]

    for answers in ranks(run, world):
        assert all(text.startswith("arguments differ across ranks: rank 1 got ") for _, text in answers)
        assert "secret" not in str(answers)
