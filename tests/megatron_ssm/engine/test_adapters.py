"""Several LoRA adapters in one engine. Oracle: transformers' greedy tokens with PEFT; and each request's solo run."""

import pytest
import torch
import torch.distributed as dist
from adapters import TARGETS, adapters, greedy_tokens
from chosen import by_default

import megatron_ssm
from megatron_ssm import Engine
from serving import checkpoint, on_ranks

PROMPT = list(range(60, 79))
NAMES = "", "a", "b"
worlds = pytest.mark.parametrize("world", (1, 2))


def engine_of(model, family, **options):
    """An engine with the adapters a and b."""
    return Engine(model, adapters={n: megatron_ssm.with_lora(model, adapters(family, n)) for n in "ab"}, **options)


def finish(engine):
    while engine.is_busy:
        engine.step()


@worlds
@pytest.mark.parametrize("family", by_default(("mamba2", "falcon_h1", "qwen3_5_text"), TARGETS))
def test_tokens_are_those_of_peft(ranks, world, family):
    """Each row of a batch has those of its own adapter, and each adapter has prefixes of its own."""
    checkpoint(family), adapters(family, "a"), adapters(family, "b")

    def run(model):
        engine = engine_of(model, family, slots=4, prefix_bytes=10**8, block=4, token_budget=12)
        names = ["a", "", "b", "a", "b", ""]
        requests = [engine.add(PROMPT, max_new_tokens=6, adapter=name) for name in names]
        finish(engine)
        again = engine.add(PROMPT + [1], max_new_tokens=2, adapter="b")
        finish(engine)
        return [request.tokens for request in requests], [request.reused for request in requests[:3]], again.reused

    tokens, reused, again = on_ranks(ranks, world, checkpoint(family), run)
    solo = {name: greedy_tokens(family, name, PROMPT, 6) for name in NAMES}
    assert tokens == [solo[name] for name in ("a", "", "b", "a", "b", "")]
    assert len({tuple(each) for each in solo.values()}) == 3
    assert reused == [0, 0, 0] and again == len(PROMPT)


@worlds
@pytest.mark.parametrize("draft", ("", "b"))
def test_speculation_with_adapters(ranks, world, draft):
    """Rows of two adapters and of the model have proposals in one step; those of the draft's own adapter are accepted."""
    family = "falcon_h1"
    checkpoint(family), adapters(family, "a"), adapters(family, "b")

    def run(rank):
        model, proposer = (
            megatron_ssm.load(checkpoint(family), dist.group.WORLD, dtype=torch.float64) for _ in range(2)
        )
        if draft:
            megatron_ssm.load_lora(proposer, adapters(family, draft))
        tokens, counts = [], []
        for options in (dict(), dict(draft=proposer)):
            engine = engine_of(model, family, slots=3, **options)
            engine._decoder._draft_cost = 0.0  # so that it proposes, though the draft is not smaller
            requests = [engine.add(PROMPT, max_new_tokens=12, adapter=name) for name in NAMES]
            finish(engine)
            tokens.append([request.tokens for request in requests])
            counts.append(engine.speculated)
        return tokens, counts

    for (plain, speculative), ((none, _), (proposed, accepted)) in ranks(run, world):
        assert plain == speculative and none == 0 and 5 <= accepted < proposed
        assert len({tuple(tokens) for tokens in plain}) == 3


@worlds
def test_parameters_are_shared(ranks, world):
    """Only the factors are new, and the model without adapters stays as it is, also if it has decoded before."""
    family = "mamba2"
    checkpoint(family), adapters(family, "a")

    def run(model):
        before = megatron_ssm.generate(model, torch.tensor([PROMPT]), max_new_tokens=6).tolist()
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        adapted = megatron_ssm.with_lora(model, adapters(family, "a"))
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        own = {name: p for name, p in adapted.named_parameters() if ".lora." not in name}
        assert all(p is own[name] for name, p in model.named_parameters()) and len(own) < len([*adapted.parameters()])
        after = megatron_ssm.generate(adapted, torch.tensor([PROMPT]), max_new_tokens=6).tolist()
        assert megatron_ssm.generate(model, torch.tensor([PROMPT]), max_new_tokens=6).tolist() == before
        return before, after

    before, after = on_ranks(ranks, world, checkpoint(family), run, dtype=torch.float32)
    assert after == [greedy_tokens(family, "a", PROMPT, 6)] != before


def test_an_unknown_adapter_is_an_error():
    engine = engine_of(megatron_ssm.load(checkpoint("mamba2")), "mamba2")
    with pytest.raises(ValueError, match="unknown adapter 'c': expected one of"):
        engine.add(PROMPT, adapter="c")
