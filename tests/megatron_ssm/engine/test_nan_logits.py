"""Models whose logits are NaN. Oracle: they have no next token."""

import math

import pytest
import torch

from megatron_ssm import Engine, load
from megatron_ssm.engine import speculation
from megatron_ssm.engine.generation import generate
from serving import attempt, checkpoint, on_ranks

PROMPT = [104, 105]
MESSAGE = "the logits are NaN after 0 new token(s)"


def spoil(model):
    """Make the last token's logit NaN, on the rank that has it."""
    with torch.no_grad():
        model.lm_head.weight[-1] = math.nan
    return model


@pytest.mark.parametrize("world", (1, 2))
def test_requests_end_with_an_error(ranks, world):
    """Of any options, on all ranks alike; the text and the log-probabilities have no token."""

    def run(model):
        spoil(model)
        found = []
        for speculate in (0, 4):
            engine = Engine(model, slots=3, speculate=speculate)
            requests = [
                engine.add(PROMPT, 5, logprobs=2),
                engine.add(PROMPT, 5, temperature=1.0, seed=1),
                engine.add(PROMPT, 5, temperature=1.0, top_k=3, seed=1),
            ]
            while engine.is_busy:
                engine.step()
            found += [(request.finished, request.tokens, request.logprobs) for request in requests]
        prompt = torch.tensor([PROMPT])
        errors = [attempt(generate, model, prompt), attempt(model.generate, prompt, num_beams=2)]
        return found, errors

    found, errors = on_ranks(ranks, world, checkpoint("mamba2"), run)
    assert found == [("error", [], [])] * 6
    for kind, message in errors:
        assert kind == "FloatingPointError" and MESSAGE in message and "mamba2" in message


def test_a_request_ends_while_proposals_are_read(monkeypatch):
    """The model is spoiled when its draft, which is equal, has proposed tokens before."""
    monkeypatch.setattr(
        speculation, "relative_size", lambda draft, model: 0.01
    )  # so that proposals are worth their time
    model = load(checkpoint("mamba2"))
    engine = Engine(model, draft=load(checkpoint("mamba2")))
    request = engine.add([104, 105] * 8, 40)
    while engine.speculated[0] == 0:
        assert engine.step()
    before = len(request.tokens)
    spoil(model)
    engine.step()
    assert request.finished == "error" and len(request.tokens) == before and not engine.is_busy


def test_a_draft_of_nan_proposes_nothing_that_counts(monkeypatch):
    monkeypatch.setattr(speculation, "relative_size", lambda draft, model: 0.01)
    prompt, model = [104, 105] * 8, load(checkpoint("mamba2"))
    plain = Engine(model)
    expected = list(plain.stream(plain.add(prompt, 12)))
    engine = Engine(model, draft=spoil(load(checkpoint("mamba2"))))
    assert list(engine.stream(engine.add(prompt, 12))) == expected
