"""Checks of a model's inputs, made on every rank before anything is sent."""

import torch

from megatron_ssm.layers.cache import Cache


def check_inputs(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    vocab_size: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """The mask as (batch, seq, 1) in `dtype`, or None if it masks nothing.

    ValueError if input_ids is not (batch, seq) with ids of the vocabulary, if the cache continues another number of
    sequences, or if the mask is not (batch, seq) of 0 and 1 with zeros only on the left of rows that begin.
    """
    if not torch.is_tensor(input_ids) or input_ids.ndim != 2 or input_ids.numel() == 0:
        given = tuple(input_ids.shape) if torch.is_tensor(input_ids) else type(input_ids).__name__
        raise ValueError(f"input_ids must be (batch, seq) with at least one token, not {given}")
    check_ids(input_ids, vocab_size, "token id")
    if cache is not None and cache.batch != input_ids.shape[0]:
        raise ValueError(f"a cache for {cache.batch} sequences was given {input_ids.shape[0]}")
    return None if attention_mask is None else _check_mask(attention_mask, input_ids, cache, dtype)


def check_ids(ids: torch.Tensor, vocab_size: int, name: str) -> None:
    """ValueError, which calls it `name`, for an id (batch, seq) outside the vocabulary.

    One token per row on a GPU is not checked: the host would wait for the GPU at every decoded token.
    """
    if ids.is_cuda and ids.shape[1] == 1:
        return
    if ids.min() < 0 or ids.max() >= vocab_size:
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"{name} {int(worst)} is outside the vocabulary of {vocab_size}")


def _check_mask(mask, input_ids, cache, dtype) -> torch.Tensor | None:
    if not torch.is_tensor(mask):
        raise ValueError(f"attention_mask must be a tensor, not {type(mask).__name__}")
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(mask.shape)} is not shaped like input_ids {tuple(input_ids.shape)}")
    if not ((mask == 0) | (mask == 1)).all() or (mask.long().diff(dim=1) < 0).any():
        raise ValueError("attention_mask must be 0 or 1 with zeros only on the left of each row")
    if not mask[:, -1].all():
        raise ValueError(f"row {int((mask[:, -1] == 0).nonzero()[0])} of attention_mask has no token")
    if mask.all():
        return None
    if cache is not None and (before := cache.lengths[cache.rows][~mask.all(1).cpu()].max()):
        raise ValueError(f"attention_mask has zeros after {before} tokens: padding stands only before a sequence")
    return mask.unsqueeze(-1).to(dtype)
