"""Settings of NCCL: its algorithms and protocols, which a process chooses by its environment before it uses NCCL.

A setting is an algorithm, a protocol, or both: "Ring", "LL128", "Ring LL128".
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

ALGORITHMS = ("Ring", "Tree", "NVLS", "NVLSTree", "CollnetDirect", "CollnetChain")  # those of all-reduces
PROTOCOLS = ("Simple", "LL", "LL128")

T = TypeVar("T")


def parse_setting(text: str) -> str:
    """'Ring/LL128' -> 'Ring LL128'. ValueError unless it is an algorithm, a protocol, or an algorithm/protocol."""
    algorithm, _, protocol = text.partition("/")
    if text in PROTOCOLS or (algorithm in ALGORITHMS and protocol in PROTOCOLS) or text in ALGORITHMS:
        return text.replace("/", " ")
    known = ", ".join(ALGORITHMS + PROTOCOLS)
    raise ValueError(f"unknown setting of NCCL {text!r}: expected one of {known}, or two as in Ring/LL128")


def environment(setting: str) -> dict[str, str]:
    """The variables that make NCCL use a setting: 'Ring LL128' -> {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128"}."""
    return {"NCCL_PROTO" if word in PROTOCOLS else "NCCL_ALGO": word for word in setting.split()}


def in_own_process(variables: dict[str, str], function: Callable[..., T], *arguments: object) -> T:
    """Return function(*arguments), or raise its error, from a new process that has these environment variables, too."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_set, initargs=(variables,)) as pool:
        return pool.submit(function, *arguments).result()


def _set(variables: dict[str, str]) -> None:
    os.environ.update(variables)
