"""Comparing what ranks were called with; oracles: the arguments and errors given to each rank, and the expected messages."""

from functools import partial

import pytest
import torch.distributed as dist

from shared import error_of
from sparsefusion.collectives.agreement import SHOWN, agree, from_first
from sparsefusion.collectives.counted import all_gather_small

worlds = pytest.mark.parametrize("world", (2, 3))


def compare(asked, whose="ranks"):
    """agree among all ranks."""
    return agree(lambda mine: all_gather_small(mine, dist.group.WORLD), "cpu", asked, whose)


def raises(error):
    """A function that raises an error."""

    def function():
        raise error

    return function


def errors(ranks, world, asked_of):
    """The (kind, message) of each rank's error, when rank r is called with asked_of(r); afterwards the ranks can go on."""

    def run(rank):
        error = error_of(lambda: compare(asked_of(rank)))
        assert compare(lambda: "the same") < 2**48
        return error

    return ranks(run, world)


@worlds
def test_equal_arguments_give_a_common_random_number(ranks, world):
    numbers = ranks(lambda rank: [compare(lambda: (1, "a", None)) for _ in range(3)], world)
    assert numbers == [numbers[0]] * world and len({*numbers[0]}) == 3 and all(0 <= n < 2**48 for n in numbers[0])


@worlds
def test_different_arguments(ranks, world):
    """All ranks raise the same error, which names the ranks that differ from rank 0, and what differs."""
    found = errors(ranks, world, lambda rank: lambda: (rank == world - 1, "x"))
    message = f"ranks [{world - 1}] were asked something else than rank 0: (True, 'x') instead of (False, 'x')"
    assert found == [(ValueError, message)] * world


@worlds
def test_a_difference_that_is_not_shown(ranks, world):
    found = errors(ranks, world, lambda rank: lambda: "x" * SHOWN + str(rank))
    others = [*range(1, world)]
    message = f"ranks {others} were asked something else than rank 0; the difference is beyond the first {SHOWN} bytes"
    assert found == [(ValueError, message)] * world


@worlds
@pytest.mark.parametrize("bad", (0, 1))
def test_an_error_of_one_rank_is_raised_on_all(ranks, world, bad):
    found = errors(ranks, world, lambda rank: raises(OSError("no such file")) if rank == bad else lambda: "fine")
    assert found == [(ValueError, f"no such file (rank {bad})")] * world


@worlds
def test_an_error_of_all_ranks_is_raised_as_it_is(ranks, world):
    assert errors(ranks, world, lambda rank: raises(KeyError("k"))) == [(KeyError, "'k'")] * world
    found = errors(ranks, world, lambda rank: lambda: len(3))
    assert all(kind is ValueError and message.startswith("an argument is of the wrong type") for kind, message in found)


@worlds
def test_text_that_has_no_utf_8(ranks, world):
    """Python names a file whose name is not UTF-8 with surrogates. The other ranks must not wait for ever."""
    found = errors(ranks, world, lambda rank: raises(ValueError("no \udcff")) if rank == 1 else lambda: "fine")
    assert found == [(ValueError, "no \\udcff (rank 1)")] * world


@worlds
def test_the_first_ranks_result(ranks, world):
    """Only rank 0 of the group calls the function; without a group the rank calls it itself."""

    def run(rank):
        calls = []
        result = from_first(lambda: calls.append(rank) or {"made by": rank}, dist.group.WORLD, "cpu")
        assert calls == [0] * (rank == 0) and from_first(lambda: rank, None, None) == rank
        return result

    assert ranks(run, world) == [{"made by": 0}] * world


@worlds
@pytest.mark.parametrize("make, message", (
    (raises(OSError("no such file")), "OSError: no such file"),
    (lambda: lambda: 0, "AttributeError: Can't "),  # a result that cannot be pickled
), ids=("error", "result"))  # fmt: skip
def test_what_fails_on_the_first_rank_fails_on_all(ranks, world, make, message):
    def run(rank):
        error = error_of(partial(from_first, make, dist.group.WORLD, "cpu"))
        dist.barrier()
        return error

    found = ranks(run, world)
    kind, text = found[0]
    assert found == [found[0]] * world and kind is RuntimeError and text.startswith(f"rank 0 of {world}: {message}")
