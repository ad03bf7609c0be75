"""The prefix cache. Oracles: a list of entries in the order of their use; the logits of a cold run in an engine."""

import random
import weakref

import pytest
import torch
import torch.distributed as dist

from megatron_ssm import Engine, load
from megatron_ssm.engine.prefix_cache import PrefixCache
from megatron_ssm.layers.cache import Snapshot
from serving import VOCAB, checkpoint, families, families_of_worlds, ids, on_ranks, on_ranks_of_families

worlds = pytest.mark.parametrize("world", (1, 2))


# Entries


def entry(length, sizes=(3, 5), after=None):
    """A snapshot that holds tensors of these many bytes for itself, and logits of as many as `length`."""
    new = [torch.zeros(sizes[1], dtype=torch.int8), torch.zeros(0, dtype=torch.int8)]
    segments = (*(after.segments if after else ()), new)
    return Snapshot(length, [torch.zeros(sizes[0], dtype=torch.int8)], segments), torch.zeros(7, dtype=torch.int8)


def distinct_bytes(entries):
    tensors = {id(t): t for snapshot, logits in entries for t in [*snapshot.tensors(), logits]}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def test_shared_keys_and_values_count_once():
    """3 bytes of states, 5 of keys, 7 of logits each; the second holds the first's keys as well."""
    prefixes = PrefixCache(100)
    first = entry(2)
    second = entry(4, after=first[0])
    assert prefixes.add((1, 2), *first) and prefixes.nbytes == 15
    assert prefixes.add((1, 2, 3, 4), *second) and prefixes.nbytes == 30
    assert len(prefixes) == 2 and prefixes.get((1, 2)) is first[0] and prefixes.get((1,)) is None


def test_the_longest_prefix_is_found():
    prefixes = PrefixCache(1000)
    for prefix in ((1,), (1, 2, 3), (1, 2, 4, 5), (9, 9)):
        assert prefixes.add(prefix, *entry(len(prefix)))
    lengths = {(1, 2, 3): 3, (1, 2, 3, 4): 3, (1, 2, 4): 1, (1, 2, 4, 5, 6): 4, (9,): None, (9, 9, 1): 2, (2, 1): None}
    for tokens, length in lengths.items():
        found = prefixes.longest(tokens)
        assert (None if found is None else found[0].length) == length


def test_the_least_recently_used_goes_first():
    prefixes = PrefixCache(45)
    for token in (1, 2, 3):
        prefixes.add((token,), *entry(1))
    assert prefixes.longest((1, 5)) is not None
    prefixes.add((4,), *entry(1))
    assert [t for t in (1, 2, 3, 4) if prefixes.get((t,))] == [1, 3, 4] and prefixes.nbytes == 45


def test_what_is_larger_than_all_room_is_not_kept_and_displaces_nothing():
    prefixes = PrefixCache(15)
    assert prefixes.add((1,), *entry(1)) and not prefixes.add((2,), *entry(1, sizes=(3, 6)))
    assert (len(prefixes), prefixes.nbytes) == (1, 15)
    assert not PrefixCache(0).add((1,), *entry(1))


@pytest.mark.parametrize("seed", range(20))
def test_random_prefixes_against_a_list(seed):
    """Entries in the order of their use; the oldest go while their distinct tensors are too many bytes."""
    draw = random.Random(seed)
    bound, entries = draw.choice((40, 120, 400)), []
    prefixes = PrefixCache(bound)
    for _ in range(200):
        tokens = tuple(draw.randrange(2) for _ in range(draw.randint(1, 7)))
        if draw.random() < 0.5:
            known = [item for item in entries if tokens[: len(item[0])] == item[0]]
            best = max(known, key=lambda item: len(item[0]), default=None)
            found = prefixes.longest(tokens)
            assert (found is None) == (best is None)
            if best:
                assert found[0] is best[1][0] and found[1] is best[1][1]
                entries.remove(best)
                entries.append(best)
        elif prefixes.get(tokens) is None:
            before = [item[1][0] for item in entries if tokens[: len(item[0])] == item[0]]
            after = draw.choice([None, *before])
            made = entry(len(tokens), (draw.randint(1, 30), draw.randint(0, 30)), after)
            kept = prefixes.add(tokens, *made)
            assert kept == (distinct_bytes([made]) <= bound)
            entries += [(tokens, made)] if kept else []
            while distinct_bytes([made for _, made in entries]) > bound:
                entries.pop(0)
        assert len(prefixes) == len(entries) and prefixes.nbytes == distinct_bytes([made for _, made in entries])
        assert all(prefixes.get(tokens) is made[0] for tokens, made in entries)


@worlds
def test_all_ranks_keep_the_same_prefixes(ranks, world):
    """The bound is on each rank's own part, and the parts are as large."""

    def run(model):
        engine, draw, found = Engine(model, prefix_bytes=150_000, block=3), random.Random(1), []
        stem = [draw.randrange(VOCAB) for _ in range(12)]
        for _ in range(25):
            request = engine.add(stem[: draw.randint(1, 12)] + [draw.randrange(3)], max_new_tokens=1)
            list(engine.stream(request))
            found.append((request.reused, len(engine.prefix_cache), engine.prefix_cache.nbytes))
        assert engine.prefix_cache.nbytes == distinct_bytes(engine.prefix_cache._entries.values())
        return found

    found = on_ranks(ranks, world, checkpoint("zamba2"), run)
    assert max(nbytes for *_, nbytes in found) <= 150_000
    assert len({entries for _, entries, _ in found}) > 2 and any(reused for reused, *_ in found)


# In an engine


class Recording(Engine):
    """An engine that keeps the logits from which each request's tokens are chosen, as {id: [(width,), ...]}."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.logits = {}

    def _choose_tokens(self, slots):
        for slot in slots:
            self.logits.setdefault(slot.request.id, []).append(slot.logits.clone())
        super()._choose_tokens(slots)


def serve(engine, prompt, **options):
    """One request from its arrival to its end: (request, its logits, the tokens of prompts read for it)."""
    before, request = engine.prefilled_tokens, engine.add(prompt, **options)
    assert list(engine.stream(request)) == request.tokens
    return request, torch.stack(engine.logits.pop(request.id)), engine.prefilled_tokens - before


PROMPT = ids(23).tolist()
BLOCK = 4
# name: prompts that were read before, the prompt, how much of it they spare
HITS = {
    "none": ([PROMPT[1:]], PROMPT[:9], 0),
    "shorter than a block": ([PROMPT], PROMPT[:3], 0),
    "at the end of a block": ([PROMPT[:8]], PROMPT[:15], 8),
    "at the end of a prompt": ([PROMPT[:10]], PROMPT[:15], 10),
    "one token left": ([PROMPT[:10]], PROMPT[:11], 10),
    "one token left after a block": ([PROMPT], PROMPT[:9], 8),
    "nothing left": ([PROMPT[:10]], PROMPT[:10], 10),
    "nothing left after a block": ([PROMPT], PROMPT[:12], 12),
    "the longest of several": ([PROMPT[:5], PROMPT[:11], PROMPT[:7], PROMPT[:6] + [0] * 9], PROMPT, 11),
    "another continuation": ([PROMPT[:8] + [0] * 9, PROMPT[:9] + [1] * 9], PROMPT[:14], 8),
    "one block after another": ([PROMPT[:8], PROMPT[:14]], PROMPT[:22], 14),
}


def hits(model, names=HITS):
    """{name: (reused, tokens read, the largest difference from the logits of a cold run)}."""
    cold, results = Recording(model, slots=1), {}
    for name in names:
        earlier, prompt, _ = HITS[name]
        engine = Recording(model, slots=2, prefix_bytes=10**7, block=BLOCK)
        for one in earlier:
            serve(engine, one, max_new_tokens=1)
        expected, expected_logits, _ = serve(cold, prompt, max_new_tokens=3)
        request, logits, read = serve(engine, prompt, max_new_tokens=3)
        assert request.tokens == expected.tokens, name
        results[name] = request.reused, read, difference(model, logits, expected_logits)
    return results


def difference(model, logits, expected):
    """The largest one among the ids that exist."""
    existing = slice(model.embeddings.stop - model.embeddings.start)
    return float((logits - expected)[..., existing].abs().max())


@families_of_worlds
def test_what_was_read_before_is_not_read_again(ranks, world, chosen):
    """And the logits are those of a cold run."""
    for results in on_ranks_of_families(ranks, world, hits, chosen):
        for family, found in results.items():
            for name, (reused, read, largest) in found.items():
                _, prompt, spared = HITS[name]
                assert (reused, read) == (spared, len(prompt) - spared), (family, name)
                assert largest < 1e-10, (family, name)


@worlds
@families
def test_logits_after_a_prefix_in_single_precision(ranks, world, family):
    """Of Zamba2 they are as near as the family's are to transformers'."""
    directory, names = checkpoint(family), ["at the end of a block", "one token left", "nothing left"]
    for found in ranks(lambda rank: hits(load(directory, dist.group.WORLD), names), world):
        assert max(largest for _, _, largest in found.values()) < (3e-4 if family == "zamba2" else 2e-5)


@families_of_worlds
def test_a_prompt_in_pieces_is_read_as_by_one_call_of_the_model(ranks, world, chosen):
    def run(model):
        whole = model.local_logits(torch.tensor([PROMPT]), logits_to_keep=1)[0]
        for settings in (dict(), dict(chunk=1), dict(chunk=5, prefix_bytes=10**7, block=BLOCK)):
            _, logits, read = serve(Recording(model, slots=1, **settings), PROMPT, max_new_tokens=1)
            assert read == len(PROMPT)
            assert difference(model, logits, whole) < 1e-10

    on_ranks_of_families(ranks, world, run, chosen)


@worlds
def test_equal_prompts_that_arrive_together(ranks, world):
    """Each reads its own, the snapshot is kept once; those that come later read nothing."""

    def run(model):
        engine = Recording(model, slots=3, prefix_bytes=10**7, block=BLOCK)
        together = [engine.add(PROMPT, max_new_tokens=3) for _ in range(3)]
        while engine.is_busy:
            engine.step()
        later, _, read = serve(engine, PROMPT, max_new_tokens=3)
        assert {len(PROMPT)} == {engine.prefilled_tokens // 3} and read == 0
        return [request.tokens for request in (*together, later)], len(engine.prefix_cache)

    tokens, entries = on_ranks(ranks, world, checkpoint("zamba2"), run)
    assert all(row == tokens[0] for row in tokens)
    assert entries == len(PROMPT) // BLOCK + 1


def test_a_running_request_does_not_keep_a_snapshot_that_was_dropped():
    """Once its prompt is read, only the prefix cache holds the snapshot, and `prefix_bytes` bounds the memory."""
    engine = Engine(load(checkpoint("zamba2")), slots=2, prefix_bytes=10**7, block=100)
    first = engine.add(PROMPT, max_new_tokens=9)
    engine.step()
    snapshot = weakref.ref(engine.prefix_cache.get(PROMPT, first.cache_key))
    engine.prefix_cache.max_bytes = engine.prefix_cache.nbytes
    engine.add(PROMPT[::-1], max_new_tokens=9)
    engine.step()
    assert len(engine.prefix_cache) == 1 and engine.prefix_cache.get(PROMPT, first.cache_key) is None
    assert first.finished is None and snapshot() is None


# Keys


def test_prefixes_are_shared_only_between_requests_with_the_same_key():
    """Also where one key and its prefix together are as long as another."""
    prefixes = PrefixCache(1000)
    prefixes.add((1, 2), *entry(2), key="a")
    assert prefixes.longest((1, 2, 3), "a") is not None and prefixes.get((1, 2), "a") is not None
    for key in ("", "b", "a\x01"):
        assert prefixes.longest((1, 2, 3), key) is None and prefixes.get((1, 2), key) is None


@worlds
def test_requests_with_different_keys_share_no_prefix(ranks, world):
    def run(model):
        engine, found = Engine(model, prefix_bytes=10**7, block=4), []
        for key in ("", "alice", "bob", "alice", ""):
            request = engine.add(range(9), 3, prefix_key=key)
            found.append((list(engine.stream(request)), request.reused))
        return found

    found = on_ranks(ranks, world, checkpoint("zamba2"), run)
    assert [reused for _, reused in found] == [0, 0, 0, 9, 9] and len({str(tokens) for tokens, _ in found}) == 1
