"""The command `python -m sparsefusion measure`: ranks under a launcher measure their links, and rank 0 writes the file."""

import argparse
import datetime
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from commfabric.collectives.agreement import on_first, together
from commfabric.collectives.meeting import gather_in_store, meet
from commfabric.foundation.command_line import Failure
from commfabric.foundation.launcher import adopt_launcher, launched_ranks, this_rank

from .cost_model import Fabric, check_writable, size_name
from .curve import Curve
from .measurement import collective_calls, measure, time_shares
from .nccl import environment, in_own_process

TIMEOUT = datetime.timedelta(minutes=5)
IDLE_TIMEOUT = datetime.timedelta(days=1)  # the timeout of ranks that wait while other ranks measure


def measure_command(arguments: argparse.Namespace) -> None:
    """`torchrun ... -m sparsefusion measure`: measure the collectives; rank 0 writes the fabric and prints its table.

    ValueError on every rank: there are fewer than two ranks, or fewer than --ranks; arguments or devices differ; --nccl is
    given without CUDA; or rank 0 cannot write the file. Failure on every rank if writing the file failed.
    """
    world = launched_ranks()
    if world < 2:
        raise ValueError("measure needs 2 ranks or more: torchrun --nproc-per-node 2 -m sparsefusion measure --out F")
    if wrong := [count for count in arguments.ranks or () if not 2 <= count <= world]:
        raise ValueError(f"--ranks {wrong[0]} must be from 2 to the {world} ranks that were started")
    device, out = _join(arguments), Path(arguments.out)
    idle = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)  # gloo notices at once when a rank dies
    modes = ("eager",) if device == "cpu" else ("eager", "graph")
    runs = list(itertools.product(arguments.ranks or [world], modes, ("", *arguments.nccl)))
    curves: list[Curve] = []
    for (count, mode, setting), seconds in zip(runs, time_shares(arguments.seconds, len(runs)), strict=True):
        if setting:
            curves += measure_setting(setting, count, arguments.sizes, device, mode, seconds)
        else:
            curves += _measure_first(count, arguments, device, mode, seconds)
        dist.barrier(group=idle)
    fabric = Fabric(tuple(curves), _description(device))
    try:
        on_first(lambda: fabric.save(out), dist.group.WORLD)
    except OSError as error:
        raise Failure(f"the fabric could not be written: {error}") from None
    if dist.get_rank() == 0:
        print_limits(fabric, arguments.sizes)
        print(fabric.table())
    dist.barrier()
    dist.destroy_process_group()


def _join(arguments: argparse.Namespace) -> str:
    """Initialize torch.distributed from the launcher's environment; returns this rank's device.

    The ranks compare their arguments and devices in the launcher's store first, because ranks with different backends would
    wait for one another.
    """
    adopt_launcher()
    rank, world = this_rank(), launched_ranks()
    use_cuda = arguments.device == "cuda" or (arguments.device is None and torch.cuda.is_available())
    device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}" if use_cuda else "cpu"
    store, place = meet(TIMEOUT)
    together(lambda: _checked(arguments, device, rank), [gather_in_store(store, rank, world, place)], same=dict)
    _initialize(device, store, rank, world)
    return device


def _initialize(device: str, store: dist.Store, rank: int, world: int) -> None:
    if device != "cpu":
        torch.cuda.set_device(device)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)


def _checked(arguments: argparse.Namespace, device: str, rank: int) -> dict[str, object]:
    """The arguments that must be equal on all ranks. ValueError if the device is missing, or the file not writable."""
    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index) >= (count := torch.cuda.device_count()):
        raise ValueError(f"--device cuda: no GPU for local rank {index}, torch finds {count} on this host")
    if kind == "cpu" and arguments.nccl:
        raise ValueError(
            "--nccl chooses NCCL's algorithms and protocols, which need CUDA; this rank measures on the CPU"
        )
    if rank == 0:
        check_writable(Path(arguments.out))
    collectives = list(arguments.collectives)
    return {
        "--device": kind, "--sizes": arguments.sizes, "--seconds": arguments.seconds,
        "--collectives": collectives, "--ranks": arguments.ranks, "--nccl": arguments.nccl,
    }  # fmt: skip


def _measure_first(
    count: int, arguments: argparse.Namespace, device: str, mode: str, seconds: float
) -> tuple[Curve, ...]:
    """Measure the first `count` ranks for this time; the curves, on other ranks ()."""
    group = dist.new_group(list(range(count)), timeout=TIMEOUT)
    if dist.get_rank() >= count:
        return ()
    calls = collective_calls(group, arguments.collectives, device)
    return measure(group, calls, arguments.sizes, device, mode, seconds=seconds).curves


def measure_setting(
    setting: str, count: int, sizes: Sequence[int], device: str, mode: str, seconds: float
) -> tuple[Curve, ...]:
    """Measure the all-reduce of the first `count` ranks with a setting of NCCL, in a new process for each rank.

    Returns the curve, whose operation is "all_reduce SETTING"; on other ranks, and if NCCL cannot use the setting, ().
    """
    if dist.get_rank() >= count:
        return ()
    variables = environment(setting)
    if "NCCL_ALGO" in variables:  # of all-reduces only: most algorithms have no broadcast, which distributes the curves
        variables["NCCL_ALGO"] = f"allreduce:{variables['NCCL_ALGO']}"
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the processes meet in the store of the ranks that started them
    asked = (setting, count, sizes, device, mode, seconds)
    try:
        return in_own_process(variables, _measure_in_environment, *asked)
    except Exception as error:  # NCCL, torch and a process that dies raise different types
        print_left_out(f"all_reduce {setting} on {count} ranks ({mode})", error)
        return ()


def _measure_in_environment(
    setting: str, count: int, sizes: Sequence[int], device: str, mode: str, seconds: float
) -> tuple[Curve, ...]:
    """Measure the all-reduce in a process that was started with the setting."""
    store = dist.PrefixStore(f"{setting} {count} {mode}", meet(TIMEOUT)[0])
    _initialize(device, store, this_rank(), count)
    group = dist.new_group(timeout=TIMEOUT)
    calls = {f"all_reduce {setting}": collective_calls(group, ["all_reduce"], device)["all_reduce"]}
    curves = measure(group, calls, sizes, device, mode, seconds=seconds).curves
    dist.barrier()
    dist.destroy_process_group()
    return curves


def print_left_out(name: str, reason: object) -> None:
    if this_rank() == 0:
        print(f"sparsefusion measure: left out {name}: {str(reason).strip().partition(chr(10))[0]}", file=sys.stderr)


def print_limits(fabric: Fabric, sizes: Sequence[int]) -> None:
    """Print to stderr which operations were not measured up to the largest size."""
    for curve in fabric.curves:
        if curve.nbytes[-1] < sizes[-1]:
            name = f"{curve.operation} on {curve.ranks} ranks ({curve.mode})"
            print(f"sparsefusion measure: {name} was measured up to {size_name(curve.nbytes[-1])}", file=sys.stderr)


def _description(device: str) -> dict[str, str]:
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    return {
        "source": "measured",
        "torch": torch.__version__,
        "backend": dist.get_backend(),
        "device": torch.device(device).type,
        "interface": interface or "default",
        "host": os.uname().nodename,
    }
