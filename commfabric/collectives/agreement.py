"""Actions that may fail on some ranks only: either all ranks complete them, or all raise the same error, and none hangs."""

import hashlib
import os
import pickle
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from commfabric.foundation.launcher import this_rank

MAX_SHOWN = 200  # characters of each rank's value that an error shows
SHOWN_BEFORE_DIFFERENCE = 80  # how many of them precede the first difference

Gather = Callable[[Any], list]  # this rank's value (JSON-serializable) -> the values of all ranks, in rank order
T = TypeVar("T")


def check_member(group: object) -> None:
    """ValueError unless `group` is None or a process group of this rank (for other ranks, `new_group` returns a number)."""
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        text = " ".join(repr(group).split())  # the repr of a tensor may have several lines
        raise ValueError(f"group {text:.60} is not a process group of this rank")


def together(
    action: Callable[[], T],
    groups: Iterable[dist.ProcessGroup | Gather | None],
    same: Callable[[T], object] = lambda result: None,
    device: torch.device | str | None = None,
) -> T:
    """Return the result of `action()`, after all ranks of each group have completed it.

    If it fails on some ranks, every rank raises the error of the first of them, with its rank at the end of the text. An
    error that occurs on all ranks is raised unchanged.

    Args:
        action: The action of this rank.
        groups: The groups of ranks that wait for each other. They are compared one after the other; an error found in one
            group is also reported to the ranks of the later ones. None and groups of one rank are skipped. A function that
            gathers may replace a group (see `meeting.gather_in_store`).
        same: Maps the result to a value whose `repr` must be equal on all ranks. The error names the first difference,
            and the key if the value is a mapping.
        device: The GPU that NCCL uses, by default the current one.

    Raises:
        ValueError: On every rank, if `same` differs across ranks; on this rank, if `groups` has an invalid element.

    Each group gathers a pickled digest from every rank, and the values only if digests differ.
    """
    gathers = []
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            gathers += [_gather_in(group, device)] if group.size() > 1 else []
        elif callable(group):
            gathers.append(group)
        else:
            check_member(group)
    if not gathers:
        return action()
    rank, values, is_everywhere = dist.get_rank() if dist.is_initialized() else this_rank(), dict[str, str](), True
    error: Exception | None = None
    try:
        result = action()
        values = _values(same(result))
    except Exception as raised:  # of any kind: the other ranks wait below
        error = raised
    failure = None if error is None else _Failure.of(error, f" (rank {rank})")
    digest = hashlib.sha256(repr(sorted(values.items())).encode(errors="backslashreplace")).hexdigest()
    try:
        for gather in gathers:
            failures, digests = zip(*gather((failure, digest)), strict=True)
            if failed := [_Failure(*each) for each in failures if each]:
                is_everywhere &= len(failed) == len(failures) and len({each[:2] for each in failed}) == 1
                failure = failed[0]
            elif len({*digests}) > 1:
                failure = _Failure("builtins:ValueError", _difference(gather((rank, values))))
        if failure is not None:
            if error is not None and is_everywhere:
                raise error
            raise failure.as_error() from error
    finally:
        error = None  # its traceback refers to this function, which would keep the group until Python collects garbage
    return result


def on_first(action: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device | str | None = None) -> T:
    """Run `action()` on the first rank of `group`, and return its result or raise its error on all of them.

    The first rank broadcasts the result, or the type and text of the error, as a pickled object. group: None for this rank
    alone. device: the GPU that NCCL uses, by default the current one.
    """
    if group is None or group.size() == 1:
        return action()
    outcome: list[Any] = [None, None]  # the result, and the error
    error: Exception | None = None
    if group.rank() == 0:
        try:
            outcome[0] = action()
            pickle.dumps(outcome[0])  # the broadcast would raise the error on this rank only
        except Exception as raised:  # of any kind: the other ranks wait
            error, outcome = raised, [None, _Failure.of(raised)]
    dist.broadcast_object_list(
        outcome, group=group, group_src=0, device=None if device is None else torch.device(device)
    )
    try:
        if outcome[1] is not None:
            raise (outcome[1].as_error() if error is None else error) from None
    finally:
        error = None  # as in `together`
    return outcome[0]


def gather_objects(value: T, group: dist.ProcessGroup | None, device: torch.device | str | None = None) -> list[T]:
    """Every rank's value, in rank order, sent as pickled objects. group, device: see `on_first`."""
    return [value] if group is None else _gather_in(group, device)(value)


def _gather_in(group: dist.ProcessGroup, device: torch.device | str | None) -> Gather:
    """A function that gathers an object of each rank of `group`."""

    def gather(value: Any) -> list:
        values: list[Any] = [None] * group.size()
        gpu = -1 if device is None or torch.device(device).type != "cuda" else device  # -1: the current one
        with torch.cuda.device(gpu):
            dist.all_gather_object(values, value, group=group)
        return values

    return gather


class _Failure(NamedTuple):
    """An error that can be sent to other ranks: the "module:name" of its class, its message, and the rank as a suffix."""

    class_path: str
    text: str
    suffix: str = ""

    @classmethod
    def of(cls, error: Exception, suffix: str = "") -> "_Failure":
        """Describe an error. Its class_path is that of the nearest base class that other ranks can construct from a message
        alone.
        """
        text = str(error)
        for kind in type(error).__mro__:
            name = f"{kind.__module__}:{kind.__qualname__}"
            with suppress(Exception):
                if pkgutil.resolve_name(name) is kind and str(kind(text)) == text:
                    break
        return cls(name, text if kind is type(error) else f"{type(error).__name__}: {text}", suffix)

    def as_error(self) -> Exception:
        return pkgutil.resolve_name(self.class_path)(f"{self.text}{self.suffix}")


def _values(value: object) -> dict[str, str]:
    """The texts to compare: {f"{key}=": repr(entry)} for a mapping, {"": repr(value)} for any other value."""
    return {f"{name}=": repr(each) for name, each in value.items()} if isinstance(value, Mapping) else {"": repr(value)}


def _difference(gathered: Sequence[tuple[int, dict[str, str]]]) -> str:
    (first_rank, first), *_ = gathered
    rank, other = next((rank, values) for rank, values in gathered if values != first)
    name = next(name for name in [*first, *other] if other.get(name) != first.get(name))
    texts = [values.get(name, "nothing") for values in (other, first)]
    begin = max(0, len(os.path.commonprefix(texts)) - SHOWN_BEFORE_DIFFERENCE)
    shown = (
        f"{name}{'...' if begin else ''}{text[begin:][:MAX_SHOWN]}{'...' * (len(text) > begin + MAX_SHOWN)}"
        for text in texts
    )
    return f"arguments differ across ranks: rank {rank} got {next(shown)}, rank {first_rank} got {next(shown)}"
