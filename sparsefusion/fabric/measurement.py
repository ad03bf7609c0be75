"""Times of collectives on a real process group: gloo or NCCL, call by call, or on CUDA also as replayed graphs.

Operations take turns, size by size, in another order in each repetition: a link that lets bursts through remembers what
came before. A call begins with a barrier and lasts until its slowest rank is done; a point is the median of the
repetitions. Rank 0 fits the curves and sends them to the others, so that what is decided from them is decided alike
everywhere.
"""

import datetime
import os
import random
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from sparsefusion.collectives import counted as collectives

from .cost_model import Fabric, check_writable
from .curve import Curve

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
BUDGET_S = 0.3  # of all operations at one size, between LEAST and MOST repetitions
LEAST, MOST = 3, 100
SLOW_S = 2.0  # an operation that takes longer is not measured at larger sizes
LAG, LAG_BYTES = 3.0, 64 * 1024  # nor, in a race, one that takes LAG times the fastest at LAG_BYTES or more
RACE_S = 1.0  # and a race ends when a repetition takes longer
GRAPH_CALLS = 20  # calls in a CUDA graph
TIMEOUT = datetime.timedelta(minutes=5)


def measure(group, calls: dict, sizes, device="cpu", mode="eager", race=False) -> Fabric:
    """Times of `calls` on the links of `group`, all of whose ranks call this together and get the same fabric.

    calls: {operation: nbytes -> function without arguments that performs it once}. sizes: the bytes to measure, the
    operation's own meaning of them (`curve`). mode: eager, or graph on CUDA. race: only the fastest matters, so what lags
    is dropped, and large sizes are left out on slow links. Sends what the operations send, and barriers.
    """
    points = {name: [] for name in calls}
    running = list(calls)
    for nbytes in sorted(sizes):
        seconds = repetitions([timed(calls[name](nbytes), device, mode) for name in running], group, device)
        medians = seconds.median(0).values
        for name, median, high in zip(running, medians.tolist(), seconds.quantile(0.9, 0).tolist(), strict=True):
            points[name].append((nbytes, median, high))
        limit = LAG * medians.min().item() if race and nbytes >= LAG_BYTES else SLOW_S
        running = [name for name in running if points[name][-1][1] <= min(limit, SLOW_S)]
        if not running or (race and medians.sum() > RACE_S):
            break
    curves = None
    if group.rank() == 0:
        curves = [Curve.fit(name, group.size(), measured, mode) for name, measured in points.items()]
    return _broadcast(curves, group, device)


def repetitions(functions, group, device="cpu", count=None, warm_up=True) -> torch.Tensor:
    """Seconds (repetitions, functions), float64, until the slowest rank was done.

    functions: `timed` ones, which take turns. count: of repetitions; None: as many as BUDGET_S allows. warm_up: after one
    that does not count.
    """
    ready = torch.zeros(1, device=device)

    def repetition(number):
        seconds = torch.zeros(len(functions), device=device)
        order = list(range(len(functions)))
        random.Random(number).shuffle(order)  # the same on every rank
        for i in order:
            dist.all_reduce(ready, group=group)  # a barrier on this device
            seconds[i] = functions[i]()
        return collectives.all_reduce(seconds, group, op=dist.ReduceOp.MAX).cpu().double()

    if warm_up:
        repetition(0)
    rows = [repetition(1)]
    count = count or max(LEAST, min(MOST, int(BUDGET_S / rows[0].sum().item())))
    return torch.stack(rows + [repetition(number) for number in range(2, count + 1)])


def timed(function, device="cpu", mode="eager"):
    """A function that performs `function` once and returns its seconds on this rank."""
    if mode == "graph":
        return _timed_graph(function, device)

    def stopwatch():
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        return time.perf_counter() - start

    return stopwatch


def _timed_graph(function, device):
    """The same of GRAPH_CALLS calls captured in a CUDA graph: the seconds of one of them."""
    with torch.cuda.device(device):
        function()
        _synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                function()
    replay = timed(graph.replay, device)
    return lambda: replay() / GRAPH_CALLS


def _synchronize(device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _broadcast(curves, group, device) -> Fabric:
    """Rank 0's curves as a fabric on every rank of the group."""
    box = [curves]
    dist.broadcast_object_list(box, group=group, group_src=0, device=torch.device(device))
    return Fabric(tuple(box[0]), {"source": "measured", "device": torch.device(device).type})


def collective_calls(group, names=COLLECTIVES, device="cpu") -> dict:
    """{operation: nbytes -> function} of the plain collectives, as `measure` takes them; nbytes as `Fabric.time`'s."""
    return {name: partial(_prepare, name, group, device) for name in names}


def _prepare(name, group, device, nbytes):
    ranks = group.size()
    numbers = max(1, nbytes // 4)
    if name == "p2p":
        return _message(torch.zeros(numbers, device=device), group)
    if name in ("reduce_scatter", "all_to_all"):
        tensor = torch.zeros(ranks, -(-numbers // ranks), device=device)
    else:
        tensor = torch.zeros(numbers, device=device)
    return partial(getattr(collectives, name), tensor, group)


def _message(tensor, group):
    """Each even rank sends `tensor` to the next one."""
    rank, peer = group.rank(), group.rank() ^ 1
    if peer >= group.size():
        return lambda: None
    if rank % 2 == 0:
        return lambda: collectives.exchange([(tensor, peer)], [], group).wait()
    return lambda: collectives.exchange([], [(torch.empty_like(tensor), peer)], group).wait()


def measure_command(arguments) -> None:
    """`torchrun ... -m sparsefusion measure`: sweep the collectives and write the fabric file from rank 0."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        raise ValueError("measure needs 2 ranks or more: torchrun --nproc-per-node 2 -m sparsefusion measure --out F")
    out = Path(arguments.out)
    check_writable(out)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device")
    if wrong := [count for count in arguments.ranks or () if not 2 <= count <= world]:
        raise ValueError(f"--ranks {wrong[0]} must be from 2 to the {world} ranks that were started")
    device = _join(arguments.device)
    fabrics = [_measure_first(count, arguments, device) for count in arguments.ranks or [world]]
    if dist.get_rank() == 0:
        fabric = Fabric(tuple(curve for fabric in fabrics for curve in fabric.curves), _description(device))
        fabric.save(out)
        print(fabric.table())
    dist.barrier()
    dist.destroy_process_group()


def _join(device) -> str:
    """Join torch.distributed as torchrun's environment says; this rank's device."""
    cuda = device == "cuda" or (device is None and torch.cuda.is_available())
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    return f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"


def _measure_first(count, arguments, device) -> Fabric:
    """The first `count` ranks' fabric; on the others an empty one, once that is done."""
    group = dist.new_group(list(range(count)), timeout=TIMEOUT)
    fabric = Fabric((), {})
    if dist.get_rank() < count:
        for mode in ("eager", "graph") if device != "cpu" else ("eager",):
            calls = collective_calls(group, arguments.collectives, device)
            measured = measure(group, calls, arguments.sizes, device, mode)
            fabric = Fabric(fabric.curves + measured.curves, {})
    dist.barrier()
    return fabric


def _description(device) -> dict:
    """Where a fabric was measured."""
    made = {"source": "measured", "torch": torch.__version__, "backend": dist.get_backend()}
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    return made | {
        "device": torch.device(device).type,
        "interface": interface or "default",
        "host": os.uname().nodename,
    }
