"""Budgets of reasoning. Oracle: the tokens of the same request without a budget, of which the reasoning is the beginning."""

import pytest

from megatron_ssm.engine.engine import Engine
from megatron_ssm.engine.grammar import regex
from megatron_ssm.engine.thinking import Thinking
from serving import checkpoint, on_ranks

END = tuple(b"</think>")


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("speculate", (0, 3))
def test_a_budget_ends_the_reasoning(ranks, world, speculate):
    def run(model):
        def tokens(new, **options):
            engine = Engine(model, slots=2, speculate=speculate)
            return list(engine.stream(engine.add(b"a", new, temperature=1.0, seed=1, **options)))

        free = tokens(30)
        for budget in (0, 1, 7):
            found = tokens(30, thinking=Thinking(END, True, budget))
            assert tuple(found) != tuple(free) and found[:budget] == free[:budget]
            assert tuple(found[budget : budget + 8]) == END and len(found) == 30
        assert tokens(30, thinking=Thinking(END, False, 3)) == free  # the reply does not begin any
        begun = tokens(30, thinking=Thinking(END, False, 3), grammar=regex("<think>a{20}"))
        assert bytes(begun[:7]) == b"<think>" and bytes(begun[10:18]) == b"</think>"
        return free

    on_ranks(ranks, world, checkpoint("mamba2"), run)


def test_a_grammar_follows_the_reasoning(ranks):
    def run(model):
        engine = Engine(model, slots=2)
        options = dict(temperature=1.0, seed=1, stop_tokens=range(128, 257), grammar=regex("[0-9]{3}"))
        request = engine.add(b"a", 60, thinking=Thinking(END, True, 5), **options)
        found = bytes(engine.stream(request))
        assert found[5:13] == b"</think>" and found[13:16].isdigit() and len(found) in (16, 17)
        return found

    on_ranks(ranks, 1, checkpoint("mamba2"), run)
