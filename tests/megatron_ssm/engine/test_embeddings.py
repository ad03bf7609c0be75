"""Embeddings of prompts. Oracle: the hidden states of the whole sequence at once, before the head, in float64."""

import pytest
import torch
from chosen import by_default

from megatron_ssm import Engine, load
from serving import FAMILIES, attempt, checkpoint, ids, on_ranks

PROMPT = ids(11).tolist()


def expected(directory, prompt, pooling):
    """The unit vector of the hidden states that the final norm returns."""
    model, found = load(directory, dtype=torch.float64), []
    model.norm_f.register_forward_hook(lambda module, inputs, output: found.append(output))
    with torch.no_grad():
        model(torch.tensor([prompt]))
    hidden = found[-1][0]
    pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
    return (pooled / pooled.norm()).tolist()


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("family", by_default(("mamba2", "zamba", "qwen3_5_text"), FAMILIES))
def test_embeddings_are_hidden_states_of_the_whole_prompt(ranks, world, family):
    """In chunks, with a prefix cache that has the prompt, beside a request whose tokens stay the same."""

    def run(model):
        engine = Engine(model, slots=3, chunk=4, prefix_bytes=10**6, block=2, token_budget=9)
        alone = engine.add(PROMPT, 5)
        while engine.is_busy:
            engine.step()
        beside = engine.add(PROMPT, 5)
        pooled = [engine.add(PROMPT[:n], 1, pooling=kind) for n in (11, 1) for kind in ("last", "mean")]
        ended = []
        while engine.is_busy:
            ended += [request for request in engine.step() if request.finished is not None]
        assert set(ended) == {beside, *pooled} and beside.tokens == alone.tokens
        assert all(request.finished == "stop" and not request.tokens for request in pooled)
        return [request.embedding for request in pooled]

    directory = checkpoint(family)
    found = on_ranks(ranks, world, directory, run)
    wanted = [expected(directory, PROMPT[:n], kind) for n in (11, 1) for kind in ("last", "mean")]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_model_of_nan_ends_with_an_error():
    model = load(checkpoint("mamba2"))
    with torch.no_grad():
        model.norm_f.weight[0] = float("nan")
    engine = Engine(model)
    request = engine.add(PROMPT, 1, pooling="mean")
    assert engine.step() == [request] and request.finished == "error" and not engine.is_busy


def test_refusals():
    engine = Engine(load(checkpoint("mamba2")))
    assert attempt(engine.add, PROMPT, 1, pooling="max") == (
        "ValueError", "unknown pooling 'max': expected last or mean",
    )  # fmt: skip
    assert attempt(engine.add, PROMPT, 1, pooling="last", prompt_logprobs=True) == (
        "ValueError", "pooling and prompt_logprobs exclude each other",
    )  # fmt: skip
