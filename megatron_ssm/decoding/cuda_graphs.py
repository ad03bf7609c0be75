"""Decodes a token by a CUDA graph, so that the host launches one graph instead of many kernels.

A graph repeats its kernels on the same addresses. So it is captured for some rows of a cache, and used until the model
or the cache changes, which the count of changes (`parallel.tracked`) and the addresses of tensors show at every token. What
differs from token to token is in buffers that are filled first: token ids and, with attention, positions. The number of
keys that attention reads is rounded up to a power of two (at least KEYS, at most the capacity of the cache), and the mask
is made from the positions on the GPU; there is one graph for each number of keys. For each, the first WARM_UPS tokens are
computed without a graph, by the function that is captured afterwards.

A token is decoded without a graph if

- its rows are not consecutive, or some are at their beginning; gradients, autocast, global hooks or torch.compile are
  on;
- a module is not the library's, or has hooks or methods of its own, or a shared block has another attention function:
  it might do work on the host. The same holds for a `reduce` that is the user's function;
- a module has tensors that are neither parameters nor buffers: their replacement would not be noticed;
- ranks do not sum by NCCL. All wire formats can be captured: on CUDA none depends on the data, and what `auto`
  chooses was measured in `load`. All ranks make the same calls to equal models, so they capture the same tokens; if a
  capture fails on one rank, all ranks give it up;
- the cache has just moved, because a hybrid model has no max_length and no room was reserved. `Engine` reserves the
  room of a request, so its cache moves between requests at most, and graphs are then captured again.

Which graphs are kept depends on the calls only, not on the garbage collection of a rank: those of the PLANS sets of
rows that were used last. So the graphs of a deleted cache stay until other rows have been used. They hold addresses,
not the cache, and share one memory pool. A graph also holds NCCL's communicator, which cannot be destroyed before it:
`DecodingGraphs.clear` releases all graphs, and `Model.close` calls it.
"""

import copy
import logging
import threading
import weakref
from collections import Counter as Tally
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from megatron_ssm.operators.attention import Attention, attend_with_cache
from megatron_ssm.operators.cache import Cache
from megatron_ssm.operators.call import Call, Positions
from megatron_ssm.parallel.layers import has_plain_tensors, is_altered
from megatron_ssm.parallel.tracked import Version
from sparsefusion.collectives import counted as collectives

DEVICE = "cuda"
PLANS = 4  # sets of rows whose graphs are kept, per model and thread
KEYS = 256  # the smallest number of keys that a graph reads
WARM_UPS = 2  # tokens before a capture
LIBRARY_MODULES = ("megatron_ssm.", "torch.nn.modules.container")  # whose classes do no work on the host

_ABANDONED: list = []  # empty graphs, to which the allocator of pinned memory keeps references
_CAPTURING = threading.Lock()  # a process can do one capture at a time

log = logging.getLogger("megatron_ssm")


def capture(
    step: Callable[[], Tensor], device: torch.device, streams: dict[torch.device, Any], pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """(graph, result) of a function without arguments; every `replay()` of the graph overwrites the tensors of the result.

    Nothing is computed yet. streams: {device: the stream on which to capture}; missing ones are added. Reusing them limits
    the data that libraries keep per stream. pool: the memory pool of another living graph, to be shared. Threads capture
    one after the other. Meanwhile other threads may launch work on the GPU, but must not wait for all of it
    (`torch.cuda.synchronize`): that would fail, and the capture too.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    with _CAPTURING, torch.cuda.device(device):
        before = torch.cuda.current_stream()
        if device not in streams:
            streams[device] = torch.cuda.Stream()
        try:
            with torch.cuda.graph(graph, pool, streams[device], capture_error_mode="thread_local"):
                return graph, step()
        except BaseException:
            _abandon(graph, pool)
            raise
        finally:
            torch.cuda.set_stream(before)  # a capture that cannot be ended leaves its own


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Clean up after a failed capture. torch's allocators do it themselves only if CUDA could end the capture.

    Without this, `empty_cache`, and so the next capture, fails with an internal error (CUDAGraph.cpp: capture_end). The
    captured kernels, which reference NCCL's communicators, are released here if CUDA could end the capture, and by CUDA
    otherwise.
    """
    _ABANDONED.append(graph)
    graph.reset()
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # CUDA could end the capture, and torch has cleaned up
    torch._C._cuda_releasePool(device, pool)


class DecodingGraphs:
    """The graphs of one model in each thread, for the rows of caches that it decoded last. A copy starts without graphs.

    The graphs of a thread share one memory pool.
    """

    def __init__(self) -> None:
        self._of_thread = _ThreadGraphs()
        self._all: weakref.WeakSet[_RowGraphs] = weakref.WeakSet()  # those of all threads

    def __reduce__(self) -> tuple:
        return DecodingGraphs, ()

    @staticmethod
    def handles(ids: Any) -> bool:
        """Return True if there may be graphs for these ids: they are on a GPU."""
        return torch.is_tensor(ids) and ids.device.type == DEVICE

    def logits(self, model: Any, ids: Tensor, mask: Tensor | None, cache: Cache) -> Tensor | None:
        """`model.compute` of a decoding step by graphs: ids (batch, 1) -> new logits (batch, 1, width).

        None: nothing was done, and the step must be computed without a graph. ValueError: the cache is full.
        """
        if not _is_decoding_step(model, ids, mask, cache):
            return None
        longest, capacity = int(cache.lengths[cache.rows].max()) + 1, cache.capacity
        cache.reserve(longest)
        rows = self._rows(model, cache) if cache.capacity == capacity else None
        if rows is None or not rows.can_capture:
            return None
        logits = rows.logits(model, ids, cache, _keys_read(longest, capacity), self._capture)
        if not model.graphs:  # this step could not be captured
            self._of_thread.kept.clear()
        return logits

    def clear(self) -> None:
        """Release the graphs of all threads. None of them may be decoding."""
        for rows in list(self._all):
            rows.clear()
        self._of_thread.kept.clear()

    def _rows(self, model: Any, cache: Cache) -> "_RowGraphs":
        """The graphs for the rows of a cache. Those that are outdated are replaced, and the least recently used dropped."""
        kept = self._of_thread.kept
        rows = next((rows for rows in kept if rows.is_for(cache)), None)
        kept[:] = [other for other in kept if other is not rows][: PLANS - 1]
        if rows is None or not rows.is_current(model, cache):
            rows = _RowGraphs(model, cache)
            self._all.add(rows)
        kept.insert(0, rows)
        return rows

    def _capture(self, step: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """`capture` with the memory pool of a graph of this thread that still exists; torch accepts no other pool."""
        living = (graph for rows in self._of_thread.kept if rows.device == device for graph, *_ in rows.steps.values())
        first = next(living, None)
        return capture(step, device, self._of_thread.streams, first.pool() if first else None)


class _ThreadGraphs(threading.local):
    """The graphs of a thread, most recently used first, and the streams on which it captures."""

    def __init__(self) -> None:
        self.kept: list[_RowGraphs] = []
        self.streams: dict[torch.device, Any] = {}


def _is_decoding_step(model: Any, ids: Tensor, mask: Tensor | None, cache: Cache) -> bool:
    """Return True if a graph could compute this step: see the list at the top."""
    return (
        ids.device.type == DEVICE and model.graphs and mask is None and isinstance(cache.rows, slice)
        and ids.device == model.device == cache.device
        and not torch.is_grad_enabled() and not torch.is_autocast_enabled(DEVICE) and not torch.compiler.is_compiling()
        and not _has_any_global_hook() and not (ids.is_cuda and torch.cuda.is_current_stream_capturing())
    )  # fmt: skip


def _keys_read(longest: int, capacity: int | None) -> int:
    """The number of keys that a graph reads if `longest` are needed; 0 without attention."""
    return 0 if capacity is None else min(capacity, max(KEYS, 1 << (longest - 1).bit_length()))


class _RowGraphs:
    """DecodingGraphs for some rows of a cache: its buffers and, for each number of keys, (graph, logits, what it sends)."""

    def __init__(self, model: Any, cache: Cache):
        assert isinstance(cache.rows, slice)  # `_is_decoding_step`
        self._version, self._layout, self._rows = Version(model), weakref.ref(cache.layout), cache.rows
        self._kept = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]  # so that storages stay
        self._addresses = _addresses(model, cache)
        self.device, self._settings, self.can_capture = model.device, _settings(model), _is_capturable(model)
        with torch.inference_mode(False):  # buffers made in inference mode could not be filled outside of it
            self._ids, self._positions = torch.zeros(2, cache.batch, 1, dtype=torch.int64, device=self.device)
        self.steps: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, collectives.Counter]] = {}
        self._seen: Tally[int] = Tally()

    def is_current(self, model: Any, cache: Cache) -> bool:
        """Return True if the graphs still compute what the model would."""
        return (
            self._version.is_current(model)
            and _settings(model) == self._settings
            and _addresses(model, cache) == self._addresses
        )

    def is_for(self, cache: Cache) -> bool:
        """Return True if the graphs are for these rows of this cache."""
        return self._rows == cache.rows and self._layout() is cache.layout

    def logits(self, model: Any, ids: Tensor, cache: Cache, keys: int, capture: Callable) -> Tensor:
        """A copy of the logits (batch, 1, width) that the graph computes. After the warm-up, the graph is captured."""
        self._ids.copy_(ids)
        if model.config.attentions:
            positions = cache.lengths[cache.rows].unsqueeze(1)
            positions = (
                positions.pin_memory() if self._positions.is_cuda else positions
            )  # so that the host does not wait for the copy
            self._positions.copy_(positions, non_blocking=True)
        if keys not in self.steps:
            self._seen[keys] += 1
            if self._seen[keys] <= WARM_UPS or not self._capture_step(model, cache, keys, capture):
                return step(model, self._ids, self._positions, keys, cache)
        graph, logits, sent = self.steps[keys]
        graph.replay()
        if model.counter is not None:
            model.counter.include(sent)
        return logits.clone()

    def _capture_step(self, model: Any, cache: Cache, keys: int, capture: Callable) -> bool:
        """Capture the step for so many keys. If that fails on any rank, return False on all, and use no more graphs."""
        before, graph, reason = copy.deepcopy(model.counter), None, ""
        try:
            graph, logits = capture(lambda: step(model, self._ids, self._positions, keys, cache), self.device)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            sent = _take_back(model.counter, before)
        failed = _count_failures(model, graph is None)
        if failed or graph is None:
            if graph is not None:
                graph.reset()
            model.graphs = False
            log.warning("decoding without CUDA graphs: %s", reason or "another rank could not capture a step")
            return False
        self.steps[keys] = graph, logits, sent
        return True

    def clear(self) -> None:
        """Release the graphs, even if something still references them, such as the traceback of an exception."""
        for graph, *_ in self.steps.values():
            graph.reset()
        self.steps.clear()


def _count_failures(model: Any, failed: bool) -> int:
    """On how many ranks a capture failed: an all-reduce of one element, uncounted, because it is not part of a token."""
    if model.ranks.group is None:
        return int(failed)
    return int(collectives.all_reduce(torch.tensor([int(failed)], device=model.device), model.ranks.group))


def step(model: Any, ids: Tensor, positions: Tensor, keys: int, cache: Cache) -> Tensor:
    """The captured function: ids, positions (batch, 1), reading the first `keys` keys -> logits (batch, 1, width).

    The logits are this rank's. It updates the cache, except for its lengths. Nothing in it may read an element of a
    tensor on the host, copy one to the GPU, or have a shape that depends on one.
    """
    where = Positions.of_one(positions, keys) if model.config.attentions else None
    return model.compute(ids, Call(None, True, cache.rows, where, same_tokens=True), cache)


def _take_back(counter: collectives.Counter | None, before: collectives.Counter | None) -> collectives.Counter:
    """The counts of a counter since it was copied to `before`; resets it to `before`. Nothing if there is no counter."""
    sent = collectives.Counter()
    if counter is not None and before is not None:
        calls, nbytes = counter.calls - before.calls, counter.nbytes - before.nbytes
        sent = collectives.Counter(calls, nbytes, counter.sent - before.sent)
        counter.reset()
        counter.include(before)
    return sent


def _addresses(model: Any, cache: Cache) -> list[int]:
    """The addresses of the tensors of the model and of the cache."""
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *cache.tensors())]


def _settings(model: Any) -> list:
    """The values that a step depends on besides tensors and modules."""
    return [model.ranks, model.config]


def _is_capturable(model: Any) -> bool:
    """Return True if a step runs only the library's own modules with registered tensors, and ranks sum on the GPU."""
    inside = [module for module in model.modules() if module is not model]
    if any(map(has_plain_tensors, inside)):
        return False
    if any(is_altered(module) or not type(module).__module__.startswith(LIBRARY_MODULES) for module in inside):
        return False
    if any(each.core is not attend_with_cache for each in inside if isinstance(each, Attention)):
        return False
    groups = [ranks.group for ranks in model.place.all_ranks if ranks.group is not None]
    return not callable(model.ranks.format) and all("nccl" in dist.get_backend(group) for group in groups)
