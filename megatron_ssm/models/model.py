"""The language model: vocabulary-parallel embedding, residual blocks and head."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from attention2d import Attention2D
from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import idle_tensors
from megatron_ssm.decoding.cuda_graphs import DecodingGraphs
from megatron_ssm.decoding.decode_plan import DecodePlans
from megatron_ssm.inference.transformers_generate import transformers_generate
from megatron_ssm.layers.block import Block
from megatron_ssm.layers.cache import BatchInfo, Cache
from megatron_ssm.layers.mamba1 import MambaMixer
from megatron_ssm.layers.mamba2 import Mamba2Mixer
from megatron_ssm.layers.shared_attention import SharedBlock, SharedBlockInvocation, attend_with_cache
from megatron_ssm.ops.huge_pages import HugePages
from megatron_ssm.parallel.layers import RMSNorm, VocabularyParallel
from megatron_ssm.parallel.operators import gather_last
from megatron_ssm.parallel.ranks import Ranks
from sparsefusion.collectives import counted as collectives

from .calls import CallKind, call
from .context import agree_with_context, check_schedule, context_ranks
from .context_attention import ContextAttention
from .inputs import can_be_sharded, check_inputs
from .lora import Lora
from .loss import mean_cross_entropy
from .parameters import attach_fields


class Model(nn.Module):
    """A state-space language model split over the tensor-parallel ranks. Its parameters are uninitialized until loaded.

    config: the sizes and constants. ranks: the tensor-parallel ranks, with the counter of what this rank sends. data_group:
    the ranks that hold other tokens of the same batch, over which the loss is averaged (None: there are none). dtype: of
    parameters and activations. device: of the parameters. All ranks make the model together, because that may make a process
    group. ValueError on every rank if the model cannot be split over the ranks.

    schedule: how sequences are spread over the context ranks, and attended (None: this rank has whole sequences). With it,
    the model takes and returns this rank's tokens, `schedule.shard(input_ids)`; see `loss` for the labels. The attribute
    context_ranks are these ranks, or None if there is one. exchange_channels: see `load`.

    The attribute directory is the checkpoint it was loaded from, or None; lora says which LoRA adapters it has, or None;
    weights is "int8" or "int4" if the matrices are quantized, so that the model can only generate, and None otherwise;
    graphs tells whether it may decode with CUDA graphs, and is False once a step could not be captured; head_ranks share
    a head of Zamba.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        data_group: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        schedule: Attention2D | None = None, exchange_channels: bool = False,
    ):  # fmt: skip
        super().__init__()
        config.check_ranks(ranks.size)
        check_schedule(schedule, config, ranks.group, data_group, exchange_channels)
        self.config, self.ranks, self.data_group = config, ranks, data_group
        self.schedule, self.context_ranks = schedule, context_ranks(schedule, ranks, exchange_channels)
        # All ranks make this group together, so it comes before everything that may fail on one rank alone.
        self.head_ranks = ranks if config.groups else ranks.with_same_piece(config.heads)
        self.directory: Path | None = None
        self.weights: str | None = None
        self.lora: Lora | None = None
        self.graphs = self.context_ranks is None
        self._decode_plans, self._graphs = DecodePlans(Block), DecodingGraphs(Block)
        options: dict[str, Any] = dict(dtype=dtype, device=device)
        self.embeddings = VocabularyParallel(config.vocab_size, config.hidden_size, ranks, **options)
        core = ContextAttention(schedule, ranks.counter) if self.context_ranks and schedule else attend_with_cache
        self.shared = nn.ModuleList(SharedBlock(config, ranks, core, **options) for _ in range(config.shared_copies))
        self.layers = nn.ModuleList()
        for layer in range(config.num_layers):
            mixer = (
                Mamba2Mixer(config, ranks, self.context_ranks, **options)
                if config.groups
                else MambaMixer(config, ranks, self.head_ranks, self.context_ranks, **options)
            )
            use = (
                SharedBlockInvocation(config, ranks, idle_tensors(config, layer), **options)
                if layer in config.hybrid_layers
                else None
            )
            self.layers.append(Block(config, ranks, mixer, use, **options))
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps, **options, ranks=ranks)
        if not config.tie_embeddings:
            self.lm_head = VocabularyParallel(config.vocab_size, config.hidden_size, ranks, **options)
        self.attach_fields()

    def __deepcopy__(self, memo: dict) -> "Model":
        """A copy with parameters of its own, for the same ranks: process groups are handles."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.data_group)] = self.data_group
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, state: dict) -> None:
        """Attach the fields again, which the parameters of a deep copy have lost."""
        super().__setstate__(state)
        self.attach_fields()

    def attach_fields(self) -> None:
        """Give each parameter its field of the layout; see `parameters.attach_fields`."""
        attach_fields(self, self.config, self.lora, self.ranks, is_complete=self.weights is None)

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
    def num_ranks(self) -> int:
        """How many ranks make the same calls: those that hold the parts of the model, times those that share sequences."""
        return self.ranks.size * (1 if self.context_ranks is None else self.context_ranks.size)

    @property
    def copy_groups(self) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """The groups whose ranks hold copies of this part of the model: replicas and context ranks. None: one rank."""
        return self.data_group, None if self.context_ranks is None else self.context_ranks.group

    def agree(self, asked: Callable[[], object]) -> int:
        """Compare what these ranks are asked to do; returns a random number, the same on all. See `Ranks.agree`."""
        if self.context_ranks is None:
            return self.ranks.agree(self.device, asked)
        return agree_with_context(self.ranks, self.context_ranks, self.device, asked)

    def same_on_context_ranks(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens (on the CPU) that the first context rank has chosen. Others may have rounded in another way."""
        if self.context_ranks is None:
            return tokens
        return collectives.all_gather(tokens.to(self.device), self.context_ranks.group, self.counter)[0].cpu()

    @property
    def counter(self) -> collectives.Counter:
        """The counter of what this rank sends."""
        return self.ranks.counter

    @property
    def logits_layer(self) -> VocabularyParallel:
        """The language-model head; if it is tied, the embeddings."""
        return self.embeddings if self.config.tie_embeddings else self.lm_head

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return self.norm_f.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.norm_f.weight.device

    @torch.inference_mode(False)  # so that calls outside of inference mode can update the cache, too
    def new_cache(self, batch: int, max_length: int | None = None) -> Cache:
        """An empty cache for `batch` sequences, with this rank's channels and heads only.

        max_length: for models with attention, the most tokens that a sequence may have; the memory for their keys and values
        is allocated at once. None: it grows as needed. Context ranks allocate their share of it.
        """
        model: Any = self  # for torch's types the elements of its lists are only modules
        with HugePages():
            layers = [block.mixer.new_cache(batch) for block in model.layers]
        cache = Cache(layers, torch.zeros(batch, dtype=torch.int64), max_length)
        if self.context_ranks is not None:
            cache.kv_lengths = torch.zeros(self.context_ranks.size, batch, dtype=torch.int64)
            cache.context_rank = self.context_ranks.rank
        for index in self.config.hybrid_layers:
            cache.layers[index].keys, cache.layers[index].values = model.shared[0].new_cache(batch, 0)
        cache.reserve(max_length or 0)
        return cache

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
        seq: int | None = None,
    ) -> torch.Tensor:
        """input_ids (batch, seq) -> logits (batch, kept, vocab), at least fp32, the same on every rank.

        attention_mask: (batch, seq) of 0 and 1, with zeros only on the left and only in the first call for a sequence.
        logits_to_keep: how many of the last positions to return (0: all). ValueError for inputs that are out of range.

        cache: the call continues its sequences by any number of tokens, and updates it. Gradients stop at the cache, so
        such calls are made under torch.no_grad(). Where the step size dt is clamped (Zamba2, or a time_step_limit), a later
        call with one token per row counts as decoding, which does not clamp dt, as in transformers; so a prompt that is
        given token by token has different logits.

        Under context parallelism, input_ids and the logits are those of this rank's tokens, and seq is the number of tokens
        of each sequence that the call reads, if their division is padded. With a cache, a call with one token per row has
        the same token on every context rank. The last positions of `logits_to_keep` are those of the whole sequence, on
        every rank. There is no attention_mask.

        Sends the all-reduces of each block, one of the embeddings, and one all-gather of the logits.
        """
        local = self.local_logits(input_ids, attention_mask, cache, logits_to_keep, seq=seq)
        return gather_last(local, self.ranks)[..., : self.config.vocab_size]

    def local_logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
        prompt: bool = False,
        seq: int | None = None,
    ) -> torch.Tensor:
        """Like forward, but this rank's slice of the vocabulary: (batch, kept, ceil(vocab/ranks)), -inf beyond its end.

        prompt: the tokens are part of a prompt, so that dt is clamped even if there is only one token per row. Sends what
        forward sends, but the all-gather.
        """
        is_one_token = cache is not None and seq is None and torch.is_tensor(input_ids) and input_ids.shape[-1] == 1
        is_sharded = self.context_ranks is not None and not is_one_token
        return call(self, input_ids, attention_mask, cache, CallKind(logits_to_keep, seq, prompt, is_sharded))

    def next_logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        prompt: bool = False,
        compared: bool = False,
    ) -> torch.Tensor:
        """This rank's slice of the logits after the last token, (batch, ceil(vocab/ranks)); see `local_logits`.

        input_ids: (batch, seq), all tokens on every rank. Context ranks divide them, unless they are so few that a block
        would be shorter than the convolution: then every rank computes all of them. compared: all ranks are known to make
        the same call. Otherwise context ranks compare it first, by a message.
        """
        schedule, context = self.schedule, self.context_ranks
        history = self.config.conv_kernel - 1
        if schedule is None or context is None or not can_be_sharded(input_ids, context.blocks, history):
            return call(self, input_ids, attention_mask, cache, CallKind(1, None, prompt, compared=compared))[:, -1]
        local, seq = schedule.shard(input_ids, 1), input_ids.shape[1]
        kind = CallKind(1, seq, prompt, is_sharded=True, compared=compared)
        return call(self, local, attention_mask, cache, kind)[:, -1]

    def speculative_logits(self, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """This rank's slice of the logits after each of some tokens (batch, seq), which may be taken back: `local_logits`.

        The tokens count as decoded one by one. The cache stays as it was, until `cache.accept` says how many tokens to keep,
        which comes before the next call. Sends what `local_logits` sends. Not for context ranks.
        """
        return call(self, input_ids, None, cache, CallKind(speculative=True))

    def native_logits(self, input_ids: torch.Tensor, cache: Cache, speculative: bool) -> torch.Tensor | None:
        """The logits of decoded tokens by one call of C, which advances the cache as `call` does; None: nothing was done."""
        is_plain = getattr(self.compute, "__func__", None) is Model.compute and not self._graphs.are_for(input_ids)
        return self._decode_plans.logits(self, input_ids, cache, speculative) if is_plain else None

    def captured_logits(self, input_ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache) -> torch.Tensor | None:
        """The logits of a decoding step by a CUDA graph, or None if this step has none."""
        return self._graphs.logits(self, input_ids, mask, cache)

    def compute(
        self, input_ids: torch.Tensor, info: BatchInfo, cache: Cache | None = None, logits_to_keep: int = 0
    ) -> torch.Tensor:
        """`local_logits` after its checks, for a cache with enough space; updates the cache but not its lengths."""
        x = self.embeddings.embed(input_ids)
        embeddings = x if self.shared else None  # without shared blocks they would only occupy memory
        invocations = iter(range(len(self.config.hybrid_layers)))
        layers, give_logits = self._decode_plans.layers(self, info, cache, input_ids.shape[1])
        for index, block in layers:
            shared = None if block.use is None else self.shared[next(invocations) % len(self.shared)]
            x = block(x, info, None if cache is None else cache.layers[index], shared, embeddings)
        if give_logits:
            return x
        if info.sharding is not None and logits_to_keep:
            x = info.sharding.gather_last(x, logits_to_keep)
        x = x[:, -logits_to_keep:] if x.shape[1] > 1 else x
        return self.logits_layer.logits(self.norm_f(x))

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

        input_ids, labels: (batch, seq) int64, the same on all tensor-parallel ranks; positions with `ignore_index` do not
        count, and if no position counts, the loss is 0.
        The mean is over the tokens of all ranks of `data_group`, and each of them gets the same value. The gradient on a
        rank is the share of its own tokens, to be summed over that group. Sends all-reduces of 1 and of 2 values per
        position over the tensor-parallel ranks, and one of 2 values over the data group. ValueError for ids outside the
        vocabulary, for labels of another shape than input_ids, and for a quantized model under autograd.

        Under context parallelism, input_ids and labels are this rank's tokens: the labels are shifted before they are
        sharded, and the mean and the sum of the gradients are also over the context ranks. seq: the length of the whole
        sequence, whose padding does not count (None: there is no padding).
        """
        return mean_cross_entropy(self, input_ids, labels, ignore_index, seq)

    def check_inputs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor | None:
        """Raise ValueError for invalid input, on every rank before anything is sent; returns the mask as (batch, seq, 1)."""
        return check_inputs(input_ids, attention_mask, cache, self.config.vocab_size, self.dtype)
