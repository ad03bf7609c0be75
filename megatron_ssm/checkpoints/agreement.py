"""Steps that may fail on one rank alone, such as reading a file.

The ranks compare outcomes afterwards, so that all raise the same error and none waits for a rank that has failed.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sparsefusion.collectives.agreement import agree_in_groups, check_member
from sparsefusion.foundation.command_line import Failure

Result = TypeVar("Result")


def run_and_compare(
    action: Callable[[], Result],
    compared: Callable[[Result], object],
    groups: Iterable[ProcessGroup | None],
    device: torch.device | str,
    also: Callable[[ProcessGroup], object] = lambda group: None,
) -> Result:
    """What `action()` returns, after all ranks of each group have completed it.

    compared: maps the result to what must be equal on all ranks (its `repr` is compared). groups: None and groups of one
    rank are ignored. also: what else must be equal on the ranks of a group. An error that all ranks raise is raised
    unchanged. ValueError on every rank, with the text of the first failure and its rank, if the action fails on some of them
    only, and if the compared values differ. Each group gathers 16 bytes from each rank (see `agree`), on `device`.
    """
    groups = tuple(groups)
    for group in groups:
        check_member(group)
    several = {group: "ranks" for group in groups if group is not None and group.size() > 1}
    return agree_in_groups(action, lambda result, group: (also(group), compared(result)), several, device)


def run_on_every_rank(
    action: Callable[[], Result],
    failure: str,
    kind: type[Exception] = Failure,
    compared: Callable[[Result], str] = lambda result: "",
    group: ProcessGroup | None = None,
) -> Result:
    """What `action()` returns, after all ranks of `group` (None: the default group) have completed it.

    If it fails on any rank, every rank raises `kind` with one line: `failure` and the cause, both of the first rank that
    failed. If it raises a Failure on any rank, all raise that instead, with its own line. An unexpected exception (neither
    OSError, `kind` nor Failure) is raised unchanged on the rank where it occurred. compared: maps the result to
    what must be equal on all ranks; they raise ValueError if it is not. All-gathers two pickled lines from each rank.
    """
    results: list[Result] = []
    error: Exception | None = None
    text = ""
    try:
        results.append(action())
        text = compared(results[0])
    except Exception as raised:  # of any kind: the other ranks wait below
        error = raised
    is_failure = isinstance(error, Failure)
    line = "" if error is None else str(error) if is_failure else f"{failure}: {first_line(error)}"
    try:
        reports = all_gather_pickled((line, is_failure, text), group)
        if error is not None and not isinstance(error, (OSError, kind, Failure)):
            raise error
    finally:
        error = None  # its traceback refers to this function, which would keep the group until Python collects garbage
    if failed := [(line, is_failure) for line, is_failure, _ in reports if line]:
        line, is_failure = max(failed, key=lambda pair: pair[1])  # the first Failure, or the first of all
        raise (Failure if is_failure else kind)(line)
    if other := next((text for *_, text in reports if text != reports[0][2]), None):
        raise ValueError(f"the ranks differ: {reports[0][2]} on rank 0, {other} on another")
    return results[0]


def all_gather_pickled(mine: Result, group: ProcessGroup | None = None) -> list[Result]:
    """What each rank of `group` (None: the default group, or this process alone) has passed, in the order of the ranks."""
    if not dist.is_initialized():
        return [mine]
    gathered = [mine] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group)
    return gathered


def run_on_rank_0(action: Callable[[], object], failure: str, group: ProcessGroup | None = None) -> None:
    """Run `action` on rank 0 while the others wait; if it fails, every rank raises Failure as `run_on_every_rank` does."""
    is_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
    run_on_every_rank(action if is_rank_0 else lambda: None, failure, group=group)


def first_line(error: BaseException) -> str:
    """The text of an error in one line: an OSError's reason without its file, or the name of an error without a text."""
    return getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
