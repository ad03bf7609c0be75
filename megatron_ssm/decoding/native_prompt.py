"""Reads prompts through several layers by the C code of native/step.c, in pieces that fit the processor's caches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ssm.layers.cache import BatchInfo, LayerCache, Rows

from .native_step import NativeLayer, NativeLayers

PIECE = 256  # tokens of a piece, of all sequences together
SHORTEST = 32  # tokens of each sequence in one of several pieces: for fewer, recurrences take longer


class NativePrompt(NativeLayers):
    """Consecutive `NativeLayer`s of a model on one rank that read tokens of prompts. They are made for PIECE tokens."""

    def call_for(self, caches: Sequence[LayerCache], rows: Rows, tokens: int) -> "PromptCall | None":
        """What reads `tokens` tokens of each of some rows of these layers' caches, in place of the layers.

        None if C does not support these caches, or has no kernel for the products of so many tokens.
        """
        held = [cache.read(rows) for cache in caches]
        batch = len(held[0][0])
        if batch > PIECE or not all(map(NativeLayer.holds, self._native_layers, *zip(*held, strict=True))):
            return None
        pieces = math.ceil(tokens / (PIECE // batch))
        fewest, most = tokens // pieces, math.ceil(tokens / pieces)
        if pieces > 1 and fewest < SHORTEST:
            return None
        is_fast = all(layer.is_fast(batch * size) for layer in self._native_layers for size in {fewest, most})
        return PromptCall(self, held, pieces) if is_fast else None

    def read(self, x: Tensor, given: Tensor, held: Sequence[tuple[Tensor, Tensor]], pieces: int) -> Tensor:
        """The last layer's result for prompts (batch, seq, hidden) in so many pieces.

        x, given: what the first layer adds to, and what it reads. held: (conv, state) of each layer, which are updated.
        After a MemoryError they are not valid.
        """
        for struct, (conv, state) in zip(self._structs, held, strict=True):
            struct.batch, struct.history, struct.history_stride = len(conv), conv.data_ptr(), conv.stride(0)
            struct.state = struct.next_state = state.data_ptr()
            struct.state_stride = struct.next_stride = state.stride(0)
        seq, parts = x.shape[1], []
        for i in range(pieces):
            piece = slice(i * seq // pieces, (i + 1) * seq // pieces)
            for struct in self._structs:
                struct.tokens = piece.stop - piece.start
            part = x[:, piece].contiguous()
            parts.append(torch.empty_like(part))
            self._compute(part, part if given is x else given[:, piece].contiguous(), parts[-1])
        return parts[0] if pieces == 1 else torch.cat(parts, dim=1)


@dataclass(frozen=True)
class PromptCall:
    """A call of a `NativePrompt`: it stands for its blocks in one call of the model. held: (conv, state) of each layer."""

    layers: NativePrompt
    held: list[tuple[Tensor, Tensor]]
    pieces: int

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def use(self) -> Any:
        """What the first layer has of its own for its use of the shared block, or None."""
        return self.layers.use

    def __call__(
        self, x: Tensor, info: BatchInfo, cache: LayerCache | None = None, shared: Any = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x (batch, seq, hidden) -> the same shape, as `Block` does. Nothing is sent."""
        x, given = self.layers.inputs(x, info, cache, shared, embeddings)
        return self.layers.read(x, given, self.held, self.pieces)
