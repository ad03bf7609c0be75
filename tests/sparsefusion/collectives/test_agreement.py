"""The ranks compare their arguments; oracles: the arguments and errors given to each rank, and the expected messages."""

from functools import partial

import pytest
import torch.distributed as dist

from shared import error_of, references_kept
from sparsefusion.collectives.agreement import EQUAL, MOST, SHOWN, agree, agree_in_groups, from_first, gather_in_store
from sparsefusion.collectives.counted import all_gather_small

worlds = pytest.mark.parametrize("world", (2, 3))


def compare(get_arguments, whose="ranks"):
    """Call `agree` on all ranks; get_arguments() returns what this rank was asked to do."""
    return agree(lambda mine: all_gather_small(mine, dist.group.WORLD), "cpu", get_arguments, whose)


def raises(error):
    """A function that raises this error."""

    def function():
        raise error

    return function


def errors(ranks, world, function_of):
    """The (type, message) of each rank's error if rank r compares function_of(r)(); afterwards the ranks can go on."""

    def run(rank):
        error = error_of(lambda: compare(function_of(rank)))
        assert compare(lambda: "the same") < 2**48
        return error

    return ranks(run, world)


@worlds
def test_equal_arguments_give_a_common_random_number(ranks, world):
    numbers = ranks(lambda rank: [compare(lambda: (1, "a", None)) for _ in range(3)], world)
    assert numbers == [numbers[0]] * world and len({*numbers[0]}) == 3 and all(0 <= n < 2**48 for n in numbers[0])


@worlds
@pytest.mark.parametrize("wrong", ("one", "all"))
def test_errors_do_not_keep_the_group(ranks, world, wrong):
    def run(rank):
        group = dist.group.WORLD

        def asked():
            if wrong == "all" or rank == 1:
                raise ValueError("x")

        def fails(mine):
            all_gather_small(mine, group)
            raise ValueError("another rank has ended")

        return references_kept(
            partial(agree, lambda mine: all_gather_small(mine, group), "cpu", asked),
            partial(agree, fails, "cpu", asked),
            partial(agree_in_groups, asked, lambda result, group: result, {group: "ranks"}, "cpu"),
        )

    assert ranks(run, world) == [0] * world


@worlds
def test_different_arguments(ranks, world):
    """All ranks raise the same error, which names the ranks that differ from rank 0, and what differs."""
    found = errors(ranks, world, lambda rank: lambda: (rank == world - 1, "x"))
    message = f"ranks [{world - 1}] were asked something else than rank 0: (True, 'x') instead of (False, 'x')"
    assert found == [(ValueError, message)] * world


@worlds
@pytest.mark.parametrize("equal", (EQUAL, SHOWN - 3, SHOWN, 5 * SHOWN))
def test_a_difference_after_a_long_equal_part(ranks, world, equal):
    """The error shows the end of the equal part."""
    found = errors(ranks, world, lambda rank: lambda: "x" * equal + str(rank))
    end = "x" * (EQUAL - 1)
    (kind, message), *_ = found
    assert found == [(kind, message)] * world and kind is ValueError
    assert message.startswith(f"ranks {[*range(1, world)]} were asked something else than rank 0: ")
    assert f"{end}1' instead of " in message and message.endswith(f"{end}0'") and len(message) < 260


@worlds
def test_the_rank_that_differs_first_is_shown(ranks, world):
    """Rank 1 differs so late that its difference is not gathered."""
    found = errors(ranks, world, lambda rank: lambda: "x" * (9 * SHOWN if rank == 1 else 9) + str(rank))
    end = "'" + "x" * 9 + "0'"
    assert {message.endswith(f" instead of {end}") for _, message in found} == {True}
    shown = {message.partition(": ")[2].partition(" instead")[0] for _, message in found}
    assert len(shown) == 1 and end not in shown.pop()


@worlds
def test_a_difference_that_is_not_gathered(ranks, world):
    found = errors(ranks, world, lambda rank: lambda: "x" * 2 * MOST + str(rank))
    others = [*range(1, world)]
    message = f"ranks {others} were asked something else than rank 0; the difference is beyond the first {MOST} bytes"
    assert found == [(ValueError, message)] * world


@worlds
def test_of_several_lines_the_first_that_differs_is_named(ranks, world):
    lines = "\n".join(f"line {number} is long enough to need several parts" for number in range(40))
    found = errors(ranks, world, lambda rank: lambda: f"{lines}\nrank {rank // (world - 1)}\nend")
    assert found == [(ValueError, f"rank {world - 1}: rank 1; on rank 0: rank 0")] * world


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
def test_an_error_message_that_is_not_utf_8(ranks, world):
    """Python decodes a file name that is not UTF-8 to surrogates. The error must still reach the other ranks."""
    found = errors(ranks, world, lambda rank: raises(ValueError("no \udcff")) if rank == 1 else lambda: "fine")
    assert found == [(ValueError, "no \\udcff (rank 1)")] * world


@worlds
def test_all_ranks_get_the_result_of_the_first(ranks, world):
    """Only rank 0 of the group calls the function. Without a group, each rank calls it itself."""

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
def test_an_error_on_the_first_rank_is_raised_on_all(ranks, world, make, message):
    def run(rank):
        error = error_of(partial(from_first, make, dist.group.WORLD, "cpu"))
        dist.barrier()
        return error

    found = ranks(run, world)
    kind, text = found[0]
    assert found == [found[0]] * world and kind is RuntimeError and text.startswith(f"rank 0 of {world}: {message}")


def meeting_store(kind, folder, rank, world):
    """A store in which the ranks of the default group meet."""
    if kind == "file":
        return dist.FileStore(str(folder / "store"), world)
    port = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    return store if rank == 0 else dist.TCPStore("127.0.0.1", port[0], world, is_master=False)


@pytest.mark.parametrize("kind", ("tcp", "file"))
@pytest.mark.parametrize("world", (1, 2, 4))
def test_ranks_that_meet_in_a_store_again_do_not_read_earlier_answers(ranks, world, kind, tmp_path):
    """Where torchrun starts the ranks again, the store may be that of the attempt before."""

    def run(rank):
        store = meeting_store(kind, tmp_path, rank, world)
        dist.barrier()
        keys = store.num_keys()
        dist.barrier()
        for attempt in range(6):
            gather = gather_in_store(store, rank, world)
            if attempt % 2:
                assert agree(gather, "cpu", lambda attempt=attempt: attempt) < 2**48
                continue
            asked = raises(ValueError(f"refused {attempt}")) if rank == world - 1 else lambda: "the same"
            assert f"refused {attempt}" in error_of(lambda gather=gather, asked=asked: agree(gather, "cpu", asked))[1]
        if rank == 0:
            assert store.num_keys() == keys

    ranks(run, world)
