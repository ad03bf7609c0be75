"""Tokens of each sequence from their ids to their logits in one call of C (native/tokens.c).

It does what `Model._call` does for such tokens. Each operation of torch beside it takes many times as long as in a
tight loop, because the weights have evicted torch's and Python's own data and code from the CPU's caches.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from megatron_ssm.native import kernels
from megatron_ssm.native.kernels import TYPES
from megatron_ssm.operators.cache import Cache
from megatron_ssm.parallel.layers import VocabularyParallel, has_own_methods, has_plain_tensors

from .native_head import NativeHead
from .native_step import NativeLayers
from .native_sums import LayerSum, SentInC
from .structs import UNUSUAL, Matrix, Tokens


class NativeTokens:
    """The embeddings, all layers and this rank's logits of tokens of each of some rows of a cache.

    layers: a `NativeLayers` for so many tokens of these rows.
    """

    @classmethod
    def of(cls, model: Any, layers: list[tuple[int, Any]], cache: Cache) -> "NativeTokens | None":
        """layers: those of a decode plan. None if C cannot compute all in one call, and for context ranks."""
        native, embeddings, dtype = layers[0][1], model.embeddings, model.norm_f.weight.dtype
        if len(layers) > 1 or type(native) is not NativeLayers or native.head is None or native.block.use is not None:
            return None
        if type(embeddings) is not VocabularyParallel or has_plain_tensors(embeddings):
            return None
        if any(map(has_own_methods, embeddings.modules())):
            return None
        if not isinstance(cache.rows, slice):
            return None
        rows = range(*cache.rows.indices(len(cache.lengths)))
        is_supported = (
            embeddings.weight.dtype is dtype and Matrix.supports(embeddings.weight, dtype, 1)
            and embeddings.weight.shape == (embeddings.stop - embeddings.start, native.size)
            and len(rows) == native.batch and rows.step == 1
            and model.context_ranks is None and not model.ranks.sequence_parallel
        )  # fmt: skip
        return cls(model, native, native.head, rows.start, len(cache.lengths)) if is_supported else None

    def __init__(self, model: Any, layers: NativeLayers, head: NativeHead, start: int, rows: int):
        """start: the first of the sequences' rows of the cache. rows: of the whole cache."""
        embeddings, dtype = model.embeddings, model.norm_f.weight.dtype
        self.layers, self._head, self._start, self._rows = layers, head, start, rows
        count, size = embeddings.weight.shape
        self._shape = layers.batch, layers.tokens
        self._part = torch.empty(*self._shape, size, dtype=dtype, device="cpu")
        self._x, self._total = torch.empty(2, *self._shape, size, dtype=layers.dtype, device="cpu")
        self._sum = LayerSum(embeddings.ranks, self._part, is_exact=True)
        self._sent = SentInC([self._sum])
        self._struct = Tokens(
            embeddings=Matrix.of(embeddings.weight), sum=self._sum.struct, part=self._part.data_ptr(),
            x=self._x.data_ptr(), layers=layers.address, batch=layers.batch, tokens=layers.tokens, size=size,
            vocabulary=model.config.vocab_size, first=embeddings.start, rows=count,
            type=TYPES[dtype], sum_type=TYPES[layers.dtype], speculative=layers.speculative,
        )  # fmt: skip

    def logits(self, ids: Tensor, cache: Cache) -> Tensor | None:
        """This rank's logits (batch, tokens, width) in float32; advances the cache, unless the tokens are speculative.

        None, before anything is done, for what `call` must look at: ids that are not (batch, tokens) int64 of the
        vocabulary, and sequences that begin. Sends what the model sends.
        """
        lengths = cache.lengths
        if not (
            type(ids) is Tensor and ids.is_cpu and ids.dtype is torch.int64 and ids.shape == self._shape
            and lengths.is_cpu and lengths.dtype is torch.int64 and lengths.is_contiguous() and len(lengths) == self._rows
        ):  # fmt: skip
            return None
        struct, logits, ids = self._struct, self._head.new_logits(*self._shape), ids.contiguous()
        struct.ids, struct.lengths = ids.data_ptr(), lengths.data_ptr() + self._start * lengths.element_size()
        self.layers.begin(self._x, self._x, self._total)
        struct.begun = 0
        for sent in (self._sent, self.layers.sent):
            sent.check()
        while code := kernels.functions().decode_tokens(ctypes.addressof(struct), torch.get_num_threads()):
            if code == UNUSUAL:
                return None
            if struct.begun == 1:
                self._sum.finish(code, struct.sum)
            else:
                self.layers.finish(code)
        for sent in (self._sent, self.layers.sent):
            sent.count()
        if self.layers.speculative:
            next(iter(cache.states.values())).pending = self.layers  # the first stands for all
        return logits
