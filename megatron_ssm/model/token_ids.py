"""The token ids and the mask of a call: checks, which every rank makes before anything is sent, and padding."""

import torch
import torch.nn.functional as F

from megatron_ssm.layers.cache import Cache

FAST_IN_PYTHON = 64  # the number of ids up to which Python's min and max are faster than torch.aminmax


def can_be_sharded(input_ids: torch.Tensor, blocks: int, conv_history: int) -> bool:
    """Return True if each of `blocks` blocks of input_ids (batch, seq) has at least max(2, `conv_history`) tokens."""
    return (
        torch.is_tensor(input_ids) and input_ids.ndim == 2 and -(-input_ids.shape[1] // blocks) >= max(2, conv_history)
    )


def pad_to_multiple(
    input_ids: torch.Tensor, mask: torch.Tensor | None, ranks: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """input_ids (batch, seq) and mask (batch, seq, 1), padded at the end to a multiple of the ranks."""
    padding = -input_ids.shape[1] % ranks
    if not padding:
        return input_ids, mask
    return F.pad(input_ids, (0, padding)), None if mask is None else F.pad(mask, (0, 0, 0, padding), value=1)


def check_inputs(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    vocab_size: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Check the inputs of a call.

    Args:
        input_ids: (batch, seq) with seq >= 1; batch may be 0.
        attention_mask: (batch, seq) of 0 and 1, or None. Zeros are allowed only on the left of sequences without tokens in
            the cache.
        cache: A cache with `batch` rows, or None.
        vocab_size: The size of the vocabulary.
        dtype: The dtype of the result.

    Returns:
        The mask as (batch, seq, 1), or None if it has no zeros.

    Raises:
        ValueError: An input is invalid.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be (batch, seq) with at least one token, not {tuple(input_ids.shape)}")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids are {input_ids.dtype}; token ids must be whole numbers")
    check_ids(input_ids, vocab_size, "token id")
    if cache is not None and cache.batch != input_ids.shape[0]:
        raise ValueError(f"the cache has {cache.batch} rows, but input_ids has {input_ids.shape[0]}")
    return None if attention_mask is None else _check_mask(attention_mask, input_ids, cache, dtype)


def check_ids(ids: torch.Tensor, vocab_size: int, name: str) -> None:
    """Raise ValueError if an element of ids (batch, seq) is outside the vocabulary. name: the noun for it in the message.

    One token per row on a GPU is not checked, because the host would wait for the GPU at every decoded token.
    """
    if not ids.numel() or ids.is_cuda and ids.shape[1] == 1:
        return
    if ids.numel() <= FAST_IN_PYTHON:
        numbers = ids.flatten().tolist()
        smallest, largest = min(numbers), max(numbers)
    else:
        smallest, largest = map(int, ids.aminmax())
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(f"{name} {smallest if smallest < 0 else largest} is outside the vocabulary of {vocab_size}")


def _check_mask(mask, input_ids, cache, dtype) -> torch.Tensor | None:
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(mask.shape)} is not shaped like input_ids {tuple(input_ids.shape)}")
    if not ((mask == 0) | (mask == 1)).all() or (mask.long().diff(dim=1) < 0).any():
        raise ValueError("attention_mask must be 0 or 1 with zeros only on the left of each row")
    mask = mask.bool()
    if not mask[:, -1].all():
        raise ValueError(f"row {int((mask[:, -1] == 0).nonzero()[0])} of attention_mask has no token")
    if mask.all():
        return None
    if cache is not None and (length := cache.lengths[cache.rows][~mask.all(1).cpu()].max()):
        raise ValueError(f"attention_mask has zeros after {length} tokens: only the start of a sequence can be padded")
    return mask.unsqueeze(-1).to(dtype)
