"""A budget of tokens per step. Oracles: shares by counting up one by one; the tokens of each request alone."""

import random

import pytest
import torch
from chosen import by_default

from megatron_ssm import Engine, generate, load
from megatron_ssm.engine.prompt_reader import fair_shares
from serving import FAMILIES, attempt, checkpoint, ids, on_ranks

worlds = pytest.mark.parametrize("world", (1, 2))


@pytest.mark.parametrize("seed", range(20))
def test_fair_shares(seed):
    """Oracle: all that want more get one token more, as long as there is one for each of them."""
    draw = random.Random(seed)
    wanted = {slot: draw.randint(1, draw.choice((3, 50))) for slot in "abcdefg"[: draw.randint(1, 7)]}
    budget = draw.randint(len(wanted), 100)
    expected = dict.fromkeys(wanted, 0)
    while more := [slot for slot in wanted if expected[slot] < wanted[slot]]:
        if sum(expected.values()) + len(more) > budget:
            break
        for slot in more:
            expected[slot] += 1
    assert fair_shares(wanted, budget) == expected and fair_shares(wanted, None) == wanted


def served(model, requests, **options):
    """The tokens of requests that are added one per step, and the most tokens of a step."""
    engine, added, most = Engine(model, **options), [], 0
    while engine.is_busy or len(added) < len(requests):
        if len(added) < len(requests):
            prompt, new, seed = requests[len(added)]
            added.append(engine.add(prompt, new, temperature=0.8 if seed else 0.0, seed=seed))
        before = engine.prefilled_tokens
        begun = [request for request in added if request.tokens]
        advanced = engine.step()
        decoded = sum(request in advanced for request in begun)
        most = max(most, decoded + engine.prefilled_tokens - before)
    return [request.tokens for request in added], most


@worlds
@pytest.mark.parametrize("family", by_default(("falcon_mamba", "zamba2", "falcon_h1", "qwen3_5_text"), FAMILIES))
def test_tokens_are_those_of_each_request_alone(ranks, world, family):
    draw = random.Random(5)
    requests = [(ids(draw.choice((1, 3, 40)), seed=i).tolist(), draw.randint(1, 9), i % 3) for i in range(8)]
    options = dict(slots=3, token_budget=7), dict(slots=4, token_budget=9, chunk=2, prefix_bytes=10**6, block=4)
    directory = checkpoint(family)
    model = load(directory, dtype=torch.float64)
    alone = [
        generate(model, torch.tensor([prompt]), max_new_tokens=new, temperature=0.8 if seed else 0.0, seed=seed)
        for prompt, new, seed in requests
    ]
    results = on_ranks(ranks, world, directory, lambda model: [served(model, requests, **each) for each in options])
    for (tokens, most), each in zip(results, options, strict=True):
        assert tokens == [row.tolist() for (row,) in alone] and each["slots"] < most <= each["token_budget"]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    """It has its first token in the step in which it comes, and the long prompt is read beside it."""
    engine = Engine(load(checkpoint("mamba2")), slots=3, token_budget=16)
    long = engine.add(ids(100).tolist(), 1)
    engine.step()
    assert engine.prefilled_tokens == 16
    short = engine.add([1, 2, 3], 1)
    assert engine.step() == [short] and engine.prefilled_tokens == 32  # 13 and 3
    steps = 0
    while not long.tokens:  # new prompts come all the time
        engine.add([4] * 50, 1)
        engine.step()
        steps += 1
    assert steps <= (100 - 29) // (16 // 3) + 1


def test_a_budget_that_does_not_suffice():
    assert attempt(Engine, load(checkpoint("mamba2")), slots=4, token_budget=4) == (
        "ValueError", "token_budget=4 must be more than slots=4: each slot reads at least one token",
    )  # fmt: skip
