"""The tapes of a model: which calls C computes, and how a tape is made from the model's modules.

A tape is made when it is first needed, and again when a module of the model has changed (`parallel.tracked`). One is for
tokens that are decoded, one for tokens that may be taken back, one for prompts, which are read in pieces that fit the
processor's caches. A layer that C does not compute is a stop, at which Python computes it.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from megatron_ssm.native import kernels
from megatron_ssm.operators.cache import Cache
from megatron_ssm.operators.call import Call, Positions
from megatron_ssm.operators.operator import check_plain
from megatron_ssm.operators.unit import Layer
from megatron_ssm.parallel.tracked import Version
from megatron_ssm.tape.builder import Buffer, Builder, NotLowered
from megatron_ssm.tape.run import BoundCall, FinishedTape, Section

PIECE = 256  # tokens of a piece of prompts, of all sequences together
PIECE_OF_EXPERTS = 1024  # where layers have experts, whose weights are read again for each piece
SHORTEST = 32  # tokens of each sequence in one of several pieces: for fewer, recurrences take longer
MOST_TOKENS = 16  # of a row that is decoded speculatively
DECODE, SPECULATE, PROMPT, DRAFT = "decode", "speculate", "prompt", "draft"


def may_use_kernels() -> bool:
    """Return True if C may compute layers: no gradients, autocast or module hooks are in use, and the library is there."""
    return (
        kernels.LIBRARY.functions is not None
        and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
        and not _has_any_global_hook()
    )  # fmt: skip


class Tapes(threading.local):
    """The tapes of one model in each thread. A copy has none."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Version, FinishedTape | None]] = {}

    def __reduce__(self) -> tuple:
        return Tapes, ()

    def tape(self, model: Any, kind: str) -> FinishedTape | None:
        """The tape for a kind of call; None if C computes no layer, or for decoding not the embeddings and the head."""
        made = self._made.get(kind)
        if made is None or not made[0].is_current(model):
            self._made[kind] = made = Version(model), _make(model, kind)
        return made[1]

    def logits(
        self, model: Any, ids: Tensor, cache: Cache, speculative: bool, about: Callable[[], Call]
    ) -> Tensor | None:
        """This rank's logits (batch, tokens, width) of decoded tokens ids (batch, tokens), by one call of C.

        The tokens advance the cache, unless they are speculative. None, with nothing done: C does not compute these. about:
        makes the `Call`, for layers that Python computes.
        """
        call = self._bound_call(model, SPECULATE if speculative else DECODE, ids, cache)
        if call is None:
            return None
        tape = call.tape
        call.call = about() if tape.builder.stops else None
        logits = call.logits(ids, tape.sections["all"])
        if logits is not None and model.config.logits_scale != 1.0:
            logits.mul_(model.config.logits_scale)
        if logits is not None and speculative:
            cache.layout.pending = call
        return logits

    def drafted(self, model: Any, ids: Tensor, hidden: Tensor, cache: Cache) -> Tensor | None:
        """`Model.drafted` by one call of C; None, with nothing done: C does not compute it."""
        call = self._bound_call(model, DRAFT, ids, cache)
        return None if call is None else call.hidden(ids, hidden, call.tape.sections["all"])

    def _bound_call(self, model: Any, kind: str, ids: Tensor, cache: Cache) -> BoundCall | None:
        """A call of a tape for decoded tokens ids (batch, tokens), with space in the cache; None: C does not compute it."""
        if not (
            torch.is_tensor(ids) and ids.ndim == 2 and ids.is_cpu and ids.dtype is torch.int64 and may_use_kernels()
        ):
            return None
        (batch, tokens), most = ids.shape, 1 if kind == DECODE else MOST_TOKENS
        if not batch or not 0 < tokens <= most or cache.batch != batch or not cache.lengths.is_cpu:
            return None
        tape = self.tape(model, kind)
        if tape is None or not tape.is_fast(batch * tokens):
            return None
        if cache.capacity is not None:
            cache.reserve(int(cache.lengths[cache.rows].max()) + tokens)
        call = tape.call(batch, tokens)
        return call if call.bind(cache) else None

    def read(self, model: Any, about: Call, cache: Cache | None, x: Tensor) -> Tensor | None:
        """The hidden states after all layers of tokens of prompts, from their embeddings x (batch, tokens, hidden).

        None: C does not compute them, or not as fast.
        """
        if cache is None or about.decoding or about.speculative or about.mask is not None or about.sharding is not None:
            return None
        if cache.device.type != "cpu" or model.ranks.group is not None or not may_use_kernels():
            return None
        batch, tokens = x.shape[:2]
        tape = self.tape(model, PROMPT)
        if tape is not None and not tape.has_addresses():
            self._made.clear()
            tape = self.tape(model, PROMPT)
        if tape is None:
            return None
        most = PIECE_OF_EXPERTS if tape.builder.has_experts else PIECE
        if not 0 < batch <= most:
            return None
        pieces = math.ceil(tokens / (most // batch))
        sizes = {tokens // pieces, math.ceil(tokens / pieces)}
        if pieces > 1 and min(sizes) < SHORTEST or not all(tape.is_fast(batch * size) for size in sizes):
            return None
        starts, parts = cache.lengths[cache.rows].clone(), []
        for i in range(pieces):
            piece = slice(i * tokens // pieces, (i + 1) * tokens // pieces)
            call = tape.call(batch, piece.stop - piece.start)
            if not call.bind(cache):
                return None
            call.call = about
            if about.positions is not None:
                positions = Positions.of(starts + piece.start, batch, call.tokens, None, x.device)
                call.call = replace(about, positions=positions, begins=about.begins and not piece.start)
            call.tensor(tape.x).copy_(x[:, piece])
            if tape.embeddings is not None:
                call.tensor(tape.embeddings).copy_(x[:, piece])
            call.run(tape.sections["layers"])
            parts.append(call.tensor(tape.x).clone())
        return parts[0] if pieces == 1 else torch.cat(parts, dim=1)


def _make(model: Any, kind: str) -> FinishedTape | None:
    """Write a tape of the model."""
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
    """The residual stream and, where there are shared blocks, the embeddings, which stay."""
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
    """The embeddings, times their constant."""
    layer, scale = model.embeddings, model.config.embedding_scale
    check_plain(layer)
    part = builder.embed(layer.weight, layer.start, layer.stop - layer.start, model.config.hidden_size)
    builder.sum(layer.ranks, part, is_exact=True)
    if scale == 1.0:
        return part
    scaled = builder.converted(part, builder.dtype, scale)
    builder.release(part)
    return scaled


def _lower_layer(builder: Builder, model: Any, index: int, layer: Any, x: Buffer, embeddings: Buffer | None) -> bool:
    """Write a layer, or a stop at which Python computes it; returns whether it was written."""
    path, mark = f"layers.{index}.", builder.mark()
    try:
        if not isinstance(layer, Layer) or layer.sum_dtype is not builder.sum_dtype:
            raise NotLowered("a layer of another class, or with a residual stream in another dtype")
        layer.lower(builder, path, x, embeddings, model.shared)
        return True
    except NotLowered as reason:
        builder.reset(mark)
        shared = model.shared

        def compute(call: BoundCall) -> None:
            states = {
                name.removeprefix(path): state for name, state in call.cache.states.items() if name.startswith(path)
            }
            given = None if embeddings is None else call.tensor(embeddings)
            call.tensor(x).copy_(layer(call.tensor(x), call.call, states, shared, given))

        builder.path = path.rstrip(".")
        builder.stop(compute, f"Python ({reason})")
        return False
