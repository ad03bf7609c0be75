"""One call of a model: its checks, which layers run it, and what it leaves in the cache."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megatron_ssm.layers.cache import Cache

from .context import check_on_context_ranks
from .inputs import batch_info, check_call, lengths_of, pad_to_multiple

if TYPE_CHECKING:
    from .model import Model


@dataclass(frozen=True)
class CallKind:
    """How a call counts. For the fields up to prompt see `Model.local_logits`.

    is_sharded: whether each context rank has its own tokens; otherwise every one has all of them. speculative: see
    `Model.speculative_logits`. compared: see `Model.next_logits`.
    """

    logits_to_keep: int = 0
    seq: int | None = None
    prompt: bool = False
    is_sharded: bool = False
    speculative: bool = False
    compared: bool = False

    @property
    def is_special(self) -> bool:
        """Whether it is another call than one that decodes tokens that every rank has."""
        return self.prompt or self.is_sharded


def call(
    model: "Model", input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None, kind: CallKind
) -> torch.Tensor:
    """This rank's slice of the logits, (batch, kept, ceil(vocab/ranks)); updates the cache. See `Model.local_logits`."""
    keep = kind.logits_to_keep
    if cache is not None and attention_mask is None and keep >= 0 and kind.seq is None and not kind.is_special:
        local = model.native_logits(input_ids, cache, kind.speculative)
        if local is not None:
            return local

    def check() -> tuple:
        return check_call(model, input_ids, attention_mask, cache, keep, kind.seq, kind.is_sharded)

    lengths, longest = ([], None) if cache is None else (lengths_of(cache), cache.max_length)
    asked = getattr(input_ids, "shape", None), kind.seq, keep, torch.is_grad_enabled(), longest, lengths
    mask, sharding = check() if kind.compared else check_on_context_ranks(model, check, asked)
    tokens = input_ids.shape[1]
    if model.ranks.sequence_parallel:
        input_ids, mask = pad_to_multiple(input_ids, mask, model.ranks.size)
    is_decoding, local, new_per_rank = kind.speculative, None, None
    if cache is not None and sharding is None and not kind.prompt and not is_decoding and input_ids.shape[1] == 1:
        is_decoding = all(length > 0 for length in lengths)
        local = model.captured_logits(input_ids, mask, cache) if is_decoding else None
    if local is None:
        info = batch_info(model, input_ids, mask, cache, lengths, is_decoding, sharding)
        new_per_rank = None if info.placement is None else info.placement.new_per_rank
        if model.ranks.sequence_parallel:
            local = model.compute(input_ids, info)[:, :tokens][:, -keep:]
        else:
            info = replace(info, speculative=True) if kind.speculative else info
            local = model.compute(input_ids, info, cache, keep)
    if cache is not None and not kind.speculative:
        cache.advance(input_ids.shape[1] if sharding is None else sharding.length, mask, new_per_rank)
    return local
