"""Reads prompts through several layers by the C code of native/step.c, in pieces whose activations stay in the caches."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ssm.layers.cache import BatchInfo, LayerCache, Rows

from .native_step import NativeLayers

PIECE = 256  # tokens of a piece, of all sequences together


class NativePrompt(NativeLayers):
    """Consecutive `NativeLayer`s of a model on one rank that read tokens of prompts. They are called like one block.

    layers: made for one row and PIECE tokens. Before a call, `bind` says which sequences of which cache it continues.
    """

    def bind(self, caches: Sequence[LayerCache], rows: Rows, tokens: int) -> bool:
        """Prepare a call for `tokens` tokens of each of some rows of these layers' caches.

        Returns whether the C code supports these caches, and has the fastest products for so many tokens.
        """
        held = [cache.read(rows) for cache in caches]
        batch = len(held[0][0])
        if not 0 < batch <= PIECE or not tokens:
            return False
        self._pieces = math.ceil(tokens / (PIECE // batch))
        sizes = {batch * (tokens // self._pieces), batch * math.ceil(tokens / self._pieces)}
        if not all(layer.is_fast(size) for layer in self._native_layers for size in sizes):
            return False
        for layer, struct, (conv, state) in zip(self._native_layers, self._structs, held, strict=True):
            if not layer.holds(conv, state):
                return False
            struct.batch, struct.history, struct.history_stride = batch, conv.data_ptr(), conv.stride(0)
            struct.state = struct.next_state = state.data_ptr()
            struct.state_stride = struct.next_stride = state.stride(0)
        return True

    def __call__(
        self, x: Tensor, info: BatchInfo, cache: LayerCache | None = None, shared: Any = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x (batch, seq, hidden) -> the same shape, as `Block` does. Nothing is sent."""
        x, given = self._inputs(x, info, cache, shared, embeddings)
        total, seq = torch.empty_like(x), x.shape[1]
        for i in range(self._pieces):
            piece = slice(i * seq // self._pieces, (i + 1) * seq // self._pieces)
            for struct in self._structs:
                struct.tokens = piece.stop - piece.start
            part = total[:, piece].contiguous()
            self._compute(x[:, piece].contiguous(), given[:, piece].contiguous(), part)
            if part.data_ptr() != total[:, piece].data_ptr():
                total[:, piece] = part
        return total
