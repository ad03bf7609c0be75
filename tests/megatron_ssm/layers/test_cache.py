"""Caches and snapshots. Oracle: each sequence continued alone, in a cache of its own."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ssm import load
from megatron_ssm.layers import cache as cache_module
from serving import FAMILIES, attempt, checkpoint, families, families_of_worlds, ids, on_ranks_of_families

HYBRIDS = [family for family in FAMILIES if family.startswith("zamba")]
SEQUENCES, MORE = ids(4, 9), ids(4, 12, seed=4)
LENGTHS = (9, 4, 1, 6)
MASK = (torch.arange(9) >= 9 - torch.tensor(LENGTHS).unsqueeze(1)).long()
worlds = pytest.mark.parametrize("world", (1, 2))


@torch.no_grad()
def filled_cache(model, rows=6, max_length=None):
    """A cache whose first four rows hold the unmasked ends of SEQUENCES; the other rows are free."""
    cache = model.new_cache(rows, max_length)
    model(SEQUENCES, MASK, cache.select(range(4)))
    return cache


@torch.no_grad()
def alone(model, row, *more):
    """The logits of each chunk of `more` after the prompt of `row`, in a cache of its own."""
    cache = model.new_cache(1)
    model(SEQUENCES[row : row + 1, -LENGTHS[row] :], None, cache)
    return [model(ids.view(1, -1), None, cache)[0] for ids in more]


@torch.no_grad()
def extend(model, cache, rows, more):
    """The logits of `more` (rows, new), which continues the given rows of a cache."""
    return model(more, None, cache.select(rows))


def assert_near(found, expected):
    """Assert equality up to the rounding of float64."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def contents_of(cache):
    """Copies of all tensors of a cache, and of its lengths."""
    return [t.clone() for t in cache.tensors()], cache.lengths.clone()


def addresses(cache):
    return [t.data_ptr() for t in cache.tensors()]


# Rows


@families_of_worlds
def test_selected_rows_continue_alone(ranks, world, chosen):
    """In any order, with several tokens or one; the other rows stay bitwise the same."""

    def run(model):
        cache = filled_cache(model)
        for rows in ([1, 2], [3, 0], [2], [0, 1, 3]):
            others = [row for row in range(6) if row not in rows]
            before, lengths = contents_of(cache)
            for count in (3, 1):
                logits = extend(model, cache, rows, MORE[rows, :count])
                for i, row in enumerate(rows):
                    assert_near(logits[i], alone(model, row, MORE[row, :3], MORE[row, :1])[count == 1])
            after, lengths_after = contents_of(cache)
            for t, u in zip(before, after, strict=True):
                capacity = t.shape[1]
                assert t[others].equal(u[others, :capacity])
            assert lengths_after.tolist() == [n + 4 * (row in rows) for row, n in enumerate(lengths.tolist())]
            cache = filled_cache(model)

    on_ranks_of_families(ranks, world, run, chosen)


@families_of_worlds
def test_a_freed_row_begins_anew(ranks, world, chosen):
    """Also beside rows that continue, and in a row that held a longer sequence before."""

    def run(model):
        cache = filled_cache(model)
        cache.reset(0)
        assert cache.lengths.tolist() == [0, *LENGTHS[1:], 0, 0]
        first = extend(model, cache, [0], SEQUENCES[1:2, -4:])
        assert_near(first[0], model(SEQUENCES[1:2, -4:])[0])
        both = extend(model, cache, [0, 1], MORE[[1, 1], :2])
        assert_near(both, alone(model, 1, MORE[1, :2])[0].expand_as(both))

    on_ranks_of_families(ranks, world, run, chosen)


@families_of_worlds
def test_reordered_rows(ranks, world, chosen):
    def run(model):
        for rows in ([3, 3, 0, 1, 5, 0], [5, 4, 3, 2, 1, 0], [1] * 6):
            cache = filled_cache(model)
            before = addresses(cache)
            cache.reorder(rows)
            assert addresses(cache) == before
            assert cache.lengths.tolist() == [[*LENGTHS, 0, 0][row] for row in rows]
            live = [i for i, row in enumerate(rows) if row < 4]
            logits = extend(model, cache, live, MORE[0, :3].expand(len(live), -1))
            for found, i in zip(logits, live, strict=True):
                assert_near(found, alone(model, rows[i], MORE[0, :3])[0])

    on_ranks_of_families(ranks, world, run, chosen)


@families_of_worlds
def test_a_fork_continues_independently(ranks, world, chosen):
    def run(model):
        cache = filled_cache(model)
        cache.fork(0, 4)
        cache.fork(1, 0)  # onto a longer row
        assert cache.lengths.tolist() == [4, 4, 1, 6, 9, 0]
        rows, sources = [0, 1, 2, 3, 4], [1, 1, 2, 3, 0]
        logits = extend(model, cache, rows, MORE[[0, 1, 2, 3, 3], :2])
        for found, more, source in zip(logits, (0, 1, 2, 3, 3), sources, strict=True):
            assert_near(found, alone(model, source, MORE[more, :2])[0])

    on_ranks_of_families(ranks, world, run, chosen)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(result) if torch.is_tensor(t))])
        return result


@worlds
def test_a_fork_copies_one_row_only(ranks, world):
    """The copy is bitwise equal, keys and values included, on a longer row and on a free one; others do not change."""

    def run(model):
        cache = filled_cache(model)
        before, lengths = contents_of(cache)
        with LargestTensor() as largest:
            for source, target in ((2, 0), (3, 5)):
                cache.fork(source, target)
        assert largest.elements == max(t[0].numel() for t in cache.tensors())
        after, lengths_after = contents_of(cache)
        for t, u in zip(before, after, strict=True):
            assert t[[1, 2, 3, 4]].equal(u[[1, 2, 3, 4]])
        assert lengths_after.tolist() == [lengths[2], *lengths[1:5], lengths[3]]
        for state in cache.states.values():
            for source, target in ((2, 0), (3, 5)):
                held = (*state.fixed.values(), *(t[:, : lengths[source]] for t in state.per_token.values()))
                assert all(t[target].equal(t[source]) for t in held)

    on_ranks_of_families(ranks, world, run, HYBRIDS)


@pytest.mark.parametrize("family", ("mamba2", "zamba2"))
def test_padding_is_not_counted_in_sixteen_bits(family):
    """bfloat16 cannot represent 1001: summed in the model's dtype, the mask would give 1000."""
    model = load(checkpoint(family), dtype=torch.bfloat16)
    cache, mask = model.new_cache(2), torch.ones(2, 1003, dtype=torch.int64)
    mask[0, :2] = 0
    with torch.no_grad():
        model.local_logits(ids(2, 1003), mask, cache, logits_to_keep=1)
    assert cache.lengths.tolist() == [1001, 1003]


# Snapshots


@families_of_worlds
def test_a_snapshot_is_restored_anywhere_any_number_of_times(ranks, world, chosen):
    """Into the same row, another row and another cache, after all of them have continued."""

    def run(model):
        cache = filled_cache(model)
        snapshots = [cache.snapshot(row) for row in range(4)]
        assert [snapshot.length for snapshot in snapshots] == list(LENGTHS)
        extend(model, cache, range(4), MORE)
        other = filled_cache(model, 5, max_length=30)
        expected = [alone(model, row, MORE[0, :3])[0] for row in range(4)]
        for _ in range(2):
            for target, row in ((cache, 0), (cache, 5), (other, 2)):
                for snapshot, source in zip(snapshots, range(4), strict=True):
                    target.restore(row, snapshot)
                    assert target.lengths[row] == LENGTHS[source]
                    assert_near(extend(model, target, [row], MORE[:1, :3])[0], expected[source])

    on_ranks_of_families(ranks, world, run, chosen)


@families_of_worlds
def test_later_snapshots_share_keys_and_values_with_earlier_ones(ranks, world, chosen):
    """Each holds all its states but only the new keys and values, and is restored like a complete snapshot."""

    def run(model):
        cache = filled_cache(model)
        first = cache.snapshot(3)
        extend(model, cache, [3], MORE[3:, :4])
        second = cache.snapshot(3, first)
        extend(model, cache, [3], MORE[3:, 4:6])  # not one token: Zamba2 would take it for decoding
        third = cache.snapshot(3, second)
        assert [snapshot.length for snapshot in (first, second, third)] == [6, 10, 12]
        held = [{id(t) for t in snapshot.tensors()} for snapshot in (first, second, third)]
        hybrids = len(model.config.attentions)
        assert (len(held[0] & held[1]), len(held[1] & held[2])) == (2 * hybrids, 4 * hybrids)
        for snapshot in (first, second, third):
            for parts in zip(*snapshot.segments, strict=True):
                assert sum(map(len, parts)) == snapshot.length
        extend(model, cache, [3], MORE[3:, 6:])
        for snapshot, count in ((third, 6), (first, 0), (second, 4)):
            cache.restore(1, snapshot)
            assert_near(extend(model, cache, [1], MORE[3:, count:])[0], alone(model, 3, MORE[3])[0][count:])

    on_ranks_of_families(ranks, world, run, chosen)


@families_of_worlds
def test_a_snapshot_of_an_empty_row_and_one_into_a_smaller_cache(ranks, world, chosen):
    def run(model):
        cache = filled_cache(model)
        empty = cache.snapshot(5)
        assert empty.length == 0
        cache.restore(0, empty)
        assert_near(extend(model, cache, [0], SEQUENCES[1:2, -4:])[0], model(SEQUENCES[1:2, -4:])[0])
        small = model.new_cache(1, 5)
        before = contents_of(small)
        error = attempt(small.restore, 0, filled_cache(model).snapshot(0))
        if model.config.attentions:
            assert error == ("ValueError", "a sequence of 9 tokens does not fit into a cache of max_length=5")
            assert all(t.equal(u) for t, u in zip(before[0], contents_of(small)[0], strict=True))
            assert small.lengths.tolist() == [0]
        else:
            assert error is None

    on_ranks_of_families(ranks, world, run, chosen)


# Capacity


@families_of_worlds
def test_a_cache_of_a_given_length_never_moves(ranks, world, chosen):
    """During prefill, chunks, decoding to the last position, and all operations on rows."""

    def run(model):
        cache = model.new_cache(4, 21)
        before, tensors = addresses(cache), cache.tensors()
        changes = [
            lambda: model(SEQUENCES, MASK, cache),
            lambda: extend(model, cache, [0, 1], MORE[:2, :4]),  # a slice of rows
            lambda: extend(model, cache, [3, 2], MORE[2:, :4]),
            *(lambda i=i: model(MORE[:, i : i + 1], None, cache) for i in range(4, 10)),
            *(lambda rows=rows: extend(model, cache, rows, MORE[rows, 10:11]) for rows in ([0, 1], [2, 0])),
            lambda: cache.reserve(21),
            lambda: cache.reorder([1, 0, 3, 3]),
            lambda: cache.fork(0, 2),
            lambda: cache.restore(3, cache.snapshot(1)),
            lambda: cache.reset(1),
            lambda: extend(model, cache, [1], SEQUENCES[:1]),
        ]
        for change in changes:
            with torch.no_grad():
                change()
            assert addresses(cache) == before
            assert all(t is u for t, u in zip(tensors, cache.tensors(), strict=True))

    on_ranks_of_families(ranks, world, run, chosen)


@worlds
def test_beyond_max_length_nothing_is_sent_or_changed(ranks, world):
    def run(model):
        cache = filled_cache(model, 4, max_length=10)
        contents, calls = contents_of(cache), sum(model.counter.calls.values())
        error = attempt(model, MORE[:, :2], None, cache)
        assert error == ("ValueError", "a sequence of 11 tokens does not fit into a cache of max_length=10")
        assert attempt(model, MORE[1:2, :7], None, cache.select([1])) == (error[0], error[1])
        assert attempt(model, ids(4, 11), None, model.new_cache(4, 10)) == error
        assert attempt(model, ids(4, 11), None, model.new_cache(4, 0))[0] == "ValueError"
        assert sum(model.counter.calls.values()) == calls
        assert all(t.equal(u) for t, u in zip(contents[0], contents_of(cache)[0], strict=True))
        with torch.no_grad():
            assert_near(model(MORE[:, :1], None, cache)[0], alone(model, 0, MORE[0, :1])[0])
        padded = torch.cat([torch.zeros(4, 3, dtype=torch.int64), SEQUENCES], dim=1)
        mask = torch.cat([torch.zeros(4, 3, dtype=torch.int64), MASK], dim=1)
        assert attempt(model, padded, mask, model.new_cache(4, 9)) is None  # padding takes no capacity

    on_ranks_of_families(ranks, world, run, HYBRIDS)


@families
def test_reserving_capacity_keeps_the_contents(family):
    model = load(checkpoint(family), dtype=torch.float64)
    cache = filled_cache(model)
    hybrid = bool(model.config.attentions)
    assert cache.capacity == (9 if hybrid else None)
    cache.reserve(4)
    assert cache.capacity == (9 if hybrid else None)
    nbytes = cache.nbytes
    cache.reserve(15)
    assert cache.capacity == (15 if hybrid else None) and (cache.nbytes > nbytes) == hybrid
    logits = extend(model, cache, range(4), MORE)  # 21 tokens: the capacity grows
    for row in range(4):
        assert_near(logits[row], alone(model, row, MORE[row])[0])


def test_a_failed_allocation_changes_nothing(monkeypatch):
    """Whichever layer's allocation fails, all layers keep their capacity."""
    model = load(checkpoint("zamba2"), dtype=torch.float64)
    assert len(model.config.attentions) == 2
    for last in range(4):
        cache, left = filled_cache(model), iter(range(last))

        def longer(tensor, length, left=left, whole=cache_module._longer):
            if next(left, None) is None:
                raise RuntimeError("no memory")
            return whole(tensor, length)

        with monkeypatch.context() as patch:
            patch.setattr(cache_module, "_longer", longer)
            assert attempt(cache.reserve, 30) == ("RuntimeError", "no memory")
        assert {t.shape[1] for state in cache.states.values() for t in state.per_token.values()} == {9}
        assert_near(extend(model, cache, [3], MORE[3:])[0], alone(model, 3, MORE[3])[0])


@pytest.mark.parametrize("dtype", (torch.uint8, torch.bool, torch.float32))
def test_masks_of_every_dtype(dtype):
    """A row that is continued, and one that begins with padding, in one call."""
    model = load(checkpoint("mamba2"), dtype=torch.float64)
    cache, prompts = filled_cache(model), MORE[:2, :6]
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, :2] = 0
    with torch.no_grad():
        expected = model(prompts, mask, filled_cache(model).select([0, 4]))
        torch.testing.assert_close(model(prompts, mask.to(dtype), cache.select([0, 4])), expected, rtol=0, atol=0)
