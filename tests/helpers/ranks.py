"""How the tests run more than one rank: gloo ranks by `run_ranks`, NCCL ranks by `run_cuda_ranks`, those of torchrun's agent
by `run_agent`.

A gloo rank is a fork of the test process, so it starts in milliseconds, needs no pickling of its function and arguments,
and shares what was imported before. It reports through a pipe and then waits to be killed: if it exited, the other ranks
would see a broken connection instead of the error that came first.

CUDA cannot be used in a fork of a process that has used it, so an NCCL rank is a fork of a server that has only imported
torch. Where there are fewer GPUs than ranks, all ranks share the first GPU. NCCL refuses that on one host, so each
rank then says that it is a host of its own (NCCL_HOSTID), and the ranks exchange messages through sockets.
"""

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import selectors
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

HEADER = struct.Struct("<Q")  # the length of the report that follows
# Seconds to wait for reports of other ranks after a failure: when a rank dies, another rank's report of the broken
# connection can arrive before the end of the dead rank's pipe.
GRACE = 0.2


@dataclass
class Rank:
    """A running rank as its parent sees it."""

    rank: int
    pid: int
    pipe: int
    dump: Path
    report: bytearray = field(default_factory=bytearray, repr=False)
    reaped: bool = False


@dataclass
class Failure:
    """An exception that a rank raised, or its death; `at` is the monotonic time at which it was noticed."""

    rank: int
    at: float
    kind: type
    message: str
    trace: str

    def exception(self, world_size):
        """An exception of the same type, or a RuntimeError, whose message names the rank and ends in its traceback."""
        text = f"rank {self.rank} of {world_size}: {self.message}\n\n{self.trace}"
        try:
            error = self.kind(text)
            if str(error) in (text, repr(text)):  # repr: how KeyError shows its argument
                return error
        except Exception as refused:
            text += f"\n(a RuntimeError, for {self.kind.__name__} cannot be built from a message: {refused})"
        return RuntimeError(text)


def run_ranks(function, world_size, *args, timeout=60):
    """The list of function(rank, *args) of `world_size` gloo ranks, each a fork of this process with one thread.

    The default process group exists when `function` is called. Every rank starts with this process's random state.
    Results travel by torch.save; tensors may be of any size. If a rank raises, the earliest exception is raised here,
    with the same type if a message is enough to construct it, the rank's number before its message and the traceback
    after it. If a rank dies, RuntimeError is raised; if some have not finished after `timeout` seconds, a TimeoutError
    that shows where they were. Ranks end with the call, or with this process if it is killed.
    """
    __tracebackhide__ = True  # pytest shows the rank's traceback, not this file's
    if torch.get_num_threads() != 1:
        raise RuntimeError(
            f"refusing to fork: torch uses {torch.get_num_threads()} threads, and after a computation on several "
            "a fork hangs; call torch.set_num_threads(1) before any operation"
        )
    ranks = []
    parent_pipe = os.pipe()
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        try:
            for rank in range(world_size):
                ranks.append(_fork(rank, world_size, function, args, Path(directory), parent_pipe, timeout))
            return _collect(ranks, timeout)
        finally:
            _kill_all(ranks)
            os.close(parent_pipe[0])
            os.close(parent_pipe[1])


# In the parent


def _fork(rank, world_size, function, args, directory, parent_pipe, timeout):
    """Start one rank; in the child this does not return."""
    reader, writer = os.pipe()
    dump = directory / f"where-{rank}"
    dump.touch()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            watcher = _prepare(dump, parent_pipe)
            report = _report(function, rank, world_size, args, directory / "store", timeout)
            _send(writer, report)
            watcher.join()
        finally:
            os._exit(1)
    os.close(writer)
    return Rank(rank, pid, reader, dump)


def _collect(ranks, timeout):
    """Read the pipes until every rank has reported its result; raise soon after a failure, or at the time-out."""
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    results = {}
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while len(results) < len(ranks):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            closed = [key.data for key, _ in ready if _drain(key.data)]
            for rank in closed:
                selector.unregister(rank.pipe)
                results[rank.rank] = _outcome(rank)
            failures = [outcome for outcome in results.values() if isinstance(outcome, Failure)]
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() >= deadline:
                break
    if failures:
        raise min(failures, key=lambda failure: failure.at).exception(len(ranks))
    hung = [rank for rank in ranks if rank.rank not in results]
    if hung:
        raise TimeoutError(_unfinished(hung, len(ranks), timeout))
    return [results[rank.rank][0] for rank in ranks]


def _drain(rank):
    """Read what is in one rank's pipe; True once the rank has closed it."""
    chunk = os.read(rank.pipe, 1 << 16)
    rank.report += chunk
    return not chunk


def _outcome(rank):
    """The report of a rank whose pipe has closed: (result,) or a Failure. If it died before its report, a Failure."""
    report = memoryview(rank.report)[HEADER.size :]
    if len(rank.report) >= HEADER.size and HEADER.unpack_from(rank.report)[0] == len(report):
        return torch.load(io.BytesIO(report), weights_only=False)
    _, status = os.waitpid(rank.pid, 0)
    rank.reaped = True
    code = os.waitstatus_to_exitcode(status)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    # The time 0 makes a death the first failure: exceptions of other ranks may come from its broken connections.
    return Failure(rank.rank, 0.0, RuntimeError, f"died without a result ({how})", rank.dump.read_text())


def _unfinished(hung, world_size, timeout):
    """The message of a time-out: which ranks had not finished, and where each was."""
    for rank in hung:
        os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(0.3)  # until their faulthandlers have written
    numbers = ", ".join(str(rank.rank) for rank in hung)
    stacks = "\n".join(f"rank {rank.rank} was at\n{rank.dump.read_text()}" for rank in hung)
    return f"of {world_size} ranks, {numbers} had not finished after {timeout} s\n\n{stacks}"


def _kill_all(ranks):
    """Kill every rank that is still alive, and reap it."""
    alive = [rank for rank in ranks if not rank.reaped]
    for rank in alive:
        os.kill(rank.pid, signal.SIGKILL)
    for rank in alive:
        os.waitpid(rank.pid, 0)
    for rank in ranks:
        os.close(rank.pipe)


# In a rank


def _prepare(dump, parent_pipe):
    """Write crashes and, on SIGUSR1, stacks to `dump`; return a thread that ends this rank when its parent is gone."""
    gc.freeze()  # garbage of the tests' process may wait for its threads, which a fork does not have
    file = open(dump, "w")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
    os.close(parent_pipe[1])  # only the parent keeps the writing end open, so a read returns when the parent ends

    def watch():
        os.read(parent_pipe[0], 1)
        os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    return watcher


def _report(function, rank, world_size, args, store, timeout):
    """The serialised (result,) or Failure of one rank."""
    try:
        # Longer than the parent waits: its timeout should come first, because it shows where every rank is.
        limit = timedelta(seconds=timeout + 30)
        dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=world_size, timeout=limit)
        return _serialised((function(rank, *args),))
    except BaseException as error:
        kind = type(error) if _importable(type(error)) else RuntimeError
        return _serialised(Failure(rank, time.monotonic(), kind, str(error), traceback.format_exc()))


def _serialised(outcome):
    buffer = io.BytesIO()
    torch.save(outcome, buffer, pickle_protocol=pickle.DEFAULT_PROTOCOL)  # 2 turns FileNotFoundError into OSError
    return buffer.getbuffer()


def _importable(kind):
    """Whether the parent can look this class up by its name."""
    try:
        pickle.dumps(kind)
    except Exception:
        return False
    return True


def _send(writer, report):
    """Write the report and close the pipe, which tells the parent that nothing follows."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(writer, "wb") as pipe:
        pipe.write(HEADER.pack(len(report)))
        pipe.write(report)


# Ranks of torchrun's agent


def run_agent(function, world_size, folder, restarts=0, timeout=60, **settings):
    """Whether function() has ended well on ranks that torchrun's agent started, with their output in out-RANK and err-RANK.

    The ranks are forks of this process, with the environment of torchrun's. If one fails, all are started again, at most
    `restarts` times. folder: of the files; every start appends to them. TimeoutError after `timeout` seconds. settings: more
    of torch's LaunchConfig.
    """

    context = multiprocessing.get_context("fork")
    forked = context.Barrier(world_size)

    def rank():
        # A fork inherits the lock of the resolver, which the agent's store holds for a moment when a rank connects to it.
        forked.wait()
        for stream, kind in ((1, "out"), (2, "err")):
            path = Path(folder, f"{kind}-{os.environ['RANK']}")
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        try:
            function()
        except Exception:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    settings |= dict(rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=restarts, start_method="fork")
    agent = context.Process(target=elastic_launch(LaunchConfig(1, 1, world_size, **settings), rank))
    agent.start()
    try:
        agent.join(timeout)
        if agent.is_alive():
            raise TimeoutError(f"torchrun's agent runs after {timeout} s")
        return agent.exitcode == 0
    finally:
        agent.kill()
        agent.join()


# NCCL ranks


def run_cuda_ranks(function, world_size, *args, timeout=120):
    """The list of function(rank, *args) of `world_size` NCCL ranks, for which GPUs are already chosen.

    function: of a module, because it is found by its name. Results travel by torch.save, and should be on the CPU. If a rank
    raises or dies, RuntimeError with the first traceback; TimeoutError if some have not finished after `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with tempfile.TemporaryDirectory(prefix="cuda-ranks-") as directory:
        store, ranks, pipes = (Path(directory) / "store").as_uri(), [], {}
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                ranks.append(
                    context.Process(
                        target=_run_cuda_rank, args=(sender, function, rank, world_size, store, args, timeout)
                    )
                )
                ranks[-1].start()
                sender.close()
                pipes[receiver] = rank
            return _collect_cuda(pipes, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect_cuda(pipes, timeout):
    """The results that arrive through {pipe: rank}, in the order of the ranks."""
    deadline, results, waiting = time.monotonic() + timeout, {}, dict(pipes)
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} had not finished after {timeout} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                result, trace = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a result") from None
            if trace:
                raise RuntimeError(f"rank {rank} of {len(pipes)}: {trace}")
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _run_cuda_rank(pipe, function, rank, world_size, store, args, timeout):
    """Join a group of NCCL ranks, call the function, and send (its result, "") or (None, the traceback)."""
    try:
        has_own_gpu = torch.cuda.device_count() >= world_size
        if not has_own_gpu:
            os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(rank if has_own_gpu else 0)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("nccl", init_method=store, rank=rank, world_size=world_size, timeout=limit)
        outcome = function(rank, *args), ""
        torch.cuda.synchronize()
    except BaseException:
        outcome = None, traceback.format_exc()
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    pipe.send_bytes(buffer.getvalue())
    threading.Event().wait()  # to be killed: other ranks may still receive what this one has sent
