"""Checks of the inputs of a model's call, made on every rank before anything is sent."""

import torch
import torch.nn.functional as F

from megatron_ssm.operators.cache import Cache

FEW = 64  # ids of which Python finds the least and the most sooner than torch


def check_shares(tokens: int, ranks: int, logits_to_keep: int) -> None:
    """ValueError for what sequence parallelism does not support on context ranks."""
    if tokens % ranks:
        rule = f"do not divide over {ranks} sequence-parallel ranks ({tokens} % {ranks} = {tokens % ranks})"
        raise ValueError(f"{tokens} tokens on each context rank {rule}")
    if logits_to_keep:
        raise ValueError(
            f"logits_to_keep={logits_to_keep} is not supported with sequence_parallel=True on context ranks"
        )


def can_be_sharded(input_ids: torch.Tensor, blocks: int, conv_history: int) -> bool:
    """Return True if a chunk can be sharded: each of `blocks` blocks must have at least max(2, `conv_history`) tokens."""
    return (
        torch.is_tensor(input_ids) and input_ids.ndim == 2 and -(-input_ids.shape[1] // blocks) >= max(2, conv_history)
    )


def pad_to_multiple(
    input_ids: torch.Tensor, mask: torch.Tensor | None, ranks: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """input_ids (batch, seq) and mask (batch, seq, 1) with more tokens at the end, so that they divide over the ranks."""
    missing = -input_ids.shape[1] % ranks
    if not missing:
        return input_ids, mask
    return F.pad(input_ids, (0, missing)), None if mask is None else F.pad(mask, (0, 0, 0, missing), value=1)


def check_inputs(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    vocab_size: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """The mask as (batch, seq, 1) in `dtype`, or None if it masks nothing.

    ValueError if input_ids is not (batch, seq), seq >= 1, with ids of the vocabulary, if the cache has another number of
    rows, or if the mask is not (batch, seq) of 0 and 1 with zeros only on the left of rows that begin. There may be no rows.
    """
    if not torch.is_tensor(input_ids) or input_ids.ndim != 2 or input_ids.shape[1] == 0:
        given = tuple(input_ids.shape) if torch.is_tensor(input_ids) else type(input_ids).__name__
        raise ValueError(f"input_ids must be (batch, seq) with at least one token, not {given}")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids are {input_ids.dtype}; token ids must be whole numbers")
    check_ids(input_ids, vocab_size, "token id")
    if cache is not None and cache.batch != input_ids.shape[0]:
        raise ValueError(f"a cache for {cache.batch} sequences was given {input_ids.shape[0]}")
    return None if attention_mask is None else _check_mask(attention_mask, input_ids, cache, dtype)


def check_ids(ids: torch.Tensor, vocab_size: int, name: str) -> None:
    """ValueError for an id (batch, seq) outside the vocabulary. name: what the message calls it.

    One token per row on a GPU is not checked: the host would wait for the GPU at every decoded token.
    """
    if not ids.numel() or ids.is_cuda and ids.shape[1] == 1:
        return
    if ids.numel() <= FEW:
        numbers = ids.flatten().tolist()
        least, most = min(numbers), max(numbers)
    else:
        least, most = map(int, ids.aminmax())
    if least < 0 or most >= vocab_size:
        raise ValueError(f"{name} {least if least < 0 else most} is outside the vocabulary of {vocab_size}")


def _check_mask(mask, input_ids, cache, dtype) -> torch.Tensor | None:
    if not torch.is_tensor(mask):
        raise ValueError(f"attention_mask must be a tensor, not {type(mask).__name__}")
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(mask.shape)} is not shaped like input_ids {tuple(input_ids.shape)}")
    if not ((mask == 0) | (mask == 1)).all() or (mask.long().diff(dim=1) < 0).any():
        raise ValueError("attention_mask must be 0 or 1 with zeros only on the left of each row")
    mask = mask.bool()
    if not mask[:, -1].all():
        raise ValueError(f"row {int((mask[:, -1] == 0).nonzero()[0])} of attention_mask has no token")
    if mask.all():
        return None
    if cache is not None and (before := cache.lengths[cache.rows][~mask.all(1).cpu()].max()):
        raise ValueError(f"attention_mask has zeros after {before} tokens: padding stands only before a sequence")
    return mask.unsqueeze(-1).to(dtype)
