"""Decoding by graphs, without a GPU. Oracle: the same model without graphs, on a cache of its own.

A list of torch operations and their tensors replaces the CUDA graph. Like a CUDA graph, it runs the Python code between
the operations only once, leaves all tensors unchanged during the capture, and refuses what CUDA cannot capture.
"""

import copy
import dataclasses
import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ssm import Engine, generate, load
from megatron_ssm.cli import commands
from megatron_ssm.cli.main import parser
from megatron_ssm.layers import cuda_graphs, tapes
from megatron_ssm.layers.attention import attend_with_cache
from megatron_ssm.layers.call import Positions
from megatron_ssm.layers.families import read
from megatron_ssm.layers.state import State
from megatron_ssm.model.model import Model
from megatron_ssm.parallel import groups
from megatron_ssm.parallel.layers import VocabularyParallel
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.tracked import Version
from serving import checkpoint, families, hooked, hooked_anew, ids, on_ranks, on_ranks_of_families

READS_VALUES = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::lift_fresh"}
SEQUENCES, MORE = ids(4, 9), ids(4, 14, seed=4)
LENGTHS = (9, 4, 1, 6)
MASK = (torch.arange(9) >= 9 - torch.tensor(LENGTHS).unsqueeze(1)).long()
MAX_LENGTH = 24


class CaptureRules(TorchDispatchMode):
    """Refuses operations that read values on the host, whose shapes depend on values, or that mix devices."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        tensors = [t for t in tree_leaves((args, kwargs, result)) if torch.is_tensor(t)]
        indices = [t for t in tree_leaves(args[1:]) if torch.is_tensor(t)] if name.startswith("aten::index") else []
        if name in READS_VALUES or len({t.device for t in tensors}) > 1 or any(t.dtype is torch.bool for t in indices):
            raise RuntimeError(f"{function} cannot be captured")
        return result


class RecordedGraph(CaptureRules):
    """A graph whose `replay` repeats operations on the same tensors. Run a step inside `with` to record it, then `undo`.

    memory: the identifier of its memory pool.
    """

    def __init__(self, memory):
        super().__init__()
        self.calls, self.before, self.replays, self.memory, self.is_reset = [], [], 0, memory, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        positional = zip(function._schema.arguments, args, strict=False)
        named = {argument.name: argument for argument in function._schema.arguments}
        pairs = [*positional, *((named[name], value) for name, value in kwargs.items())]
        written = [value for argument, value in pairs if argument.alias_info and argument.alias_info.is_write]
        self.before += [(tensor, tensor.clone()) for tensor in written]
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.calls.append((function, args, kwargs, result))
        return result

    def undo(self):
        for tensor, numbers in reversed(self.before):
            tensor.copy_(numbers)

    def replay(self):
        assert not self.is_reset
        self.replays += 1
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for tensor, numbers in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if torch.is_tensor(tensor) and tensor.data_ptr() != numbers.data_ptr():
                    tensor.copy_(numbers)

    def pool(self):
        assert not self.is_reset
        return self.memory

    def reset(self):
        self.is_reset = True


def alive(captured):
    """[whether a captured graph exists and has not been reset, for each of them]"""
    return [graph() is not None and not graph().is_reset for graph in captured]


@pytest.fixture
def captured(monkeypatch):
    """Weak references to the graphs that are captured, on the CPU and with at least 4 keys."""
    captured = []

    def capture(step, device, streams, pool=None):
        memory = id(streams)  # one for each thread and model
        shared = [graph().memory for graph, lives in zip(captured, alive(captured), strict=True) if lives]
        assert pool == (memory if memory in shared else None)
        with (graph := RecordedGraph(memory)):
            logits = step()
        graph.undo()
        captured.append(weakref.ref(graph))
        return graph, logits.fill_(float("nan"))

    monkeypatch.setattr(cuda_graphs, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_graphs, "MIN_KEYS", 4)
    monkeypatch.setattr(tapes, "may_use_kernels", lambda: False)
    monkeypatch.setattr(cuda_graphs, "capture", capture)
    return captured


def loaded(family, **options):
    return load(checkpoint(family), dtype=torch.float64, **options)


@torch.no_grad()
def two_caches(model, rows=6, max_length=MAX_LENGTH):
    """Two caches whose first four rows contain the unmasked ends of SEQUENCES: for the graphs and for the oracle."""
    cache = model.new_cache(rows, max_length)
    model(SEQUENCES, MASK, cache.select(range(4)))
    return cache, copy.deepcopy(cache)


@torch.no_grad()
def decode_and_compare(model, caches, rows, tokens):
    """The logits of one token per row; asserts that they and the cache equal the oracle's."""
    cache, other = caches
    logits = model(tokens, None, cache.select(rows))
    usual, usual.graphs = copy.deepcopy(model), False
    assert_near(logits, usual(tokens, None, other.select(rows)))
    assert cache.lengths.equal(other.lengths)
    for tensor, oracle in zip(cache.tensors(), other.tensors(), strict=True):
        assert_near(tensor, oracle)
    return logits


def assert_near(found, expected):
    """Assert equality up to rounding."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 if found.dtype == torch.float64 else 1e-4)


def replays(captured):
    return sum(graph().replays for graph in captured if graph() is not None)


# What is captured


def on_meta(family, size, monkeypatch):
    """The arguments (model, ids, positions, keys, cache) of a step on meta tensors; the model is on rank 1 of `size`."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # autocast does not support the meta device
    for name in ("all_reduce_exact", "all_reduce_in_format"):
        monkeypatch.setattr(Ranks, name, lambda ranks, tensor, group: tensor.clone())
    monkeypatch.setattr(Ranks, "reduce_beside", lambda ranks, tensor, column, group: (tensor.clone(), column.clone()))
    ranks = Ranks() if size == 1 else Ranks("group", 1, size)
    model = Model(read(checkpoint(family)), ranks, device="meta")
    tokens = torch.zeros(3, 1, dtype=torch.int64, device="meta")
    return model, tokens, tokens.clone(), 8, model.new_cache(5, 12).select([1, 2, 3])


@families
@pytest.mark.parametrize("size", (1, 2))
@torch.no_grad()
def test_a_step_neither_reads_values_nor_moves_them(family, size, monkeypatch):
    given = on_meta(family, size, monkeypatch)
    with CaptureRules():
        logits = cuda_graphs.decoding_step(*given)
    assert logits.shape == (3, 1, given[0].embeddings.width)


def looks_for_padding(patch):
    whole = State.append
    patch(State, "append", lambda *given, **new: whole(*given[:4], True, **new))


def positions_from_the_host(patch):
    of_one = Positions.of_one
    patch(Positions, "of_one", lambda new, keys: of_one(torch.zeros(3, 1, dtype=torch.int64).to(new.device), keys))


def as_many_keys_as_there_are(patch):
    of_one = Positions.of_one
    patch(Positions, "of_one", lambda new, keys: of_one(new, int(new.max()) + 1))


def checks_ids(patch):
    embed = VocabularyParallel.embed
    patch(VocabularyParallel, "embed", lambda layer, ids: embed(layer, ids) if ids.min() >= 0 else None)


def copies_to_the_host(patch):
    embed = VocabularyParallel.embed
    patch(VocabularyParallel, "embed", lambda layer, ids: (ids.cpu(), embed(layer, ids))[1])


def rows_by_mask(patch):
    whole = State.__getitem__
    patch(State, "__getitem__", lambda *given: [held := whole(*given), held[held.flatten(1)[:, 0] > 0]][0])


OFFENDERS = (
    looks_for_padding, positions_from_the_host, as_many_keys_as_there_are, checks_ids, copies_to_the_host, rows_by_mask,
)  # fmt: skip


@pytest.mark.parametrize("offender", OFFENDERS)
@torch.no_grad()
def test_a_step_that_reads_or_moves_values_is_refused(offender, monkeypatch):
    given = on_meta("zamba2", 1, monkeypatch)
    offender(monkeypatch.setattr)
    with CaptureRules(), pytest.raises(Exception, match="cannot be captured|meta"):
        cuda_graphs.decoding_step(*given)


# What graphs compute


@families
@pytest.mark.parametrize("rows", ([1], [1, 2, 3], [0, 1, 2, 3]))
def test_graphs_decode_as_the_model_does(family, rows, captured):
    """Rows have different lengths, the number of keys grows several times, and the caller may keep the logits."""
    model = loaded(family)
    caches = two_caches(model)
    kept = [decode_and_compare(model, caches, rows, MORE[rows, t : t + 1]) for t in range(14)]
    copies = [logits.clone() for logits in kept]
    decode_and_compare(model, caches, rows, MORE[rows, :1])
    assert all(map(torch.equal, kept, copies))
    lengths = [max(LENGTHS[row] for row in rows) + t + 1 for t in range(15)]
    keys = [cuda_graphs._keys_read(length, caches[0].capacity) for length in lengths]
    assert replays(captured) == sum(max(0, keys.count(each) - 2) for each in {*keys})
    assert len(captured) == sum(keys.count(each) > 2 for each in {*keys}) >= (2 if model.shared else 1)


@pytest.mark.parametrize("longest, keys", ((1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 24), (24, 24)))
def test_number_of_keys_read(longest, keys, captured):
    assert cuda_graphs._keys_read(longest, MAX_LENGTH) == keys and cuda_graphs._keys_read(longest, None) == 0


@families
def test_rows_may_be_exchanged_between_two_tokens(family, captured):
    """Graphs stay valid, and use the new contents, after rows are forked, reordered, reset, prefilled and restored."""
    model = loaded(family)
    caches, tokens = two_caches(model), iter(MORE.repeat(1, 3).T.unsqueeze(2))
    snapshots = [cache.snapshot(1) for cache in caches]

    def decode_four():
        for _ in range(4):
            decode_and_compare(model, caches, range(4), next(tokens))

    def restart_row(cache):
        cache.reset(2)
        with torch.no_grad():
            model(SEQUENCES[:1, :3], None, cache.select([2]))

    def on_both(change):
        for cache, snapshot in zip(caches, snapshots, strict=True):
            change(cache, snapshot)
        decode_four()

    decode_four()
    on_both(lambda cache, _: cache.fork(0, 2))
    on_both(lambda cache, _: cache.reorder([3, 3, 0, 1, 5, 0]))
    on_both(lambda cache, _: restart_row(cache))
    on_both(lambda cache, snapshot: [cache.restore(row, snapshot) for row in (0, 1, 2, 3)])
    assert len(captured) <= 3 and replays(captured) >= 10


def moved(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def replaced(model):
    model.layers[1].mixer.D = torch.nn.Parameter(model.layers[1].mixer.D + 1)


def called_otherwise(model):
    forward = model.layers[1].mixer.out_proj.forward
    model.layers[1].mixer.out_proj.forward = lambda x: 2 * forward(x)


def of_another_kind(model):
    class Doubled(type(model.layers[0])):
        def forward(self, *given):
            return 2 * super().forward(*given)

    model.layers[0].__class__ = Doubled


def with_other_eps(model):
    model.layers[1].norm.eps = 0.5


def with_another_last_eps(model):
    model.norm_f.eps = 0.5


def untied(model):
    model.lm_head = copy.deepcopy(model.embeddings)
    model.lm_head.weight.data.mul_(3)
    model.config = dataclasses.replace(model.config, tie_embeddings=False)


def with_a_plain_bias(model):
    out_proj = model.shared[0].o_proj
    out_proj.bias = torch.linspace(-1, 1, len(out_proj.weight), dtype=out_proj.weight.dtype)


def with_another_core(model):
    for block in model.shared:
        block.core = lambda *given, **named: 1 + attend_with_cache(*given, **named)


def edited(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


GRAPHS_STAY_VALID = (edited,)
GRAPHS_ARE_RECAPTURED = (moved, replaced, with_other_eps, with_another_last_eps, untied, with_a_plain_bias)
NO_GRAPHS = (hooked, hooked_anew, called_otherwise, of_another_kind, with_another_core)


@pytest.mark.parametrize("change", (*GRAPHS_STAY_VALID, *GRAPHS_ARE_RECAPTURED, *NO_GRAPHS))
def test_a_model_may_change_between_two_tokens(change, captured):
    model = loaded("zamba2")
    caches = two_caches(model)
    for t in range(4):
        decode_and_compare(model, caches, [0, 1], MORE[:2, t : t + 1])
    assert len(captured) == 1 and replays(captured) == 2
    unchanged = copy.deepcopy(model)(MORE[:2, 4:5], None, copy.deepcopy(caches[0]).select([0, 1]))
    change(model)
    logits = [decode_and_compare(model, caches, [0, 1], MORE[:2, t : t + 1]) for t in range(4, 7)]
    assert (logits[0] - unchanged).abs().max() > 1e-3
    assert len(captured) == 1 + (change in GRAPHS_ARE_RECAPTURED)
    assert replays(captured) == (5 if change in GRAPHS_STAY_VALID else 1 if change in GRAPHS_ARE_RECAPTURED else 0)


def test_no_graphs_with_hooks_gradients_or_autocast(captured):
    model = loaded("mamba2")
    caches = two_caches(model)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        for t in range(4):
            decode_and_compare(model, caches, [0, 1], MORE[:2, t : t + 1])
    finally:
        handle.remove()
    for t in range(4):
        model(MORE[:2, t : t + 1], None, caches[0].select([0, 1]))  # with gradients
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            model(MORE[:2, t : t + 1], None, caches[0].select([0, 1]))
    model.graphs = False
    for t in range(4):
        with torch.no_grad():
            model(MORE[:2, t : t + 1], None, caches[0].select([0, 1]))
    assert not captured and not loaded("mamba2", graphs=False).graphs


@pytest.mark.parametrize("family", ("mamba2", "zamba2"))
def test_a_step_that_cannot_be_captured(family, captured, caplog, monkeypatch):
    """The model decodes without graphs from then on and logs the reason once; earlier graphs do not matter."""
    model = loaded(family)
    caches = two_caches(model)
    for t in range(3):
        decode_and_compare(model, caches, [0, 1], MORE[:2, t : t + 1])
    assert len(captured) == 1 and model.graphs
    mixer = type(model.layers[1].mixer)
    mix = mixer.mix
    monkeypatch.setattr(mixer, "mix", lambda this, x, *given: mix(this, x * bool(x.sum() != 0), *given))
    with caplog.at_level(logging.WARNING, "megatron_ssm"):
        for t in range(3, 9):
            decode_and_compare(model, caches, [2, 3], MORE[2:4, t : t + 1])
    assert [record.message for record in caplog.records] == [
        "decoding without CUDA graphs: RuntimeError: aten._local_scalar_dense.default cannot be captured"
    ]
    assert not model.graphs and len(captured) == 1 and captured[0]() is None


def replace_torch_cuda(patch, graph, end=None):
    """Replace torch.cuda: `graph` opens a capture, `end(device, pool)` ends it. Returns (calls, [current stream])."""
    events, active = [], ["ours"]

    @contextmanager
    def on_a_stream(_, pool, stream, capture_error_mode):
        active[0] = stream
        events.append((pool, capture_error_mode))
        with graph():
            yield

    def ended(*given):
        events.append(("end", *given))
        if end is not None:
            end(*given)

    stubs = dict(
        CUDAGraph=lambda: SimpleNamespace(reset=lambda: events.append("reset")), graph=on_a_stream,
        graph_pool_handle=lambda: (0, 1), device=lambda device: nullcontext(), current_device=lambda: 0,
        current_stream=lambda: active[0], Stream=lambda: "another", set_stream=lambda stream: active.__setitem__(0, stream),
    )  # fmt: skip
    for name, stub in stubs.items():
        patch(torch.cuda, name, stub)
    patch(torch._C, "_cuda_endAllocateToPool", ended, raising=False)
    patch(torch._C, "_cuda_releasePool", lambda *given: events.append(("release", *given)), raising=False)
    patch(cuda_graphs, "_ABANDONED", [])
    return events, active


@pytest.mark.parametrize("fails, ended", ((False, True), (True, True), (True, False)))
def test_a_failed_capture_restores_torch(fails, ended, monkeypatch):
    """The previous stream is current again, the graph is reset, and the allocator's pool is ended once and released."""

    def end(device, pool):
        if ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    events, active = replace_torch_cuda(monkeypatch.setattr, nullcontext, end)
    streams = {}
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        assert cuda_graphs.capture(lambda: 1 // (not fails), "cuda:0", streams)[1] == 1
    expected = ["reset", ("end", 0, (0, 1)), ("release", 0, (0, 1))] if fails else []
    assert events == [((0, 1), "thread_local"), *(expected[:2] if ended else expected)]
    assert active == ["ours"] and streams == {"cuda:0": "another"} and len(cuda_graphs._ABANDONED) == fails


def test_threads_capture_one_after_the_other(monkeypatch):
    """A failed capture releases the lock too."""
    held = []

    @contextmanager
    def graph():
        held.append(cuda_graphs._CAPTURING.locked())
        yield

    replace_torch_cuda(monkeypatch.setattr, graph)
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(cuda_graphs.capture, lambda n=n: 1 // (n % 4), "cuda:0", {}) for n in range(12)]
    assert [future.exception() is not None for future in futures] == [True, False, False, False] * 3
    assert held == [True] * 12 and not cuda_graphs._CAPTURING.locked()


# Closing


@torch.no_grad()
def test_closing_releases_the_graphs_of_all_threads(captured):
    """Even graphs that are still referenced. The model then decodes without graphs; a copy of it keeps its own graphs."""
    model = loaded("mamba2")
    other = copy.deepcopy(model)
    ours, of_thread, of_copy = (two_caches(model) for _ in range(3))

    def decode(model, caches):
        for t in range(3):
            decode_and_compare(model, caches, [0], MORE[:1, t : t + 1])

    with ThreadPoolExecutor(1) as thread:
        decode(model, ours)
        thread.submit(decode, model, of_thread).result()
        decode(other, of_copy)
        held = [graph() for graph in captured]
        model.close()
        model.close()
        assert [graph.is_reset for graph in held] == [True, True, False]
        decode(model, ours)
        thread.submit(decode, model, of_thread).result()
        decode(other, of_copy)
    assert len(captured) == 3 and not model.graphs and [graph.replays for graph in held] == [1, 1, 4]


# Caches


def test_a_growing_cache_has_no_graphs_until_it_stays_in_place(captured, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MIN_KEYS", 32)
    model = loaded("zamba")
    caches = two_caches(model, max_length=None)
    for t in range(5):
        decode_and_compare(model, caches, [0, 1], MORE[:2, t : t + 1])
    assert not captured
    for length in (20, 24):
        for cache in caches:
            cache.reserve(length)
        for t in range(5, 9):
            decode_and_compare(model, caches, [0, 1], MORE[:2, t : t + 1])
    assert len(captured) == 2 and captured[0]() is None and replays(captured) >= 1


def test_no_room_left_is_an_error_before_anything_changes(captured):
    model = loaded("zamba2")
    caches = two_caches(model, max_length=12)
    for t in range(3):
        decode_and_compare(model, caches, [0], MORE[:1, t : t + 1])
    with torch.no_grad(), pytest.raises(ValueError, match="13 tokens does not fit into a cache of max_length=12"):
        model(MORE[:1, :1], None, caches[0].select([0]))
    decode_and_compare(model, caches, [1], MORE[:1, :1])


def test_only_graphs_of_recently_used_rows_are_kept(captured):
    model = loaded("mamba")
    caches = two_caches(model)
    chosen = [[0], [1], [2], [3], [0, 1]]
    for _ in range(3):
        for rows in chosen[:4]:
            decode_and_compare(model, caches, rows, MORE[rows, :1])
    assert len(captured) == 4 and all(graph() is not None for graph in captured)
    decode_and_compare(model, caches, [0], MORE[:1, 1:2])
    decode_and_compare(model, caches, [0, 1], MORE[:2, 2:3])
    assert [graph() is not None for graph in captured] == [True, False, True, True]
    decode_and_compare(model, caches, [1, 3], MORE[:2, 2:3])  # rows that are not adjacent have no graphs
    decode_and_compare(model, caches, [4, 3], MORE[:2, 2:3])
    assert [graph() is not None for graph in captured] == [True, False, True, True]


@torch.no_grad()
def test_models_and_caches_are_freed_at_once(captured):
    """The graphs of a freed cache are freed when PLANS others have been used. Each thread has its own graphs."""
    model, layers = loaded("mamba"), []
    for _ in range(cuda_graphs.ROW_SETS + 1):
        caches = two_caches(model)
        for t in range(3):
            decode_and_compare(model, caches, [0], MORE[:1, t : t + 1])
        layers.append(weakref.ref(caches[0].states["layers.0.mixer"]))
    assert [layer() is not None for layer in layers] == [False] * cuda_graphs.ROW_SETS + [True]
    assert alive(captured) == [False] + [True] * cuda_graphs.ROW_SETS
    thread = threading.Thread(target=decode_and_compare, args=(model, caches, [0], MORE[:1, :1]))
    thread.start()
    thread.join()
    assert replays(captured) == cuda_graphs.ROW_SETS
    gc.disable()
    try:
        reference = weakref.ref(model)
        del model
        assert reference() is None and not any(alive(captured))
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ("falcon_mamba", "zamba2"))
def test_generation(family, captured):
    """An engine of two slots and `generate` produce the same tokens as without graphs, for prompts of different lengths."""
    models = loaded(family), loaded(family, graphs=False)
    prompts = [row[-length:].tolist() for row, length in zip(SEQUENCES, LENGTHS, strict=True)]

    def served(model):
        engine = Engine(model, slots=2, chunk=4)
        requests = [engine.add(prompt, max_new_tokens=5 + i) for i, prompt in enumerate(prompts)]
        while engine.is_busy:
            engine.step()
        return [request.tokens for request in requests]

    assert served(models[0]) == served(models[1])
    served_by = len(captured)
    assert torch.equal(*(generate(model, SEQUENCES, MASK, max_new_tokens=7) for model in models))
    assert len(captured) > served_by >= 1


# Ranks


class EmptyGraph:
    """A graph whose replay does nothing; its step runs only during the capture."""

    is_reset = False

    def replay(self):
        assert not self.is_reset

    def pool(self):
        assert not self.is_reset
        return 1

    def reset(self):
        self.is_reset = True


class RepeatedGraph(EmptyGraph):
    """A graph whose replay calls its step again, for ranks, because RecordedGraph cannot record sums over ranks."""

    def __init__(self, step, model, logits):
        self._step, self._counter, self._logits = step, model.counter, logits

    def replay(self):
        super().replay()
        before = copy.deepcopy(self._counter)
        self._logits.copy_(self._step())
        cuda_graphs._reset_counter(self._counter, before)


def capture_by_repeating(model, cache, captured, fails=()):
    """A `capture` that returns RepeatedGraphs for a cache; those whose index is in `fails` raise an error at the end."""

    def capture(step, device, streams, pool=None):
        tensors = list(cache.tensors())
        before = [tensor.clone() for tensor in tensors]
        logits = step().fill_(float("nan"))
        for tensor, numbers in zip(tensors, before, strict=True):
            tensor.copy_(numbers)
        graph = RepeatedGraph(step, model, logits)
        captured.append(weakref.ref(graph))
        if len(captured) - 1 in fails:
            raise RuntimeError("no room")
        return graph, logits

    return capture


def use_graphs_on_cpu(patch, capture):
    """Let models on the CPU decode by the graphs of `capture`, even if their ranks communicate by gloo."""
    for name, value in dict(DEVICE="cpu", MIN_KEYS=4, capture=capture, _is_capturable=lambda model: True).items():
        patch.setattr(cuda_graphs, name, value)
    patch.setattr(tapes, "may_use_kernels", lambda: False)


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_ranks_decode_by_graphs(ranks, world, monkeypatch):
    """They count the bytes that replays send too."""
    monkeypatch.setattr(cuda_graphs, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_graphs, "MIN_KEYS", 4)
    monkeypatch.setattr(tapes, "may_use_kernels", lambda: False)

    def run(model):
        assert cuda_graphs._is_capturable(model) == (world == 1)  # gloo computes its sums on the host
        captured = []
        with monkeypatch.context() as patch:
            patch.setattr(cuda_graphs.dist, "get_backend", lambda group: "nccl")
            caches, usual = two_caches(model), copy.deepcopy(model)
            usual.graphs = False
            patch.setattr(cuda_graphs, "capture", capture_by_repeating(model, caches[0], captured))
            for t in range(8):
                results = []
                for each, cache in zip((model, usual), caches, strict=True):
                    model.counter.reset()
                    with torch.no_grad():
                        logits = each(MORE[1:4, t : t + 1], None, cache.select([1, 2, 3]))
                    results.append((logits, copy.deepcopy(model.counter)))
                (found, sent), (expected, expected_counter) = results
                assert_near(found, expected)
                assert sent == expected_counter and bool(sent.sent) == (world > 1)
            assert len(captured) == 1

    on_ranks_of_families(ranks, world, run)


@pytest.mark.parametrize("world", (1, 2, pytest.param(4, marks=pytest.mark.full)))
def test_ranks_stop_using_graphs_together(ranks, world, monkeypatch, caplog):
    """When the second capture fails on the last rank, all ranks decode without graphs; logits and traffic are unchanged."""

    def run(model):
        last, captured, events = dist.get_rank() == world - 1, [], []

        def recorded(*given):
            events.append(given)
            return whole.all_reduce(*given)

        caplog.clear()
        with monkeypatch.context() as patch:
            caches, usual, whole = two_caches(model), copy.deepcopy(model), cuda_graphs.collectives
            usual.graphs = False
            use_graphs_on_cpu(patch, capture_by_repeating(model, caches[0], captured, fails=(1,) if last else ()))
            patch.setattr(cuda_graphs, "MIN_KEYS", MAX_LENGTH)
            patch.setattr(cuda_graphs, "collectives", SimpleNamespace(all_reduce=recorded, Counter=whole.Counter))
            for t, rows in enumerate([[1, 2, 3]] * 4 + [[0]] * 4 + [[1, 2, 3]] * 2):
                results = []
                for each, cache in zip((model, usual), caches, strict=True):
                    model.counter.reset()
                    with torch.no_grad():
                        logits = each(MORE[rows, t : t + 1], None, cache.select(rows))
                    results.append((logits, copy.deepcopy(model.counter)))
                (found, sent), (expected, expected_counter) = results
                assert_near(found, expected)
                assert sent == expected_counter and model.graphs == (t < 6), t
        gc.collect()
        assert len(captured) == 2 and not any(alive(captured))
        assert len(events) == (2 if world > 1 else 0)
        reason = "RuntimeError: no room" if last else "another rank could not capture a step"
        assert [record.message for record in caplog.records] == [f"decoding without CUDA graphs: {reason}"]

    on_ranks_of_families(ranks, world, run, ("mamba2", "zamba2") if world < 4 else ("mamba2",))


@pytest.mark.parametrize("world", (1, 2))
def test_ranks_keep_the_same_graphs(ranks, world, monkeypatch):
    """Even when one rank has freed a cache, which its graphs do not keep alive, and the others have not."""

    @torch.no_grad()
    def run(model):
        captured, counts = [], []

        def capture(step, device, streams, pool=None):
            graph, logits = EmptyGraph(), step()
            captured.append(weakref.ref(graph))
            return graph, logits

        def decode(cache):
            for t in range(4):
                model(MORE[:1, t : t + 1], None, cache)
            counts.append((len(captured), sum(alive(captured))))

        with monkeypatch.context() as patch:
            use_graphs_on_cpu(patch, capture)
            caches = [model.new_cache(1) for _ in range(cuda_graphs.ROW_SETS + 1)]
            *_, freed, another = caches
            for cache in caches[:-1]:
                decode(cache)
            layer = weakref.ref(freed.states["layers.0.mixer"])
            if dist.get_rank() == 0:
                del cache, freed, caches[-2]
                assert layer() is None
            for cache in (another, caches[0], caches[2]):
                decode(cache)
        return counts

    results = on_ranks_of_families(ranks, world, run, ("mamba2",))
    assert [each["mamba2"] for each in results] == [[(n, min(n, 4)) for n in (1, 2, 3, 4, 5, 6, 6)]] * world


@pytest.mark.parametrize("world", (1, 2))
def test_ranks_decode_without_graphs_after_close(ranks, world, monkeypatch):
    """Here the ranks share no memory."""

    def run(model):
        captured = []
        with monkeypatch.context() as patch:
            caches = two_caches(model)
            use_graphs_on_cpu(patch, capture_by_repeating(model, caches[0], captured))
            for t in range(4):
                decode_and_compare(model, caches, [1, 2, 3], MORE[1:4, t : t + 1])
            assert alive(captured) == [True]
            model.close()
            assert not any(alive(captured))
            for t in range(4, 9):
                decode_and_compare(model, caches, [1, 2, 3], MORE[1:4, t : t + 1])
        return len(captured)

    assert on_ranks(ranks, world, checkpoint("mamba2"), run, shared_memory=False) == 1


@pytest.mark.parametrize("fails", (False, True))
@pytest.mark.parametrize("world", (1, 2))
def test_the_command_releases_its_graphs_before_its_groups(ranks, world, fails, monkeypatch):
    """Also after an exception whose traceback references a graph, because NCCL would wait for that graph."""
    directory = checkpoint("mamba2")
    command = ["generate", "--model", str(directory), "--prompt", "ab", "--max-new-tokens", "7", "--ignore-eos"]

    def run(rank):
        captured, ends = [], []

        def capture(step, device, streams, pool=None):
            captured.append(graph := EmptyGraph())
            return graph, step()

        def replay(graph):
            assert not graph.is_reset
            graph.replays = getattr(graph, "replays", 0) + 1
            return 1 // (not fails or graph.replays < 3)

        def shut_down():
            ends.append([graph.is_reset for graph in captured])
            groups.shut_down()

        use_graphs_on_cpu(monkeypatch, capture)
        monkeypatch.setattr(EmptyGraph, "replay", replay)
        monkeypatch.setattr(commands, "shut_down", shut_down)
        monkeypatch.setenv("WORLD_SIZE", str(world))
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            commands.generate(parser().parse_args([*command, "--device", "cpu", "--json"]))
        return ends, captured[0].replays, dist.is_initialized()

    assert ranks(run, world) == [([[True]], 3 if fails else 4, False)] * world


def test_a_custom_reduce_is_not_captured():
    model = loaded("mamba2")
    assert cuda_graphs._is_capturable(model)
    object.__setattr__(model.ranks, "format", lambda tensor, group: dist.all_reduce(tensor, group=group))
    assert not cuda_graphs._is_capturable(model)


@pytest.mark.parametrize("kind", (torch.nn.Parameter, torch.Tensor.clone))
def test_a_bias_of_a_shared_block_is_noticed(kind):
    """As a parameter, and as a tensor that is none."""
    model = loaded("zamba2")
    version = Version(model)
    copy.deepcopy(model)
    assert version.is_current(model)
    model.shared[0].o_proj.bias = kind(torch.zeros(len(model.shared[0].o_proj.weight)))
    assert not version.is_current(model)
