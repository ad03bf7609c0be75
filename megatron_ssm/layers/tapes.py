"""The tapes of a model: the calls that C computes, and the conversion of the model's modules to a tape.

A tape is made when it is first needed, and again after a module of the model has changed (`parallel.tracked`). There are
separate tapes for decoding, for speculative decoding, for the draft head, and for prompts. A prompt is read in chunks that
fit the processor's caches. A layer that C cannot compute is a stop of the tape, at which Python computes it.

Reading the weights evicts Python's and torch's data from the caches: layer by layer, Python takes 3 to 4 ms for a token of
24 layers.
"""

import math
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from megatron_ssm.kernels import kernels
from megatron_ssm.parallel.tracked import Changes, Version

from .cache import Cache
from .call import Call, Positions
from .operator import check_plain
from .tape_builder import Buffer, Builder, NotLowered
from .tape_run import BoundCall, FinishedTape, Section
from .unit import Layer

CHUNK = 256  # the largest number of tokens in a chunk of prompts, of all sequences together
EXPERT_CHUNK = 1024  # CHUNK for layers with experts, whose weights are read again for each chunk
MIN_CHUNK = 32  # the smallest number of tokens of each sequence in one of several chunks; shorter recurrences are slow
MAX_SPECULATIVE = 16  # the largest number of speculative tokens of a row
DECODE, SPECULATE, PROMPT, DRAFT = "decode", "speculate", "prompt", "draft"


def may_use_kernels() -> bool:
    """Return True if C may compute layers: the library is loaded, and gradients, autocast and global hooks are off."""
    return (
        kernels.LIBRARY.functions is not None
        and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
        and not _has_any_global_hook()
    )  # fmt: skip


class Tapes(threading.local):
    """The tapes of one model in each thread. A copy starts without tapes."""

    def __init__(self) -> None:
        self._tapes: dict[str, tuple[Version, FinishedTape | None]] = {}

    def __reduce__(self) -> tuple:
        return Tapes, ()

    def tape(self, model: Any, kind: str) -> FinishedTape | None:
        """The tape for a kind of call.

        None if C can compute none of the layers or, when decoding, not the embeddings or the head.
        """
        entry = self._tapes.get(kind)
        # The first comparison spares most tokens the call: nothing in this process has changed since.
        if entry is None or (entry[0].count != Changes.count and not entry[0].is_current(model)):
            self._tapes[kind] = entry = Version(model), _make(model, kind)
        return entry[1]

    def logits(self, model: Any, ids: Tensor, cache: Cache, speculative: bool) -> Tensor | None:
        """This rank's logits (batch, tokens, width) of decoded tokens ids (batch, tokens), by one call of C.

        Advances the cache, unless the tokens are speculative. Returns None, with nothing done, if C cannot compute them.
        """
        call = self._bound_call(model, SPECULATE if speculative else DECODE, ids, cache)
        if call is None:
            return None
        tape = call.tape
        if tape.builder.stops:  # layers that Python computes
            call.call = model.describe_decoding(ids, cache, speculative)
        logits = call.logits(ids, tape.sections["all"])
        if logits is not None and model.config.logits_scale != 1.0:
            logits.mul_(model.config.logits_scale)
        if logits is not None and speculative:
            cache.layout.pending = call
        return logits

    def draft_hidden(self, model: Any, ids: Tensor, hidden: Tensor, cache: Cache) -> Tensor | None:
        """`Model.draft_hidden` by one call of C. Returns None, with nothing done, if C cannot compute it."""
        call = self._bound_call(model, DRAFT, ids, cache)
        return None if call is None else call.hidden(ids, hidden, call.tape.sections["all"])

    def _bound_call(self, model: Any, kind: str, ids: Tensor, cache: Cache) -> BoundCall | None:
        """A call of a tape for decoded tokens ids (batch, tokens), with space in the cache; None if C cannot compute it."""
        if not (
            torch.is_tensor(ids) and ids.ndim == 2 and ids.is_cpu and ids.dtype is torch.int64 and may_use_kernels()
        ):
            return None
        (batch, tokens), limit = ids.shape, 1 if kind == DECODE else MAX_SPECULATIVE
        lengths = cache.lengths[cache.rows]
        if not batch or not 0 < tokens <= limit or len(lengths) != batch or not lengths.is_cpu:
            return None
        tape = self.tape(model, kind)
        if tape is None or not tape.is_fast(batch * tokens):
            return None
        longest, capacity = int(lengths.max()) + tokens, cache.capacity
        if capacity is not None and longest > capacity:
            cache.reserve(longest)
        call = tape.call(batch, tokens)
        return call if call.bind(cache) else None

    def read_prompt(self, model: Any, call: Call, cache: Cache | None, x: Tensor) -> Tensor | None:
        """The hidden states after the last layer, (batch, tokens, hidden), of a call that reads tokens of prompts.

        Returns None if C cannot compute them, or would be slower. x: (batch, tokens, hidden), the embeddings.
        """
        if cache is None or call.decoding or call.speculative or call.mask is not None or call.sharding is not None:
            return None
        if cache.device.type != "cpu" or model.ranks.group is not None or not may_use_kernels():
            return None
        batch, tokens = x.shape[:2]
        tape = self.tape(model, PROMPT)
        if tape is not None and not tape.has_addresses():
            self._tapes.clear()
            tape = self.tape(model, PROMPT)
        if tape is None:
            return None
        limit = EXPERT_CHUNK if tape.builder.has_experts else CHUNK
        if not 0 < batch <= limit:
            return None
        chunks = math.ceil(tokens / (limit // batch))
        sizes = {tokens // chunks, math.ceil(tokens / chunks)}
        if chunks > 1 and min(sizes) < MIN_CHUNK or not all(tape.is_fast(batch * size) for size in sizes):
            return None
        starts, outputs = cache.lengths[cache.rows].clone(), []
        for i in range(chunks):
            chunk = slice(i * tokens // chunks, (i + 1) * tokens // chunks)
            bound = tape.call(batch, chunk.stop - chunk.start)
            if not bound.bind(cache):
                return None
            bound.call = call
            if call.positions is not None:
                positions = Positions.of(starts + chunk.start, batch, bound.tokens, None, x.device)
                bound.call = replace(call, positions=positions, begins=call.begins and not chunk.start)
            bound.tensor(tape.x).copy_(x[:, chunk])
            if tape.embeddings is not None:
                bound.tensor(tape.embeddings).copy_(x[:, chunk])
            bound.run(tape.sections["layers"])
            outputs.append(bound.tensor(tape.x).clone())  # (batch, tokens of the chunk, hidden)
        return outputs[0] if chunks == 1 else torch.cat(outputs, dim=1)


def _make(model: Any, kind: str) -> FinishedTape | None:
    """The tape of a model for a kind of call, or None; see `Tapes.tape`."""
    if model.context_ranks is not None or model.ranks.sequence_parallel or not len(model.layers):
        return None
    dtype, config = model.dtype, model.config
    if dtype not in (torch.float32, torch.bfloat16) or model.device.type != "cpu":
        return None
    sum_dtype = next((layer.sum_dtype for layer in model.layers if isinstance(layer, Layer)), dtype)
    builder = Builder(dtype, sum_dtype, kind in (SPECULATE, DRAFT), kind == PROMPT)
    try:
        if kind == DRAFT:
            hidden = builder.buffer(config.hidden_size)
            out = model.draft_head.lower(builder, _embedded(builder, model), hidden)
            return FinishedTape(builder, {"all": Section(0, len(builder.ops))}, hidden, None, 0, config.vocab_size, out)
        x, embeddings = _embedding(builder, model, kind)
        start, lowered = len(builder.ops), 0
        for index, layer in enumerate(model.layers):
            lowered += _lower_layer(builder, model, index, layer, x, embeddings)
        end, width = len(builder.ops), 0
        if kind != PROMPT:
            builder.path, head, norm = "", model.logits_layer, model.norm_f
            check_plain(head, norm)
            normed = builder.norm(x, norm)
            if model.draft_head is not None:
                builder.path = "final"
                builder.append(normed, "hidden")
            builder.logits(normed, head.weight, head.width)
            width = head.width
    except NotLowered:
        return None
    sections = {"all": Section(0, len(builder.ops)), "layers": Section(start, end)}
    return FinishedTape(builder, sections, x, embeddings, width, config.vocab_size) if lowered else None


def _embedding(builder: Builder, model: Any, kind: str) -> tuple[Buffer, Buffer | None]:
    """(the residual stream, the embeddings for shared blocks or None) at the start of the layers.

    For prompts, both are inputs of the tape.
    """
    if kind == PROMPT:
        size = model.config.hidden_size
        x = builder.buffer(size, builder.sum_dtype)
        return x, builder.buffer(size) if len(model.shared) else None
    embeddings = _embedded(builder, model)
    x = builder.converted(embeddings, builder.sum_dtype)
    if len(model.shared):
        return x, embeddings
    builder.release(embeddings)
    return x, None


def _embedded(builder: Builder, model: Any) -> Buffer:
    layer, scale = model.embeddings, model.config.embedding_scale
    check_plain(layer)
    embeddings = builder.embed(layer.weight, layer.start, layer.stop - layer.start, model.config.hidden_size)
    builder.sum(layer.ranks, embeddings, is_exact=True)
    if scale == 1.0:
        return embeddings
    scaled = builder.converted(embeddings, builder.dtype, scale)
    builder.release(embeddings)
    return scaled


def _lower_layer(builder: Builder, model: Any, index: int, layer: Any, x: Buffer, embeddings: Buffer | None) -> bool:
    """Write a layer, or a stop at which Python computes it. Returns True if C computes the layer."""
    path, mark = f"layers.{index}.", builder.mark()
    try:
        if not isinstance(layer, Layer) or layer.sum_dtype is not builder.sum_dtype:
            raise NotLowered("another class of layers, or another dtype of the residual stream")
        layer.lower(builder, path, x, embeddings, model.shared)
        return True
    except NotLowered as reason:
        builder.reset(mark)
        shared = model.shared

        def compute(call: BoundCall) -> None:
            states = {
                name.removeprefix(path): state for name, state in call.cache.states.items() if name.startswith(path)
            }
            e = None if embeddings is None else call.tensor(embeddings)
            call.tensor(x).copy_(layer(call.tensor(x), call.call, states, shared, e))

        builder.path = path.rstrip(".")
        builder.stop(compute, f"Python ({reason})")
        return False
