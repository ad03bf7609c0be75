"""Compares what ranks were called with before they communicate; different calls would make them wait for ever."""

import hashlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

SHOWN = 320  # bytes of each rank's arguments in the error


def agree(gather: Callable, device, asked: Callable[[], object], whose: str = "ranks") -> int:
    """Compare the arguments of all ranks. Returns a random number below 2^48, the same on all ranks.

    gather: a tensor (n,) of this rank -> those of all ranks, (P, n). asked: returns this rank's arguments, whose `repr`
    is compared, or raises an error. ValueError on every rank: the arguments differ, or are wrong on some ranks; an
    error that occurs on all ranks is raised as it is. Gathers 16 bytes per rank, and SHOWN more if they differ.
    """
    wrong: Exception | None = None
    try:
        text = repr(asked())
    except TypeError as error:  # a list where a number is meant, and so on
        wrong = ValueError(f"an argument is of the wrong type: {error}")
        text = repr(wrong)
    except Exception as error:  # of any kind: the others wait in the gather
        wrong, text = error, repr(error)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    given = gather(torch.tensor([digest, int.from_bytes(os.urandom(6), "little")], device=device)).cpu()
    different = (given[:, 0] != given[0, 0]).nonzero().flatten().tolist()
    if different:
        texts = _gather_text(gather, device, f"{bool(wrong):d}{text if wrong is None else wrong}")
        raise ValueError(_difference(texts, different, whose))
    if wrong is not None:
        raise wrong
    return int(given[0, 1])


def from_first(made, group, device):
    """Call `made()` on the first rank of `group`, and return its result on all ranks. group None: call it here.

    RuntimeError on all ranks: the error that it raised. The result is sent as a pickled object, as torch does.
    """
    if group is None:
        return made()
    box = [None, None]
    if group.rank() == 0:
        try:
            box[0] = made()
        except Exception as error:  # of any kind: the others wait
            box[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(box, group=group, group_src=0, device=device)
    if box[1]:
        raise RuntimeError(f"rank 0 of {group.size()}: {box[1]}")
    return box[0]


def _gather_text(gather, device, text) -> list[str]:
    """The first SHOWN bytes of each rank's text."""
    words = torch.frombuffer(bytearray(text.encode()[:SHOWN].ljust(SHOWN, b"\0")), dtype=torch.int64)
    return [
        bytes(row.view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="ignore")
        for row in gather(words.to(device)).cpu()
    ]


def _difference(texts, different, whose) -> str:
    """The message of the error. texts: of each rank; they begin with 1 if they describe an error."""
    for rank, text in enumerate(texts):
        if text.startswith("1"):
            return f"{text[1:]} (rank {rank})"
    message = f"{whose} {different} were asked something else than rank 0"
    first, other = texts[0][1:], texts[different[0]][1:]
    return (
        f"{message}: {other} instead of {first}"
        if other != first
        else f"{message} (now or earlier, or with other options)"
    )
