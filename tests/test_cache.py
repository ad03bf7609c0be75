"""Caches, snapshots and prefixes. Oracles: sequences that go on alone, in a cache of their own; a list of entries."""

import random

import pytest
import torch

from megatron_ssm import Engine, load
from megatron_ssm.cache import Snapshot
from megatron_ssm.prefix_cache import PrefixCache
from serving import FAMILIES, VOCAB, attempt, checkpoint, families, ids, on_ranks, on_ranks_of_families

HYBRIDS = [family for family in FAMILIES if family.startswith("zamba")]
SEQUENCES, MORE = ids(4, 9), ids(4, 12, seed=4)
LENGTHS = (9, 4, 1, 6)
MASK = (torch.arange(9) >= 9 - torch.tensor(LENGTHS).unsqueeze(1)).long()
worlds = pytest.mark.parametrize("world", (1, 2))


@torch.no_grad()
def filled(model, rows=6, max_length=None):
    """A cache whose first four rows have read their ends of SEQUENCES; the others are free."""
    cache = model.new_cache(rows, max_length)
    model(SEQUENCES, MASK, cache.select(range(4)))
    return cache


@torch.no_grad()
def alone(model, row, *more):
    """Logits of a sequence that goes on by each of `more`, after its own prompt, in a cache of its own."""
    cache = model.new_cache(1)
    model(SEQUENCES[row : row + 1, -LENGTHS[row] :], None, cache)
    return [model(ids.view(1, -1), None, cache)[0] for ids in more]


@torch.no_grad()
def go_on(model, cache, rows, more):
    """Logits of some rows of a cache that go on by `more` (rows, new)."""
    return model(more, None, cache.select(rows))


def same(found, expected):
    """To float64's rounding."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def everything(cache):
    """A copy of all that is stored."""
    return [t.clone() for layer in cache.layers for t in layer.tensors()], cache.lengths.clone()


def addresses(cache):
    return [t.data_ptr() for layer in cache.layers for t in layer.tensors()]


# Rows


@worlds
def test_selected_rows_go_on_alone(ranks, world):
    """In any order, several tokens or one; to the bit, no other row notices."""

    def run(model):
        cache = filled(model)
        for rows in ([1, 2], [3, 0], [2], [0, 1, 3]):
            others = [row for row in range(6) if row not in rows]
            before, lengths = everything(cache)
            for count in (3, 1):
                logits = go_on(model, cache, rows, MORE[rows, :count])
                for i, row in enumerate(rows):
                    same(logits[i], alone(model, row, MORE[row, :3], MORE[row, :1])[count == 1])
            after, lengths_after = everything(cache)
            for t, u in zip(before, after, strict=True):
                capacity = t.shape[1]
                assert t[others].equal(u[others, :capacity])
            assert lengths_after.tolist() == [n + 4 * (row in rows) for row, n in enumerate(lengths.tolist())]
            cache = filled(model)

    on_ranks_of_families(ranks, world, run)


@worlds
def test_a_freed_row_begins_anew(ranks, world):
    """Also beside rows that go on, and where a longer sequence was before."""

    def run(model):
        cache = filled(model)
        cache.reset(0)
        assert cache.lengths.tolist() == [0, *LENGTHS[1:], 0, 0]
        first = go_on(model, cache, [0], SEQUENCES[1:2, -4:])
        same(first[0], model(SEQUENCES[1:2, -4:])[0])
        both = go_on(model, cache, [0, 1], MORE[[1, 1], :2])
        same(both, alone(model, 1, MORE[1, :2])[0].expand_as(both))

    on_ranks_of_families(ranks, world, run)


@worlds
def test_reordered_rows(ranks, world):
    def run(model):
        for rows in ([3, 3, 0, 1, 5, 0], [5, 4, 3, 2, 1, 0], [1] * 6):
            cache = filled(model)
            before = addresses(cache)
            cache.reorder(rows)
            assert addresses(cache) == before
            assert cache.lengths.tolist() == [[*LENGTHS, 0, 0][row] for row in rows]
            live = [i for i, row in enumerate(rows) if row < 4]
            logits = go_on(model, cache, live, MORE[0, :3].expand(len(live), -1))
            for found, i in zip(logits, live, strict=True):
                same(found, alone(model, rows[i], MORE[0, :3])[0])

    on_ranks_of_families(ranks, world, run)


@worlds
def test_a_fork_goes_its_own_way(ranks, world):
    def run(model):
        cache = filled(model)
        cache.fork(0, 4)
        cache.fork(1, 0)  # onto a longer one
        assert cache.lengths.tolist() == [4, 4, 1, 6, 9, 0]
        rows, sources = [0, 1, 2, 3, 4], [1, 1, 2, 3, 0]
        logits = go_on(model, cache, rows, MORE[[0, 1, 2, 3, 3], :2])
        for found, more, source in zip(logits, (0, 1, 2, 3, 3), sources, strict=True):
            same(found, alone(model, source, MORE[more, :2])[0])

    on_ranks_of_families(ranks, world, run)


# Snapshots


@worlds
def test_a_snapshot_is_restored_anywhere_any_number_of_times(ranks, world):
    """Into the row itself, another row and another cache, after all of them have gone on."""

    def run(model):
        cache = filled(model)
        shots = [cache.snapshot(row) for row in range(4)]
        assert [shot.length for shot in shots] == list(LENGTHS)
        go_on(model, cache, range(4), MORE)
        other = filled(model, 5, max_length=30)
        for _ in range(2):
            for target, row in ((cache, 0), (cache, 5), (other, 2)):
                for shot, source in zip(shots, range(4), strict=True):
                    target.restore(row, shot)
                    assert target.lengths[row] == LENGTHS[source]
                    same(go_on(model, target, [row], MORE[:1, :3])[0], alone(model, source, MORE[0, :3])[0])

    on_ranks_of_families(ranks, world, run)


@worlds
def test_snapshots_on_the_way_share_keys_and_values(ranks, world):
    """Each holds its states and only the new keys and values; all are restored as if taken whole."""

    def run(model):
        cache = filled(model)
        first = cache.snapshot(3)
        go_on(model, cache, [3], MORE[3:, :4])
        second = cache.snapshot(3, first)
        go_on(model, cache, [3], MORE[3:, 4:6])  # not one token: Zamba2 would take it for decoding
        third = cache.snapshot(3, second)
        assert [shot.length for shot in (first, second, third)] == [6, 10, 12]
        held = [{id(t) for t in shot.tensors()} for shot in (first, second, third)]
        hybrids = len(model.config.hybrid_layers)
        assert (len(held[0] & held[1]), len(held[1] & held[2])) == (2 * hybrids, 4 * hybrids)
        for shot in (first, second, third):
            for segment in zip(*shot.segments, strict=True):
                assert sum(len(keys) for keys, _ in segment) == shot.length
        go_on(model, cache, [3], MORE[3:, 6:])
        for shot, count in ((third, 6), (first, 0), (second, 4)):
            cache.restore(1, shot)
            same(go_on(model, cache, [1], MORE[3:, count:])[0], alone(model, 3, MORE[3])[0][count:])

    on_ranks_of_families(ranks, world, run)


@worlds
def test_a_snapshot_of_nothing_and_one_into_a_smaller_cache(ranks, world):
    def run(model):
        cache = filled(model)
        empty = cache.snapshot(5)
        assert empty.length == 0
        cache.restore(0, empty)
        same(go_on(model, cache, [0], SEQUENCES[1:2, -4:])[0], model(SEQUENCES[1:2, -4:])[0])
        small = model.new_cache(1, 5)
        before = everything(small)
        error = attempt(small.restore, 0, filled(model).snapshot(0))
        if model.config.hybrid_layers:
            assert error == ("ValueError", "a sequence of 9 tokens does not fit into a cache of max_length=5")
            assert all(t.equal(u) for t, u in zip(before[0], everything(small)[0], strict=True))
            assert small.lengths.tolist() == [0]
        else:
            assert error is None

    on_ranks_of_families(ranks, world, run)


# Room


@worlds
def test_a_cache_of_a_given_length_never_moves(ranks, world):
    """Through prefill, pieces, decoding to the last place, and everything that is done to rows."""

    def run(model):
        cache = model.new_cache(4, 21)
        before, nbytes = addresses(cache), cache.nbytes
        with torch.no_grad():
            model(SEQUENCES, MASK, cache)
            model(MORE[:, :4], None, cache)
            for i in range(4, 12):
                model(MORE[:, i : i + 1], None, cache)
        shot = cache.snapshot(0)
        assert shot.length == 21
        cache.reserve(21)
        cache.reorder([1, 0, 3, 3])
        cache.fork(0, 2)
        cache.reset(1)
        cache.restore(1, shot)
        assert addresses(cache) == before and cache.nbytes == nbytes

    on_ranks_of_families(ranks, world, run)


@worlds
def test_beyond_its_length_nothing_is_sent_and_nothing_changes(ranks, world):
    def run(model):
        cache = filled(model, 4, max_length=10)
        contents, calls = everything(cache), sum(model.counter.calls.values())
        error = attempt(model, MORE[:, :2], None, cache)
        assert error == ("ValueError", "a sequence of 11 tokens does not fit into a cache of max_length=10")
        assert attempt(model, MORE[1:2, :7], None, cache.select([1])) == (error[0], error[1])
        assert attempt(model, ids(4, 11), None, model.new_cache(4, 10)) == error
        assert attempt(model, ids(4, 11), None, model.new_cache(4, 0))[0] == "ValueError"
        assert sum(model.counter.calls.values()) == calls
        assert all(t.equal(u) for t, u in zip(contents[0], everything(cache)[0], strict=True))
        with torch.no_grad():
            same(model(MORE[:, :1], None, cache)[0], alone(model, 0, MORE[0, :1])[0])
        padded = torch.cat([torch.zeros(4, 3, dtype=torch.int64), SEQUENCES], dim=1)
        mask = torch.cat([torch.zeros(4, 3, dtype=torch.int64), MASK], dim=1)
        assert attempt(model, padded, mask, model.new_cache(4, 9)) is None  # padding takes no room

    on_ranks_of_families(ranks, world, run, HYBRIDS)


@families
def test_room_that_is_made_keeps_what_is_there(family):
    model = load(checkpoint(family), dtype=torch.float64)
    cache = filled(model)
    hybrid = bool(model.config.hybrid_layers)
    assert cache.capacity == (9 if hybrid else None)
    cache.reserve(4)
    assert cache.capacity == (9 if hybrid else None)
    nbytes = cache.nbytes
    cache.reserve(15)
    assert cache.capacity == (15 if hybrid else None) and (cache.nbytes > nbytes) == hybrid
    logits = go_on(model, cache, range(4), MORE)  # 21 tokens: more room is made
    for row in range(4):
        same(logits[row], alone(model, row, MORE[row])[0])


# Prefixes


def entry(length, sizes=(3, 5), after=None):
    """A snapshot that holds tensors of these many bytes for itself, and logits of as many as `length`."""
    new = [[torch.zeros(sizes[1], dtype=torch.int8), torch.zeros(0, dtype=torch.int8)]]
    segments = (*(after.segments if after else ()), new)
    return Snapshot(length, [[torch.zeros(sizes[0], dtype=torch.int8)]], segments), torch.zeros(7, dtype=torch.int8)


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
            found.append((request.reused, len(engine.prefixes), engine.prefixes.nbytes))
        assert engine.prefixes.nbytes == distinct_bytes(engine.prefixes._entries.values())
        return found

    found = on_ranks(ranks, world, checkpoint("zamba2"), run)
    assert max(nbytes for *_, nbytes in found) <= 150_000
    assert len({entries for _, entries, _ in found}) > 2 and any(reused for reused, *_ in found)
