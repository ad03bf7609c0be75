"""Ranks that were asked different things would wait for one another for ever: compare first."""

import hashlib
import os
from collections.abc import Callable

import torch

from .layers import Ranks


def agree(ranks: Ranks, device, asked: Callable[[], object]) -> int:
    """Compare what the ranks were asked; returns a fresh number below 2^48, rank 0's on all of them.

    asked: returns what this rank was given (its `repr` is compared), or raises what is wrong with it. ValueError on every
    rank if they differ; what is wrong is raised on every rank too. Gathers 16 bytes of each.
    """
    wrong = None
    try:
        text = repr(asked())
    except TypeError as error:  # a list where a number is meant, and so on
        wrong = ValueError(f"an argument is of the wrong type: {error}")
        text = repr(wrong)
    except Exception as error:  # of any kind: the others wait in the gather
        wrong, text = error, repr(error)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    mine = torch.tensor([digest, int.from_bytes(os.urandom(6), "little")], device=device)
    given = ranks.gather(mine).cpu()
    different = (given[:, 0] != given[0, 0]).nonzero().flatten().tolist()
    if different:
        raise ValueError(
            f"tensor-parallel ranks {different} were asked something else than rank 0 "
            "(now or earlier, or with other options)"
        )
    if wrong is not None:
        raise wrong
    return int(given[0, 1])
