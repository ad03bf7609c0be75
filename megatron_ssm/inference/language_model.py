"""The interface of a model that `Engine`, `generate` and beam search are written against."""

import secrets
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from megatron_ssm.operators.cache import Cache
from megatron_ssm.parallel.layers import VocabularyParallel
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.stack.stack import Stack
from sparsefusion.collectives.agreement import on_first


class LanguageModel(Protocol):
    """A model split over tensor-parallel ranks that can continue sequences, such as `megatron_ssm.Model`.

    Attributes:
        config: The configuration of the model.
        ranks: The tensor-parallel ranks.
        embeddings: The embeddings, with this rank's range of the vocabulary.
        directory: The directory of the checkpoint and its tokenizer, or None.
        weights: The format of quantized matrices, such as "int8", or None.
        draft_head: The layer that guesses tokens, or None.
        context_ranks: The ranks that share sequences, or None.
    """

    config: Stack
    ranks: Ranks
    embeddings: VocabularyParallel
    directory: Path | None
    weights: str | None
    draft_head: Any
    context_ranks: Any

    def draft_hidden(self, ids: torch.Tensor, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The draft head's hidden states (batch, seq, hidden) of ids (batch, seq); see `Model.draft_hidden`."""

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's logits (batch, width) of the draft head's hidden states (batch, hidden), for greedy search."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters and activations."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""

    def new_cache(self, batch: int, max_length: int | None = None) -> Cache:
        """An empty cache for `batch` sequences; max_length: the most tokens per sequence (None: it grows)."""

    def check_inputs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor | None:
        """Raise ValueError for invalid input, before anything is sent; returns the mask as (batch, seq, 1), or None."""

    def next_logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        prompt: bool = False,
    ) -> torch.Tensor:
        """This rank's slice of the logits after the last token: (batch, ceil(vocab_size / ranks)).

        input_ids: (batch, seq), the same on all ranks. prompt: the tokens are part of a prompt, even if there is only one
        per row; a single token counts as a decoding step otherwise.
        """

    def local_logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
        prompt: bool = False,
    ) -> torch.Tensor:
        """This rank's slice of the logits after each of the last logits_to_keep tokens (0: all): (batch, kept, width)."""

    def hidden_states(self, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The normalized hidden states (batch, seq, hidden) after tokens of prompts (batch, seq), the same on all ranks."""

    def speculative_logits(self, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits like `local_logits` after tokens that may be rejected; `cache.accept` must follow."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks that make the same calls."""

    @property
    def generating_groups(self) -> tuple[ProcessGroup | None, ...]:
        """The groups of ranks that make the same calls; None for one rank."""

    def same_on_peers(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens that the first context-parallel or expert-parallel rank has chosen."""


def draw_seed(model: LanguageModel) -> int:
    """A random number below 2^48, which the first rank draws for all ranks that make the model's calls."""
    seed = secrets.randbits(48)
    for group in model.generating_groups:
        seed = on_first(partial(int, seed), group, model.device)
    return seed
