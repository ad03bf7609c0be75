"""The language model: vocabulary-parallel embedding, residual blocks and head."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from attention2d import Attention2D
from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import idle_tensors
from megatron_ssm.context.blocks import check_block_length
from megatron_ssm.decoding.cuda_graphs import DecodingGraphs
from megatron_ssm.decoding.decode_plan import DecodePlans
from megatron_ssm.inference.transformers_generate import transformers_generate
from megatron_ssm.layers.block import Block
from megatron_ssm.layers.cache import ALL, BatchInfo, Cache
from megatron_ssm.layers.mamba1 import MambaMixer
from megatron_ssm.layers.mamba2 import Mamba2Mixer
from megatron_ssm.layers.shared_attention import Positions, SharedBlock, SharedBlockInvocation, attend
from megatron_ssm.parallel.layers import RMSNorm, VocabularyParallel
from megatron_ssm.parallel.operators import gather_last, reduce_from_ranks
from megatron_ssm.parallel.ranks import Ranks
from sparsefusion.collectives import counted as collectives

from .context import attend_over_context, check_on_context_ranks, check_schedule, context_ranks
from .inputs import check_ids, check_inputs
from .loss import vocabulary_parallel_cross_entropy
from .parameters import attach_fields


class Model(nn.Module):
    """A state-space language model split over the tensor-parallel ranks. Its parameters are uninitialized until loaded.

    config: the sizes and constants. ranks: the tensor-parallel ranks, with the counter of what this rank sends. data_group:
    the ranks that hold other tokens of the same batch, over which the loss is averaged (None: there are none). dtype: of
    parameters and activations. device: of the parameters. All ranks make the model together, because that may make a process
    group. ValueError on every rank if the model cannot be split over the ranks.

    schedule: how sequences are spread over the context ranks, and attended (None: this rank has whole sequences). With it,
    the model takes and returns this rank's tokens, `schedule.shard(input_ids)`; see `loss` for the labels.

    The attribute directory is the checkpoint it was loaded from, or None; weights is "int8" if the matrices are
    quantized, so that the model can only generate, and None otherwise; graphs tells whether it may decode with CUDA
    graphs, and is False once a step could not be captured; head_ranks are the ranks that share a head of Zamba's mixers.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        data_group: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        schedule: Attention2D | None = None,
    ):
        super().__init__()
        config.check_ranks(ranks.size)
        check_schedule(schedule, config, ranks.group)
        self.config, self.ranks, self.data_group = config, ranks, data_group
        self.schedule, self.context = schedule, context_ranks(schedule, ranks.counter)
        # All ranks make this group together, so it comes before everything that may fail on one rank alone.
        self.head_ranks = ranks if config.groups else ranks.with_same_piece(config.heads)
        self.directory: Path | None = None
        self.weights: str | None = None
        self.graphs = True
        self._decode_plans, self._graphs = DecodePlans(Block), DecodingGraphs(Block)
        options: dict[str, Any] = dict(dtype=dtype, device=device)
        self.embeddings = VocabularyParallel(config.vocab_size, config.hidden_size, ranks, **options)
        core = attend if self.context is None else partial(attend_over_context, schedule)
        self.shared = nn.ModuleList(SharedBlock(config, ranks, core, **options) for _ in range(config.shared_copies))
        self.layers = nn.ModuleList()
        for layer in range(config.num_layers):
            mixer = (
                Mamba2Mixer(config, ranks, self.context, **options)
                if config.groups
                else MambaMixer(config, ranks, self.head_ranks, self.context, **options)
            )
            use = (
                SharedBlockInvocation(config, ranks, idle_tensors(config, layer), **options)
                if layer in config.hybrid_layers
                else None
            )
            self.layers.append(Block(config, mixer, use, **options))
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps, **options)
        if not config.tie_embeddings:
            self.lm_head = VocabularyParallel(config.vocab_size, config.hidden_size, ranks, **options)
        self._attach_fields()

    def __setstate__(self, state: dict) -> None:
        """Attach the fields again, which the parameters of a deep copy have lost."""
        super().__setstate__(state)
        self._attach_fields()

    def _attach_fields(self) -> None:
        attach_fields(self, self.config, self.ranks, is_complete=self.weights is None)

    def check_exact_weights(self, purpose: str) -> None:
        """ValueError if the weights are quantized, so that the model cannot be `purpose` ("saved", "trained")."""
        if self.weights is not None:
            raise ValueError(f"a model with weights={self.weights!r} cannot be {purpose}: load it without")

    def close(self) -> None:
        """Release the CUDA graphs, and the memory that the ranks share. No thread may be running the model.

        Call it before the process group is destroyed, also after an exception. NCCL (since 2.26; pytorch#115388) does not
        destroy a communicator until all graphs that were captured with it are gone, and so waits for ever if they stay.

        Afterwards no graphs are made. If the ranks share no memory, the model can still be used; if they do, neither the
        model nor its copies can run. Copies have their own graphs, and are closed one by one.
        """
        self.graphs = False
        self._graphs.clear()
        for ranks in (self.ranks, self.head_ranks):
            ranks.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def counter(self) -> collectives.Counter:
        """The counter of what this rank sends."""
        return self.ranks.counter

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return self.norm_f.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.norm_f.weight.device

    def new_cache(self, batch: int, max_length: int | None = None) -> Cache:
        """An empty cache for `batch` sequences, with this rank's channels and heads only.

        max_length: for models with attention, the most tokens that a sequence may have; the memory for their keys and values
        is allocated at once. None: it grows as needed.
        """
        blocks: Any = self.layers  # for torch's types its elements are only modules
        shared: Any = self.shared
        layers = [block.mixer.new_cache(batch) for block in blocks]
        for index in self.config.hybrid_layers:
            layers[index].keys, layers[index].values = shared[0].new_cache(batch, max_length or 0)
        return Cache(layers, torch.zeros(batch, dtype=torch.int64), max_length)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        """input_ids (batch, seq) -> logits (batch, kept, vocab), at least fp32, the same on every rank.

        attention_mask: (batch, seq) of 0 and 1, with zeros only on the left and only in the first call for a sequence.
        logits_to_keep: how many of the last positions to return (0: all). ValueError for inputs that are out of range.

        cache: the call continues its sequences by any number of tokens, and updates it. Gradients stop at the cache, so
        such calls are made under torch.no_grad(). Where the step size dt is clamped (Zamba2, or a time_step_limit), a later
        call with one token per row counts as decoding, which does not clamp dt, as in transformers; so a prompt that is
        given token by token has different logits.

        Sends the all-reduces of each block, one of the embeddings, and one all-gather of the logits.
        """
        local = self.local_logits(input_ids, attention_mask, cache, logits_to_keep)
        return gather_last(local, self.ranks)[..., : self.config.vocab_size]

    def local_logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
        prompt: bool = False,
    ) -> torch.Tensor:
        """Like forward, but this rank's slice of the vocabulary: (batch, kept, ceil(vocab/ranks)), -inf beyond its end.

        prompt: the tokens are part of a prompt, so that dt is clamped even if there is only one token per row. Sends what
        forward sends, but the all-gather.
        """
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep} must be at least 0")
        mask = check_on_context_ranks(
            lambda: self._check_call(input_ids, attention_mask, cache, logits_to_keep),
            (getattr(input_ids, "shape", None), torch.is_grad_enabled()),
            self.context,
            self.device,
        )
        is_decoding, local = False, None
        if cache is not None and not prompt and input_ids.shape[1] == 1:
            is_decoding = bool((cache.lengths[cache.rows] > 0).all())
            local = self._graphs.logits(self, input_ids, mask, cache) if is_decoding else None
        if local is None:
            info = self._batch_info(input_ids, mask, cache, is_decoding)
            local = self.compute(input_ids, info, cache, logits_to_keep)
        if cache is not None:
            cache.advance(input_ids.shape[1], mask)
        return local

    def compute(
        self, input_ids: torch.Tensor, info: BatchInfo, cache: Cache | None = None, logits_to_keep: int = 0
    ) -> torch.Tensor:
        """`local_logits` after its checks, for a cache with enough space; updates the cache but not its lengths."""
        x = self.embeddings.embed(input_ids)
        embeddings = x if self.shared else None  # without shared blocks they would only occupy memory
        invocations = iter(range(len(self.config.hybrid_layers)))
        for index, block in self._decode_plans.layers(self, info, cache):
            shared = None if block.use is None else self.shared[next(invocations) % len(self.shared)]
            x = block(x, info, None if cache is None else cache.layers[index], shared, embeddings)
        x = self.norm_f(x[:, -logits_to_keep:])
        return (self.embeddings if self.config.tie_embeddings else self.lm_head).logits(x)

    def _batch_info(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None, is_decoding: bool
    ) -> BatchInfo:
        """What the layers need to know about a call; reserves space for its keys and values."""
        batch, seq = input_ids.shape
        positions = None
        if self.shared and self.schedule is not None and self.context is not None:
            new = self.schedule.positions(seq * self.context.size).to(self.device).expand(batch, -1)
            positions = Positions(new, seq, True, None)
        elif self.shared:
            positions = Positions.of(batch, seq, mask, cache, self.device)
        if positions is not None and cache is not None:
            cache.reserve(positions.longest)
        begins = cache is not None and not cache.lengths[cache.rows].any()
        return BatchInfo(mask, is_decoding, ALL if cache is None else cache.rows, positions, begins)

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        generation_config: Any = None,
        attention_mask: torch.Tensor | None = None,
        seed: int | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """transformers' `generate`: the prompts and the tokens that follow, (batch * num_return_sequences, seq + new) int64.

        input_ids: (batch, seq), may also be called inputs. generation_config: an object of transformers or a dictionary.
        arguments: those of transformers (max_new_tokens, max_length, min_new_tokens, min_length, do_sample, temperature,
        top_k, top_p, num_beams, num_return_sequences, length_penalty, early_stopping, repetition_penalty, eos_token_id,
        pad_token_id, stop_strings). An argument that is not given has the value of generation_config, else that of the
        checkpoint, else transformers' default: greedy search, 20 new tokens. Sequences end at eos_token_id, and shorter ones
        are filled with pad_token_id.

        Greedy search and beam search give transformers' tokens; samples are drawn from `seed` as `megatron_ssm.generate`
        draws them. attention_mask: as in `forward`; without it, pad_token_id on the left of a row is padding, as in
        transformers, and elsewhere an error. ValueError on every rank for an argument that is unknown, that would change
        the tokens and is not implemented, or that differs between ranks.
        """
        input_ids = arguments.pop("inputs", None) if input_ids is None else input_ids
        return transformers_generate(self, input_ids, attention_mask, generation_config, seed, arguments)

    def loss(
        self, input_ids: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100, seq: int | None = None
    ) -> torch.Tensor:
        """The mean cross-entropy in nats of predicting labels[b, t] after input_ids[b, :t + 1]: labels are already shifted.

        input_ids, labels: (batch, seq), the same on all tensor-parallel ranks; positions with `ignore_index` do not count.
        The mean is over the tokens of all ranks of `data_group`, and each of them gets the same value. The gradient on a
        rank is the share of its own tokens, to be summed over that group. Sends all-reduces of 1 and of 2 values per
        position over the tensor-parallel ranks, and one of 2 values over the data group. ValueError for ids outside the
        vocabulary, for labels of another shape than input_ids, and for a quantized model under autograd.

        Under context parallelism, input_ids and labels are this rank's tokens: the labels are shifted before they are
        sharded, and the mean and the sum of the gradients are also over the context ranks. seq: the length of the whole
        sequence, whose padding does not count (None: there is no padding).
        """
        labels = check_on_context_ranks(
            lambda: self._check_labels(input_ids, labels, ignore_index, seq),
            (getattr(input_ids, "shape", None), ignore_index, seq, torch.is_grad_enabled()),
            self.context,
            self.device,
        )
        vocabulary = range(self.embeddings.start, self.embeddings.stop)
        nats = vocabulary_parallel_cross_entropy(self.local_logits(input_ids), labels, vocabulary, self.ranks)
        counted = labels != ignore_index
        sums = torch.stack([nats.masked_fill(~counted, 0).sum(), counted.sum().to(nats.dtype)])
        for group in (self.data_group, None if self.context is None else self.context.group):
            sums = reduce_from_ranks(sums, group, self._sum_over_data_group)
        total, count = sums
        return total / count.clamp(min=1)

    def _check_labels(
        self, input_ids: torch.Tensor, labels: torch.Tensor, ignore_index: int, seq: int | None
    ) -> torch.Tensor:
        """The labels, with `ignore_index` in the padding of a sequence of `seq` tokens; see `loss` for what is refused."""
        if torch.is_grad_enabled():
            self.check_exact_weights("trained")
        if torch.is_tensor(input_ids) and labels.shape != input_ids.shape:
            raise ValueError(f"labels {tuple(labels.shape)} are not shaped like input_ids {tuple(input_ids.shape)}")
        if seq is not None:
            if self.schedule is None:
                raise ValueError(f"seq={seq}: only sequences that context ranks share are padded")
            positions = self.schedule.positions(seq)
            if len(positions) != labels.shape[1]:
                raise ValueError(f"seq={seq} makes {len(positions)} local tokens, not {labels.shape[1]}")
            labels = labels.masked_fill((positions >= seq).to(labels.device), ignore_index)
        check_ids(labels.masked_fill(labels == ignore_index, 0), self.config.vocab_size, "label")
        return labels

    def _sum_over_data_group(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return collectives.all_reduce(tensor, group, self.counter)

    def _check_call(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None, logits_to_keep: int
    ) -> torch.Tensor | None:
        """`check_inputs`, and ValueError for what a call under context parallelism does not support."""
        mask = self.check_inputs(input_ids, attention_mask, cache)
        if self.context is not None:
            if mask is not None:
                raise ValueError("attention_mask has zeros, which context parallelism does not support")
            if cache is not None or logits_to_keep:
                raise ValueError("under context parallelism a call has neither a cache nor logits_to_keep")
            check_block_length(input_ids.shape[1], self.config.conv_kernel - 1, self.context)
        return mask

    def check_inputs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor | None:
        """Raise ValueError for invalid input, on every rank before anything is sent; returns the mask as (batch, seq, 1)."""
        return check_inputs(input_ids, attention_mask, cache, self.config.vocab_size, self.dtype)
