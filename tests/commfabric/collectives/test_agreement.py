"""Steps that all ranks complete or none; oracles: the results and errors given to each rank, and the expected messages.

`tests/test_collective_calls.py` has the calls that users make.
"""

from functools import partial

import pytest
import torch.distributed as dist

from commfabric.collectives.agreement import MAX_SHOWN, on_first, together
from commfabric.collectives.meeting import gather_in_store
from shared import error_of, references_kept

worlds = pytest.mark.parametrize("world", (2, 3))


def raises(error):
    """A function that raises this error."""

    def function():
        raise error

    return function


def errors(ranks, world, action_of, same=lambda result: None):
    """The (type, message) of each rank's error if rank r calls action_of(r); afterwards the ranks can go on."""

    def run(rank):
        error = error_of(lambda: together(action_of(rank), [dist.group.WORLD], same))
        assert together(lambda: rank, [dist.group.WORLD]) == rank
        return error

    return ranks(run, world)


class Odd(ValueError):
    """An error that cannot be made from its text."""

    def __init__(self, number, reason):
        super().__init__(f"{number}: {reason}")


@worlds
@pytest.mark.parametrize("error, kind, message", (
    (FileNotFoundError(2, "No such file", "x"), FileNotFoundError, "[Errno 2] No such file: 'x'"),
    (ValueError("no \udcff"), ValueError, "no \udcff"),  # as in the name of a file that is not UTF-8
    (KeyError("k"), LookupError, "KeyError: 'k'"),
    (Odd(3, "odd"), ValueError, "Odd: 3: odd"),
    (MemoryError(), MemoryError, ""),
), ids=lambda value: type(value).__name__)  # fmt: skip
def test_an_error_of_one_rank_is_raised_on_all(ranks, world, error, kind, message):
    found = errors(ranks, world, lambda rank: raises(error) if rank == 1 else lambda: 0)
    assert found == [(kind, f"{message} (rank 1)")] * world


@worlds
def test_of_several_errors_the_first_is_raised(ranks, world):
    found = errors(ranks, world, lambda rank: raises(OSError(f"of {rank}")))
    assert found == [(OSError, "of 0 (rank 0)")] * world


@worlds
def test_an_error_of_all_ranks_is_raised_unchanged(ranks, world):
    assert errors(ranks, world, lambda rank: raises(KeyError("k"))) == [(KeyError, "'k'")] * world


@worlds
@pytest.mark.parametrize("value_of, other, first", (
    (lambda odd: (odd, "x"), "(True, 'x')", "(False, 'x')"),
    (lambda odd: {"a": 1, "b": odd, "c": odd}, "b=True", "b=False"),
    (lambda odd: {"a": 1} | ({"b": 2} if odd else {}), "b=2", "b=nothing"),
    (lambda odd: "x" * 1000 + str(odd), "..." + "x" * 80 + "True'", "..." + "x" * 80 + "False'"),
    (lambda odd: ("a" if odd else "b") * 1000, "'" + "a" * (MAX_SHOWN - 1) + "...", "'" + "b" * (MAX_SHOWN - 1) + "..."),
))  # fmt: skip
def test_different_values(ranks, world, value_of, other, first):
    """All ranks raise the same error, which shows what differs."""
    found = errors(ranks, world, lambda rank: lambda: rank == world - 1, value_of)
    message = f"arguments differ across ranks: rank {world - 1} got {other}, rank 0 got {first}"
    assert found == [(ValueError, message)] * world


@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize("what", ("error", "value"))
def test_the_ranks_of_all_groups_learn_of_an_error(ranks, odd, what):
    """Ranks 0 1 and 2 3 are the groups of the first kind, 0 2 and 1 3 those of the second."""

    def run(rank):
        groups = [dist.new_subgroups_by_enumeration(pairs)[0] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
        action = raises(OSError("no")) if what == "error" and rank == odd else lambda: rank == odd
        return error_of(lambda: together(action, [None, *groups], same=lambda result: result))

    found = ranks(run, 4)
    if what == "error":
        assert found == [(OSError, f"no (rank {odd})")] * 4
    assert all(kind is ValueError and "True" in text and "False" in text for kind, text in found) or what == "error"


@worlds
@pytest.mark.parametrize("wrong", ("one", "all"))
def test_errors_do_not_keep_the_group(ranks, world, wrong):
    def run(rank):
        group = dist.group.WORLD

        def action():
            assert group is not None
            if wrong == "all" or rank in (0, 1):
                raise ValueError(f"x{rank}" if wrong == "one" else "x")

        return references_kept(partial(together, action, [group]), partial(on_first, action, group))

    assert ranks(run, world) == [0] * world


def test_without_a_group_the_action_is_all():
    assert together(lambda: 3, [None], raises(ValueError)) == 3 == on_first(lambda: 3, None)
    with pytest.raises(ValueError, match="group 3 is not a process group of this rank"):
        together(lambda: 3, [3])


@worlds
def test_all_ranks_get_the_result_of_the_first(ranks, world):
    def run(rank):
        calls = []
        result = on_first(lambda: calls.append(rank) or {"made by": rank}, dist.group.WORLD)
        assert calls == [0] * (rank == 0)
        return result

    assert ranks(run, world) == [{"made by": 0}] * world


@worlds
@pytest.mark.parametrize("make, kind, message", (
    (raises(OSError("no such file")), OSError, "no such file"),
    (lambda: lambda: 0, AttributeError, "Can't "),  # a result that cannot be pickled
), ids=("error", "result"))  # fmt: skip
def test_an_error_on_the_first_rank_is_raised_on_all(ranks, world, make, kind, message):
    def run(rank):
        error = error_of(partial(on_first, make, dist.group.WORLD))
        dist.barrier()
        return error

    found = ranks(run, world)
    assert found == [found[0]] * world and found[0][0] is kind and found[0][1].startswith(message)


@pytest.mark.parametrize("kind", ("tcp", "file"))
@pytest.mark.parametrize("world", (1, 2, 4))
def test_before_there_is_a_group_ranks_compare_in_a_store(ranks, world, kind, tmp_path):
    def run(rank):
        if kind == "file":
            store = dist.FileStore(str(tmp_path / "store"), world)
        else:
            port = [None]
            if rank == 0:
                store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
                port = [store.port]
            dist.broadcast_object_list(port)
            store = store if rank == 0 else dist.TCPStore("127.0.0.1", port[0], world, is_master=False)
        gather = gather_in_store(store, rank, world)
        assert together(lambda: rank, [gather], same=lambda _: "equal") == rank
        wrong = error_of(lambda: together(raises(OSError("no")) if rank == world - 1 else lambda: 0, [gather]))
        differs = world > 1 and error_of(lambda: together(lambda: rank == 0, [gather], same=str))
        return wrong, differs

    for wrong, differs in ranks(run, world):
        assert wrong == (OSError, "no" if world == 1 else f"no (rank {world - 1})")
        if world > 1:
            assert differs == (ValueError, "arguments differ across ranks: rank 1 got 'False', rank 0 got 'True'")
