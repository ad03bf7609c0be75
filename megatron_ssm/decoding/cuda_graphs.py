"""The decoding step as a CUDA graph: what the host would launch kernel by kernel is launched at once.

A graph repeats what was done to the same addresses. So it is made for some rows of a cache, and used as long as model and
cache are what they were: what `decoding.Known` knows is compared at every token. What changes from token to token stands
in buffers that are filled first: ids, and, with attention, positions; keys are looked at up to a power of two of them (at
least KEYS, at most the cache's capacity), and the mask is made from the positions on the GPU. There is one graph for each
such number of keys. The first WARM_UPS tokens of each are computed as usual, by the function that is captured then.

A token is decoded as usual where
- its rows do not follow one another, or some begin; gradients, autocast, hooks on all modules, torch.compile are on;
- a module is not the library's, has hooks or a forward of its own, or a shared block another core: no one knows what
  they do on the host. The same for a `reduce` that is the caller's function;
- ranks do not add up by NCCL. (All its formats can be captured: on CUDA none looks at a number, and what `auto` chooses
  for a size was measured in `load`.) Ranks make the same calls to models that are alike, hooks and `graphs` too, and so
  capture the same tokens; a capture that fails on one of them is given up by all;
- the cache has just moved: a hybrid's without max_length, where no room was reserved. `Engine` reserves what a request
  needs, so its cache moves between two requests if at all, and graphs are made anew then.

Which graphs are kept depends on nothing but the calls (not on when a rank collects garbage): those of the PLANS rows used
last. So the graphs of a cache that has gone stay until other rows have been used; they hold addresses, not the cache, and
work in the memory of the others. A graph also holds NCCL's communicator, which cannot be destroyed before it:
`Graphs.clear` gives all of them up, `Model.close` calls it.
"""

import copy
import logging
import threading
import weakref
from collections import Counter as Tally

import torch
import torch.distributed as dist
from torch.nn.modules.module import _has_any_global_hook

from megatron_ssm.layers.cache import Call
from megatron_ssm.layers.shared_attention import Positions, SharedBlock, attend
from sparsefusion.collectives import counted as collectives

from .decode_plan import PLANS, Known
from .native_step import is_altered

DEVICE = "cuda"
KEYS = 256  # the fewest that a graph looks at
WARM_UPS = 2
OURS = ("megatron_ssm.", "torch.nn.modules.container")

_ABANDONED = []  # graphs: the allocator of pinned memory refers to them from then on; they are empty
_CAPTURING = threading.Lock()  # global, for what it guards is: one capture may be underway in a process

log = logging.getLogger("megatron_ssm")


def capture(step, device, streams: dict, pool=None):
    """`step`, a function of nothing, as a graph on a device, and what it returned: tensors that every `replay()` overwrites.

    Nothing is computed now. streams: {device: the stream to capture on}, completed here, so that what libraries keep per
    stream is there once. pool: of another graph that is alive, whose memory this one works in too. Threads capture one
    after the other; meanwhile they may launch work on the GPU, but not wait for all of it (`torch.cuda.synchronize`, with
    which a capture begins): that would fail, and the capture too.
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


def _abandon(graph, pool) -> None:
    """End what torch's allocators began for a capture that failed: they do it themselves only where CUDA can end it.

    Until then `empty_cache`, and so the next capture, is an internal error (CUDAGraph.cpp: capture_end). What was captured,
    and refers to NCCL's communicators, goes now: here where CUDA could end it, else CUDA has thrown it away.
    """
    _ABANDONED.append(graph)
    graph.reset()
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # it was ended
    torch._C._cuda_releasePool(device, pool)


class Graphs:
    """The graphs of one model: each thread's own, for the rows of caches that it decoded last. A copy of it knows none.

    block: the type of the model's blocks. A thread's graphs work in the same memory, one after the other.
    """

    def __init__(self, block):
        self._block, self._own, self._all = block, _Own(), weakref.WeakSet()  # all threads' rows

    def __reduce__(self):
        return Graphs, (self._block,)

    def logits(self, model, ids, mask, cache):
        """`model.compute` of a decoding step, ids (batch, 1), by graphs: (batch, 1, width), the caller's own.

        None: nothing is done, it is to be computed as usual. ValueError if the cache has no room left.
        """
        if not _may_replay(model, ids, mask, cache):
            return None
        longest, capacity = int(cache.lengths[cache.rows].max()) + 1, cache.capacity
        cache.reserve(longest)
        rows = self._rows(model, cache) if cache.capacity == capacity else None
        if rows is None or not rows.captures:
            return None
        logits = rows.logits(model, ids, cache, _keys(longest, capacity), self._capture)
        if not model.graphs:  # one could not be captured
            self._own.kept.clear()
        return logits

    def clear(self) -> None:
        """Give up the graphs of all threads, none of which may be decoding."""
        for rows in list(self._all):
            rows.clear()
        self._own.kept.clear()

    def _rows(self, model, cache) -> "_Rows":
        """Those of a cache, now the last used; what no longer holds and the longest unused go."""
        kept = self._own.kept
        rows = next((rows for rows in kept if rows.known.is_for(cache.rows, cache)), None)
        kept[:] = [other for other in kept if other is not rows][: PLANS - 1]
        if rows is None or not rows.holds(model, cache):
            rows = _Rows(model, self._block, cache)
            self._all.add(rows)
        kept.insert(0, rows)
        return rows

    def _capture(self, step, device):
        """`capture` in the memory of a graph that is alive: torch refuses that of others."""
        alive = (graph for rows in self._own.kept if rows.device == device for graph, *_ in rows.steps.values())
        first = next(alive, None)
        return capture(step, device, self._own.streams, first.pool() if first else None)


class _Own(threading.local):
    """What a thread has: its rows, the last used first, and the streams that it captures on."""

    def __init__(self):
        self.kept, self.streams = [], {}


def _may_replay(model, ids, mask, cache) -> bool:
    """Whether a decoding step is of a kind that a graph may stand for."""
    return (
        ids.device.type == DEVICE and model.graphs and mask is None and isinstance(cache.rows, slice)
        and ids.device == model.device == cache.layers[0].state.device
        and not torch.is_grad_enabled() and not torch.is_autocast_enabled(DEVICE) and not torch.compiler.is_compiling()
        and not _has_any_global_hook() and not (ids.is_cuda and torch.cuda.is_current_stream_capturing())
    )  # fmt: skip


def _keys(longest: int, capacity: int | None) -> int:
    """How many keys a step looks at that needs `longest`; 0 without attention."""
    return 0 if capacity is None else min(capacity, max(KEYS, 1 << (longest - 1).bit_length()))


class _Rows:
    """Graphs for some rows of a cache: buffers and, by the number of keys, a graph, its logits and what it sends."""

    def __init__(self, model, block, cache):
        self.known = Known(model, block, cache.rows, cache, _tensors)
        self.device, self._numbers, self.captures = model.device, _numbers(model), _is_capturable(model)
        with torch.inference_mode(False):  # or they could not be filled outside of it
            self._ids, self._positions = torch.zeros(2, cache.batch, 1, dtype=torch.int64, device=self.device)
        self.steps, self._seen = {}, Tally()

    def holds(self, model, cache) -> bool:
        """Whether graphs still do what the model would."""
        return self.known.holds(cache) and _numbers(model) == self._numbers

    def logits(self, model, ids, cache, keys: int, capture):
        """(batch, 1, width): a copy of what the graph computes, which is captured if it is time."""
        self._ids.copy_(ids)
        if model.shared:
            positions = cache.lengths[cache.rows].unsqueeze(1)
            positions = positions.pin_memory() if self._positions.is_cuda else positions  # the host does not wait
            self._positions.copy_(positions, non_blocking=True)
        if keys not in self.steps:
            self._seen[keys] += 1
            if self._seen[keys] <= WARM_UPS or not self._add(model, cache, keys, capture):
                return step(model, self._ids, self._positions, keys, cache)
        graph, logits, sent = self.steps[keys]
        graph.replay()
        if model.counter is not None:
            model.counter.include(sent)
        return logits.clone()

    def _add(self, model, cache, keys, capture) -> bool:
        """Capture the step of so many keys; False, and no more graphs of this model, if that fails on one of the ranks."""
        before, graph, reason = copy.deepcopy(model.counter), None, None
        try:
            graph, logits = capture(lambda: step(model, self._ids, self._positions, keys, cache), self.device)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            sent = _taken_back(model.counter, before)
        if _failures(model, graph is None):
            if graph is not None:
                graph.reset()
            model.graphs = False
            log.warning("decoding without CUDA graphs: %s", reason or "another rank could not capture a step")
            return False
        self.steps[keys] = graph, logits, sent
        return True

    def clear(self) -> None:
        """Give up its graphs, also where something still refers to them: an exception's traceback, for one."""
        for graph, *_ in self.steps.values():
            graph.reset()
        self.steps.clear()


def _failures(model, failed: bool) -> int:
    """On how many ranks a capture failed. One number is sent, if there are others; no token needs it: it is not counted."""
    if model.ranks.group is None:
        return int(failed)
    return int(collectives.all_reduce(torch.tensor([int(failed)], device=model.device), model.ranks.group))


def step(model, ids, positions, keys: int, cache):
    """What is captured: one token of each row, ids and positions (batch, 1), looking at the first `keys` keys.

    (batch, 1, width), this rank's logits. The cache is updated but for its lengths. Nothing in it may look at a number,
    bring one to the GPU, or have a shape that depends on one.
    """
    where = Positions.of_one(positions, keys) if model.shared else None
    return model.compute(ids, Call(None, True, cache.rows, where), cache)


def _taken_back(counter, before) -> collectives.Counter:
    """What a counter (or None) counted since it was as `before`, which it is again."""
    sent = collectives.Counter()
    if counter is not None:
        calls, nbytes = counter.calls - before.calls, counter.nbytes - before.nbytes
        sent = collectives.Counter(calls, nbytes, counter.sent - before.sent)
        counter.reset()
        counter.include(before)
    return sent


def _tensors(cache) -> list:
    return [tensor for layer in cache.layers for tensor in layer.tensors()]


def _numbers(model) -> list:
    """What steps depend on beside tensors, and `Known` does not compare."""
    own = [(block.core, block.activation, block.rope_theta, block.head_dim) for block in model.shared]
    norms = [norm.eps for block in model.shared for norm in (block.norm, block.mlp_norm)]
    return [own, norms, model.norm_f.eps, model.ranks, model.training]


def _is_capturable(model) -> bool:
    """Whether all that a step runs is the library's, and ranks add up on the GPU."""
    inside = [module for module in model.modules() if module is not model]
    if any(is_altered(module) or not type(module).__module__.startswith(OURS) for module in inside):
        return False
    if any(block.core is not attend for block in inside if type(block) is SharedBlock):
        return False
    groups = [ranks.group for ranks in (model.ranks, model.head_ranks) if ranks.group is not None]
    return not callable(model.ranks.format) and all("nccl" in dist.get_backend(group) for group in groups)
