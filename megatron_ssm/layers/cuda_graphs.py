"""Decoding with CUDA graphs: for each token, the host launches one graph instead of many kernels.

A graph repeats its kernels on fixed addresses. It is captured for some rows of a cache, and is used until the model or the
cache changes; `parallel.tracked` and the addresses of tensors show changes. Buffers hold the values that differ between
tokens: the token ids and, with attention, the positions. The number of keys that attention reads is rounded up to a power of
two (at least MIN_KEYS, at most the capacity of the cache), and each number of keys has its own graph. The mask is computed
from the positions on the GPU. Before a capture, WARM_UPS tokens are computed without a graph by the same function.
Captured code must not read a value on the host, copy one to the GPU, or have a shape that depends on one.

A token is decoded without a graph if

- its rows are not consecutive, or a row is empty;
- gradients, autocast, global hooks or torch.compile are on;
- a module has hooks, replaced methods or a class outside of this library, a shared block has another attention function, or
  `load(reduce=...)` is a function of the user: these might compute on the host;
- a group of ranks does not use NCCL. All wire formats can be captured: none depends on the values, and `auto` has already
  been decided when the model was loaded. All ranks make the same calls, so they capture the same tokens. If a capture fails
  on one rank, no rank uses graphs any more;
- the cache has just been reallocated, in a hybrid model without max_length. `Engine` reserves the space of a request, so its
  cache is reallocated only between requests, and graphs are then captured again.

Graphs are kept for the ROW_SETS sets of rows that were used last. This depends on the calls only, not on the garbage
collection of a rank, so the graphs of a deleted cache stay until other rows have been used. They hold addresses, not the
cache, and share a memory pool. NCCL's communicator cannot be destroyed before the graphs that were captured with it:
`Model.close` releases all graphs by `DecodingGraphs.clear`.
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

from commfabric.collectives import counted as collectives
from megatron_ssm.parallel.layers import is_altered
from megatron_ssm.parallel.tracked import Version

from .attention import Attention, attend_with_cache
from .cache import Cache
from .call import Call, Positions

DEVICE = "cuda"
ROW_SETS = 4  # the number of sets of rows whose graphs are kept, per model and thread
MIN_KEYS = 256  # the smallest number of keys that a graph reads
WARM_UPS = 2  # the number of tokens before a capture
LIBRARY_MODULES = ("megatron_ssm.", "torch.nn.modules.container")  # their classes can be captured

_ABANDONED: list = []  # empty graphs, to which the allocator of pinned memory keeps references
_CAPTURING = threading.Lock()  # a process can make one capture at a time

log = logging.getLogger("megatron_ssm")


def capture(
    step: Callable[[], Tensor], device: torch.device, streams: dict[torch.device, Any], pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a function. Returns (graph, result); each `replay()` of the graph writes the tensor of the result.

    The capture itself computes nothing. Threads capture one after the other. Meanwhile, other threads may launch work on the
    GPU, but `torch.cuda.synchronize` would fail, and the capture with it.

    streams: {device: stream for captures}; a missing stream is added. Libraries keep data per stream, so reuse them. pool:
    the memory pool of another living graph, to be shared.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    with _CAPTURING, torch.cuda.device(device):
        previous_stream = torch.cuda.current_stream()
        if device not in streams:
            streams[device] = torch.cuda.Stream()
        try:
            with torch.cuda.graph(graph, pool, streams[device], capture_error_mode="thread_local"):
                return graph, step()
        except BaseException:
            _abandon(graph, pool)
            raise
        finally:
            torch.cuda.set_stream(previous_stream)  # a capture that CUDA could not end does not restore it


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Clean up after a failed capture.

    torch does this only if CUDA could end the capture. Otherwise `empty_cache`, and therefore the next capture, fails with
    an internal error (CUDAGraph.cpp: capture_end). The captured kernels reference NCCL's communicators; `reset` releases
    them if CUDA could end the capture, and CUDA has released them otherwise.
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
    """The graphs of one model, separate for each thread. The graphs of a thread share a memory pool.

    A copy starts without graphs.
    """

    def __init__(self) -> None:
        self._in_thread = _ThreadGraphs()
        self._in_all_threads: weakref.WeakSet[_RowGraphs] = weakref.WeakSet()

    def __reduce__(self) -> tuple:
        return DecodingGraphs, ()

    def logits(self, model: Any, ids: Tensor, mask: Tensor | None, cache: Cache) -> Tensor | None:
        """`model.compute` of a decoding step by a graph: ids (batch, 1) -> new logits (batch, 1, width).

        Returns None, with nothing done, if no graph can compute the step. Raises ValueError if the cache is full.
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
            self._in_thread.recent.clear()
        return logits

    def clear(self) -> None:
        """Release the graphs of all threads. No thread may be decoding."""
        for rows in list(self._in_all_threads):
            rows.clear()
        self._in_thread.recent.clear()

    def _rows(self, model: Any, cache: Cache) -> "_RowGraphs":
        """The graphs for the rows of a cache. Replaces outdated graphs, and drops the least recently used ones."""
        recent = self._in_thread.recent
        rows = next((rows for rows in recent if rows.is_for(cache)), None)
        recent[:] = [other for other in recent if other is not rows][: ROW_SETS - 1]
        if rows is None or not rows.is_current(model, cache):
            rows = _RowGraphs(model, cache)
            self._in_all_threads.add(rows)
        recent.insert(0, rows)
        return rows

    def _capture(self, step: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """`capture` with the memory pool of a living graph of this thread; torch accepts no other existing pool."""
        recent = self._in_thread.recent
        living = (graph for rows in recent if rows.device == device for graph, *_ in rows.graphs_by_keys.values())
        first = next(living, None)
        return capture(step, device, self._in_thread.streams, first.pool() if first else None)


class _ThreadGraphs(threading.local):
    """The graphs of a thread, the most recently used first, and the streams on which it captures."""

    def __init__(self) -> None:
        self.recent: list[_RowGraphs] = []
        self.streams: dict[torch.device, Any] = {}


def _is_decoding_step(model: Any, ids: Tensor, mask: Tensor | None, cache: Cache) -> bool:
    """Return True if a graph may compute this step: the conditions of the module's docstring that concern the call, not the
    model.
    """
    return (
        ids.device.type == DEVICE and model.graphs and mask is None and isinstance(cache.rows, slice)
        and ids.device == model.device == cache.device
        and not torch.is_grad_enabled() and not torch.is_autocast_enabled(DEVICE) and not torch.compiler.is_compiling()
        and not _has_any_global_hook() and not (ids.is_cuda and torch.cuda.is_current_stream_capturing())
    )  # fmt: skip


def _keys_read(longest: int, capacity: int | None) -> int:
    """The number of keys that a graph reads if the longest row has `longest` keys; 0 without attention."""
    return 0 if capacity is None else min(capacity, max(MIN_KEYS, 1 << (longest - 1).bit_length()))


class _RowGraphs:
    """The graphs for some rows of a cache: {number of keys: (graph, logits, counter of the bytes that the graph sends)}.

    can_capture: True if the steps of the model can be captured.
    """

    def __init__(self, model: Any, cache: Cache):
        assert isinstance(cache.rows, slice)  # `_is_decoding_step`
        self._version, self._layout, self._rows = Version(model), weakref.ref(cache.layout), cache.rows
        self._alive = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]  # keep their storages
        self._addresses = _addresses(model, cache)
        self.device, self._settings, self.can_capture = model.device, _settings(model), _is_capturable(model)
        with torch.inference_mode(False):  # inference tensors could not be filled outside of inference mode
            self._ids, self._positions = torch.zeros(2, cache.batch, 1, dtype=torch.int64, device=self.device)
        self.graphs_by_keys: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, collectives.Counter]] = {}
        self._warm_ups: Tally[int] = Tally()

    def is_current(self, model: Any, cache: Cache) -> bool:
        """Return True if the model and the cache have not changed since the capture."""
        return (
            self._version.is_current(model)
            and _settings(model) == self._settings
            and _addresses(model, cache) == self._addresses
        )

    def is_for(self, cache: Cache) -> bool:
        return self._rows == cache.rows and self._layout() is cache.layout

    def logits(self, model: Any, ids: Tensor, cache: Cache, keys: int, capture: Callable) -> Tensor:
        """The logits (batch, 1, width) of ids (batch, 1). After the warm-up, they are computed by a graph."""
        self._ids.copy_(ids)
        if model.config.attentions:
            positions = cache.lengths[cache.rows].unsqueeze(1)  # (batch, 1)
            if self._positions.is_cuda:  # the host does not wait for a copy from pinned memory
                positions = positions.pin_memory()
            self._positions.copy_(positions, non_blocking=True)
        if keys not in self.graphs_by_keys:
            self._warm_ups[keys] += 1
            if self._warm_ups[keys] <= WARM_UPS or not self._capture_step(model, cache, keys, capture):
                return decoding_step(model, self._ids, self._positions, keys, cache)
        graph, logits, sent = self.graphs_by_keys[keys]
        graph.replay()
        if model.counter is not None:
            model.counter.include(sent)
        return logits.clone()

    def _capture_step(self, model: Any, cache: Cache, keys: int, capture: Callable) -> bool:
        """Capture the step for `keys` keys. If this fails on any rank, all ranks return False, and stop using graphs."""
        counter_before, graph, reason = copy.deepcopy(model.counter), None, ""
        try:
            graph, logits = capture(lambda: decoding_step(model, self._ids, self._positions, keys, cache), self.device)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            sent = _reset_counter(model.counter, counter_before)
        failures = _count_failures(model, graph is None)
        if failures or graph is None:
            if graph is not None:
                graph.reset()
            model.graphs = False
            log.warning("decoding without CUDA graphs: %s", reason or "another rank could not capture a step")
            return False
        self.graphs_by_keys[keys] = graph, logits, sent
        return True

    def clear(self) -> None:
        """Release the graphs, even if something still references them, such as the traceback of an exception."""
        for graph, *_ in self.graphs_by_keys.values():
            graph.reset()
        self.graphs_by_keys.clear()


def _count_failures(model: Any, failed: bool) -> int:
    """The number of ranks on which a capture failed. Sends an all-reduce of one element, which is not counted."""
    if model.ranks.group is None:
        return int(failed)
    return int(collectives.all_reduce(torch.tensor([int(failed)], device=model.device), model.ranks.group))


def decoding_step(model: Any, ids: Tensor, positions: Tensor, keys: int, cache: Cache) -> Tensor:
    """The captured function: ids, positions (batch, 1) -> this rank's logits (batch, 1, width).

    Attention reads the first `keys` keys. Updates the cache, except for its lengths. No operation may read an element of a
    tensor on the host, copy one to the GPU, or have a shape that depends on one.
    """
    described = Positions.of_one(positions, keys) if model.config.attentions else None
    return model.compute(ids, Call(None, True, cache.rows, described, same_tokens=True), cache)


def _reset_counter(counter: collectives.Counter | None, before: collectives.Counter | None) -> collectives.Counter:
    """Reset a counter to its earlier copy `before`. Returns the counts in between; zeros without a counter."""
    sent = collectives.Counter()
    if counter is not None and before is not None:
        calls, nbytes = counter.calls - before.calls, counter.nbytes - before.nbytes
        sent = collectives.Counter(calls, nbytes, counter.sent - before.sent)
        counter.reset()
        counter.include(before)
    return sent


def _addresses(model: Any, cache: Cache) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *cache.tensors())]


def _settings(model: Any) -> list:
    """The values, apart from tensors and modules, that a step depends on."""
    return [model.ranks, model.config]


def _is_capturable(model: Any) -> bool:
    """Return True if the model has only unmodified modules of this library, and its groups use NCCL."""
    modules = [module for module in model.modules() if module is not model]
    if any(is_altered(module) or not type(module).__module__.startswith(LIBRARY_MODULES) for module in modules):
        return False
    if any(module.core is not attend_with_cache for module in modules if isinstance(module, Attention)):
        return False
    groups = [ranks.group for ranks in model.place.all_ranks if ranks.group is not None]
    return not callable(model.ranks.format) and all("nccl" in dist.get_backend(group) for group in groups)
