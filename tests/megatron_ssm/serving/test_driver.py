"""The driver and the ranks that follow it. Oracle: `generate` on one rank."""

import queue
import threading

import pytest
import torch.distributed as dist

from megatron_ssm import Engine, load
from megatron_ssm.api.sequences import Arguments, Sequence
from megatron_ssm.serving.channel import Channel
from megatron_ssm.serving.driver import Driver, follow
from servers import expected
from serving import checkpoint

REQUESTS = [([1, 2, 3], 5), ([7] * 40, 12), ([9], 30), ([4, 4], 8)]


@pytest.mark.parametrize("world", (1, 2, 4))
def test_ranks_follow_additions_and_cancellations(ranks, world):
    """Two slots; one request is cancelled while it waits, one while it runs, and one cannot be served."""
    directory = checkpoint("mamba2")
    alone = [expected(directory, prompt, new) for prompt, new in REQUESTS]

    def run(rank):
        model = load(directory, dist.group.WORLD if world > 1 else None)
        engine, channel = Engine(model, slots=2, max_length=3000), Channel(model.ranks)
        return follow_all(engine, channel) if rank else drive(engine, channel)

    def follow_all(engine, channel):
        follow(engine, channel)
        return engine.prefilled_tokens, engine.is_busy

    def drive(engine, channel):
        updates, failures = queue.SimpleQueue(), []
        driver = Driver(engine, channel, updates.put, failures.append)
        sequences = [Sequence(Arguments(prompt, new, seed=0)) for prompt, new in REQUESTS]
        endless = [Sequence(Arguments([5, index], 2000, seed=0), index) for index in range(3)]
        wrong = Sequence(Arguments([300], 1, seed=0))
        for sequence in (endless[0], wrong, endless[1], endless[2], *sequences[:2]):
            driver.add(sequence)
        driver.cancel(endless[2])  # it has not reached the engine
        driver.start()
        tokens, errors, finished = {}, [], set()
        while len(finished) < len(sequences):
            for update in updates.get(timeout=60):
                tokens.setdefault(update.sequence, []).extend(update.tokens)
                errors += [str(update.error)] if update.error else []
                finished |= {update.sequence} if update.finished else set()
            if endless and endless[0] in tokens:
                driver.cancel(endless.pop(0))
                driver.cancel(endless.pop(0))
                endless.clear()
                for sequence in sequences[2:]:
                    driver.add(sequence)
        driver.cancel(sequences[0])  # it has finished, so nothing happens
        driver.stop()
        driver.join(60)
        assert not failures and errors == ["token id 300 is outside the vocabulary of 257"]
        assert [tokens[sequence] for sequence in sequences] == alone
        assert driver.load.running == driver.load.waiting == 0 and driver.load.new_tokens >= sum(map(len, alone))
        return engine.prefilled_tokens, engine.is_busy

    results = ranks(run, world)
    assert set(results) == {results[0]} and results[0][1] is False


GRAMMAR, WRONG = ("regex", "[a-c]{3}(-[0-9]+)*"), ("lark", 'start: "a')


@pytest.mark.parametrize("world", (1, 2, 4))
def test_others_go_on_while_a_grammar_is_compiled(ranks, world):
    """One compilation takes until other requests have finished; one fails; one request is cancelled meanwhile."""
    pytest.importorskip("llguidance")
    directory = checkpoint("mamba2")
    matching = Sequence(Arguments([1, 2], 20, seed=3, temperature=1.0, grammar=GRAMMAR))
    engine = Engine(load(directory), slots=1)
    engine.enqueue(request := matching.arguments.request(engine), 3)
    while engine.is_busy:
        engine.step()
    alone = request.tokens
    others = [expected(directory, prompt, new) for prompt, new in REQUESTS]

    def run(rank):
        model = load(directory, dist.group.WORLD if world > 1 else None)
        engine, channel = Engine(model, slots=3, max_length=3000), Channel(model.ranks)
        return follow(engine, channel) if rank else drive(engine, channel)

    def drive(engine, channel):
        updates, failures, may_compile, matcher = queue.SimpleQueue(), [], threading.Event(), engine.tokenizer.matcher
        engine.tokenizer.matcher = lambda grammar: (may_compile.wait(60), matcher(grammar))[1]
        driver = Driver(engine, channel, updates.put, failures.append)
        cancelled = Sequence(Arguments([1], 5, seed=0, grammar=GRAMMAR))
        wrong = Sequence(Arguments([1], 5, seed=0, grammar=WRONG))
        sequences = [Sequence(Arguments(prompt, new, seed=0)) for prompt, new in REQUESTS]
        for sequence in (cancelled, matching, wrong, *sequences):
            driver.add(sequence)
        driver.start()
        tokens, errors, finished = {}, {}, []
        while len(finished) + len(errors) < len(sequences) + 2:
            for update in updates.get(timeout=60):
                tokens.setdefault(update.sequence, []).extend(update.tokens)
                errors |= {update.sequence: update.error} if update.error else {}
                finished += [update.sequence] if update.finished else []
            if set(finished) == set(sequences) and not errors:
                driver.cancel(cancelled)
                may_compile.set()
        driver.stop()
        driver.join(60)
        assert not failures and cancelled not in finished and list(errors) == [wrong] and errors[wrong].status == 400
        assert finished[-1] is matching and tokens[matching] == alone
        assert [tokens[sequence] for sequence in sequences] == others
        assert driver.load.running == driver.load.waiting == 0

    ranks(run, world)
