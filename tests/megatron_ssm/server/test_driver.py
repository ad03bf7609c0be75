"""The driver and the ranks that follow it. Oracle: `generate` on one rank."""

import queue
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ssm import Engine, load
from megatron_ssm.engine import grammar as grammars
from megatron_ssm.engine.grammar import Grammar
from megatron_ssm.engine.options import GenerationOptions
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.server.channel import Channel, Commands
from megatron_ssm.server.driver import Driver, run_follower
from megatron_ssm.server.sequences import Sequence
from servers import expected
from serving import checkpoint

OPTIONS = dict(
    temperature=0.9, top_k=40, min_p=0.001, repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.3
)
REQUESTS = [([1, 2, 3], 5), ([7] * 40, 12), ([9], 30), ([4, 4], 8)]


@pytest.mark.parametrize("world", (1, 2, pytest.param(4, marks=pytest.mark.full)))
def test_ranks_follow_additions_and_cancellations(ranks, world):
    """Two slots; one request is cancelled while it waits, one while it runs, and one cannot be served."""
    directory = checkpoint("mamba2")
    alone = [expected(directory, prompt, new, seed=0, **OPTIONS) for prompt, new in REQUESTS]

    def run(rank):
        model = load(directory, dist.group.WORLD if world > 1 else None)
        engine, channel = Engine(model, slots=2, max_length=2 * 10**6), Channel(model.ranks)
        return follow_all(engine, channel) if rank else drive(engine, channel)

    def follow_all(engine, channel):
        run_follower(engine, channel)
        return engine.prefilled_tokens, engine.is_busy

    def drive(engine, channel):
        updates, failures = queue.SimpleQueue(), []
        driver = Driver(engine, channel, updates.put, failures.append)
        sequences = [Sequence(prompt, GenerationOptions(new, seed=0, **OPTIONS)) for prompt, new in REQUESTS]
        endless = [Sequence([5, index], GenerationOptions(10**6, seed=0), index) for index in range(3)]
        wrong = Sequence([300], GenerationOptions(1, seed=0))
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


@pytest.mark.parametrize("world", (1, 2, 4))
def test_a_channel_counts_what_it_sends(ranks, world):
    """To each of the other ranks a length of 8 bytes, and the message."""
    messages = [(b"", False), (b"order", False), (b"order", True), (b"", True)]

    def run(rank):
        channel = Channel(Ranks.of(dist.group.WORLD if world > 1 else None))
        if rank:
            return [channel.receive(is_busy) for _, is_busy in messages]
        for message, is_busy in messages:
            channel.send(message, is_busy)
        return channel.sent

    sent, *received = ranks(run, world)
    assert sent == (world - 1) * (4 * 8 + 2 * 5)
    assert all(each == [message for message, _ in messages] for each in received)


GRAMMAR, WRONG = Grammar.unchecked("regex", "[a-c]{3}(-[0-9]+)*"), Grammar.unchecked("lark", 'start: "a')


@pytest.mark.parametrize("world", (1, 2, pytest.param(4, marks=pytest.mark.full)))
def test_others_go_on_while_a_grammar_is_compiled(ranks, world):
    """One compilation takes until other requests have finished; one fails; one request is cancelled meanwhile."""
    pytest.importorskip("llguidance")
    directory = checkpoint("mamba2")
    matching = Sequence([1, 2], GenerationOptions(20, seed=3, temperature=1.0, grammar=GRAMMAR))
    engine = Engine(load(directory), slots=1)
    engine.enqueue(request := engine.make_request(matching.prompt, matching.options), 3)
    while engine.is_busy:
        engine.step()
    alone = request.tokens
    others = [expected(directory, prompt, new) for prompt, new in REQUESTS]

    def run(rank):
        model = load(directory, dist.group.WORLD if world > 1 else None)
        engine, channel = Engine(model, slots=3, max_length=3000), Channel(model.ranks)
        return run_follower(engine, channel) if rank else drive(engine, channel)

    def drive(engine, channel):
        updates, failures, may_compile, matcher = queue.SimpleQueue(), [], threading.Event(), engine.tokenizer.matcher
        engine.tokenizer.matcher = lambda grammar: (may_compile.wait(60), matcher(grammar))[1]
        driver = Driver(engine, channel, updates.put, failures.append)
        cancelled = Sequence([1], GenerationOptions(5, seed=0, grammar=GRAMMAR))
        wrong = Sequence([1], GenerationOptions(5, seed=0, grammar=WRONG))
        sequences = [Sequence(prompt, GenerationOptions(new, seed=0)) for prompt, new in REQUESTS]
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


@pytest.mark.parametrize("world", (1, 2))
def test_only_the_thread_for_grammars_compiles(ranks, world, monkeypatch):
    pytest.importorskip("llguidance")
    directory, threads, parser = checkpoint("mamba2"), set(), grammars.GrammarTokens.parser
    monkeypatch.setattr(
        grammars.GrammarTokens, "parser",
        lambda *arguments: (threads.add(threading.current_thread().name), parser(*arguments))[1],
    )  # fmt: skip

    def run(rank):
        model = load(directory, dist.group.WORLD if world > 1 else None)
        engine, channel = Engine(model, slots=3), Channel(model.ranks)
        if rank:
            run_follower(engine, channel)
        else:
            drive(engine, channel)
        return sorted(threads)

    def drive(engine, channel):
        updates, failures = queue.SimpleQueue(), []
        driver = Driver(engine, channel, updates.put, failures.append)
        driver.start()
        for number in range(20):
            driver.add(
                Sequence([1], GenerationOptions(3, seed=0, grammar=Grammar.unchecked("regex", f"[a-z]{{3}}{number}")))
            )
        finished = 0
        while finished < 20:
            finished += sum(update.finished == "length" for update in updates.get(timeout=60))
        driver.stop()
        driver.join(60)
        assert not failures

    assert ranks(run, world) == [["grammars_0"]] * world


def compiling_slowly(engine):
    """Lets the engine's grammars be compiled only after an event; returns it, and the texts whose turn has come."""
    may_compile, texts, matcher = threading.Event(), queue.SimpleQueue(), engine.tokenizer.matcher

    def wait(grammar):
        texts.put(grammar.text)
        assert may_compile.wait(60)
        return matcher(grammar)

    engine.tokenizer.matcher = wait
    return may_compile, texts


def texts_of(queued):
    return [queued.get_nowait() for _ in range(queued.qsize())]


def test_grammars_of_cancelled_requests_are_not_compiled():
    pytest.importorskip("llguidance")
    engine, updates, failures = Engine(load(checkpoint("mamba2")), slots=2), queue.SimpleQueue(), []
    may_compile, texts = compiling_slowly(engine)
    first, *others, last = [
        Sequence([1], GenerationOptions(3, seed=0, grammar=Grammar.unchecked("regex", f"{c}{{9}}"))) for c in "abcde"
    ]
    plain = Sequence([1], GenerationOptions(1, seed=0))
    driver = Driver(engine, Channel(engine.model.ranks), updates.put, failures.append)
    driver.start()
    for sequence in (first, *others, last):
        driver.add(sequence)
    assert texts.get(timeout=60) == "a{9}"
    for sequence in others:
        driver.cancel(sequence)
    driver.add(plain)
    finished = []
    while last not in finished:
        finished += [update.sequence for update in updates.get(timeout=60) if update.finished]
        if plain in finished:  # so the driver has read what came before it
            may_compile.set()
    driver.stop()
    driver.join(60)
    assert not failures and texts_of(texts) == ["e{9}"]


def test_other_ranks_do_not_compile_them_either():
    """What rank 0 sends is written here."""
    pytest.importorskip("llguidance")
    engine = Engine(load(checkpoint("mamba2")), slots=2)
    may_compile, texts = compiling_slowly(engine)
    one, two, three = [Grammar.unchecked("regex", f"{c}{{9}}") for c in "abc"]

    def orders():
        yield Commands(grammars=(one, two, three, three))
        yield Commands(dropped=(two, three))
        may_compile.set()
        yield Commands(additions=tuple(([1], GenerationOptions(3, seed=0, grammar=each)) for each in (one, three)))
        while engine.is_busy:
            yield Commands()
        yield Commands(is_last=True)

    script = orders()
    run_follower(engine, SimpleNamespace(receive=lambda is_busy: next(script).encode()))
    assert texts_of(texts) == ["a{9}", "c{9}"]


def test_a_reply_that_ends_because_of_nan_is_logged(caplog):
    model, updates = load(checkpoint("mamba2")), queue.SimpleQueue()
    with torch.no_grad():
        model.norm_f.weight[0] = float("nan")
    engine = Engine(model)
    driver = Driver(engine, Channel(model.ranks), updates.put, lambda error: None)
    driver.add(Sequence([1], GenerationOptions(5, seed=0)))
    driver.start()
    (update,) = updates.get(timeout=60)
    driver.stop()
    driver.join(60)
    assert (update.finished, update.tokens, update.error) == ("error", [], None)
    assert "the logits are NaN after 0 new token(s)" in caplog.text
