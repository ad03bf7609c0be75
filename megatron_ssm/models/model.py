"""The language model: vocabulary-parallel embedding, layers and head; and what one call of it does."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from attention2d import Attention2D
from megatron_ssm.context.blocks import check_block_length
from megatron_ssm.context.token_sharding import KeyValuePlacement, TokenSharding
from megatron_ssm.decoding.cuda_graphs import DecodingGraphs
from megatron_ssm.decoding.tapes import Tapes
from megatron_ssm.inference.transformers_generate import transformers_generate
from megatron_ssm.operators.attention import attend_with_cache
from megatron_ssm.operators.cache import Cache
from megatron_ssm.operators.call import EVERY_ROW, Call, Positions
from megatron_ssm.operators.context_attention import ContextAttention
from megatron_ssm.operators.operator import Place
from megatron_ssm.operators.routing import Routing
from megatron_ssm.operators.state import State
from megatron_ssm.operators.unit import Layer
from megatron_ssm.ops.huge_pages import HugePages
from megatron_ssm.parallel.layers import RMSNorm, VocabularyParallel
from megatron_ssm.parallel.operators import gather_last, reduce_from_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.tracked import TrackedList, TrackedModule
from megatron_ssm.stack.stack import Stack
from sparsefusion.collectives import counted as collectives

from .context import check_length, check_schedule, context_ranks
from .draft_head import DraftHead
from .inputs import can_be_sharded, check_ids, check_inputs, check_shares, pad_to_multiple
from .lora import Lora, lora_fields
from .loss import cross_entropy
from .parameters import attach_fields


@dataclass(frozen=True)
class CallKind:
    """The kind of a call. For the fields up to prompt see `Model.local_logits`.

    is_sharded: whether each context rank has its own tokens; otherwise every one has all of them. speculative: see
    `Model.speculative_logits`. without_head: the call gives the input of the head instead of logits, with sequence
    parallelism this rank's share of it.
    """

    logits_to_keep: int = 0
    seq: int | None = None
    prompt: bool = False
    is_sharded: bool = False
    speculative: bool = False
    without_head: bool = False

    @property
    def is_prompt_or_sharded(self) -> bool:
        """True unless the call decodes tokens that every rank has."""
        return self.prompt or self.is_sharded


class Model(TrackedModule):
    """A state-space language model split over the tensor-parallel ranks. Its parameters are uninitialized until loaded.

    config: its layers, sizes and constants. ranks: the tensor-parallel ranks, with the counter of what this rank sends.
    data_group: the ranks that hold other tokens of the same batch, over which the loss is averaged (None: there are none).
    dtype: of parameters and activations. device: of the parameters. All ranks make the model together, because that may make
    a process group. ValueError on every rank if the model cannot be split over the ranks. experts: see `load`'s expert_group
    (None: one rank).

    schedule: how sequences are spread over the context ranks, and attended (None: this rank has whole sequences). With it,
    the model takes and returns this rank's tokens, `schedule.shard(input_ids)`; see `loss` for the labels. The attribute
    context_ranks are these ranks, or None if there is one. exchange_channels: see `load`.

    The attribute draft_head is the layer that guesses tokens, or None (see `load`). directory is the checkpoint it was
    loaded from, or None; routing, what routers of experts report to in `loss`, or None (see `operators.routing`); lora says
    which LoRA adapters it has, or None; weights is "int8" or "int4" if the matrices are quantized, so that the model can
    only generate, and None otherwise; graphs tells whether it may decode with CUDA graphs, and is False once a step could
    not be captured.
    """

    def __init__(
        self,
        config: Stack,
        ranks: Ranks,
        data_group: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        schedule: Attention2D | None = None, exchange_channels: bool = False, experts: Ranks | None = None,
    ):  # fmt: skip
        super().__init__()
        experts = Ranks() if experts is None else experts
        config.check_ranks(ranks.size, experts.size)
        check_schedule(schedule, config, ranks.group, data_group, exchange_channels)
        self.config, self.ranks, self.data_group = config, ranks, data_group
        self.schedule, self.context_ranks = schedule, context_ranks(schedule, ranks, exchange_channels)
        core = ContextAttention(schedule, ranks.counter) if self.context_ranks and schedule else attend_with_cache
        self.place = Place(ranks, self.context_ranks, core, dtype, device, experts)
        self.directory: Path | None = None
        self.weights: str | None = None
        self.lora: Lora | None = None
        self.routing: Routing | None = None
        self.graphs = self.context_ranks is None
        self._tapes, self._graphs = Tapes(), DecodingGraphs()
        options: dict[str, Any] = dict(dtype=dtype, device=device)
        self.embeddings = VocabularyParallel(config.vocab_size, config.hidden_size, ranks, **options)
        self.shared = TrackedList(part.spec.build(self.place) for part in config.shared)
        layers = [Layer(units, config.hidden_size, config.residual_in_fp32, self.place) for units in config.layers]
        self.layers = TrackedList(layers)
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps, **options, ranks=ranks, offset=config.norm_offset)
        self.draft_head = DraftHead(config, self.place).requires_grad_(False) if config.has_draft_head else None
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
        """Give each parameter its field; see `parameters.attach_fields`."""
        fields = (*self.config.fields(), *lora_fields(self.config, self.lora))
        attach_fields(self, fields, self.place.part, is_complete=self.weights is None)

    def check_exact_weights(self, purpose: str) -> None:
        """ValueError if the weights are quantized, so that the model cannot be `purpose` ("saved", "trained")."""
        if self.weights is not None:
            raise ValueError(
                f"a model with weights={self.weights!r} cannot be {purpose}: load one that is not quantized"
            )

    def close(self) -> None:
        """Release the CUDA graphs, and the memory that the ranks share. No thread may be running the model.

        Call it before the process group is destroyed, also after an exception. NCCL (since 2.26; pytorch#115388) does not
        destroy a communicator until all graphs that were captured with it are gone, and so waits for ever if they stay.

        Afterwards no graphs are made. If the ranks share no memory, the model can still be used; if they do, neither the
        model nor its copies can run. Copies have their own graphs, and are closed one by one.
        """
        self.graphs = False
        self._graphs.clear()
        for ranks in self.place.all_ranks:
            ranks.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def num_ranks(self) -> int:
        """The number of ranks that make the same calls when they generate.

        It is the number of tensor-parallel ranks times that of context ranks or expert-parallel ranks.
        """
        context = 1 if self.context_ranks is None else self.context_ranks.size
        return self.ranks.size * max(context, self.place.experts.size)

    @property
    def copy_groups(self) -> tuple[ProcessGroup | None, ...]:
        """The groups whose ranks hold copies of this part of the model, but for experts: replicas, context ranks, and those
        that divide the experts. None: one rank.
        """
        return *self.token_groups, self.place.experts.group

    @property
    def token_groups(self) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """The groups whose ranks hold other tokens of a batch: replicas and context ranks. None: one rank."""
        return self.data_group, None if self.context_ranks is None else self.context_ranks.group

    @property
    def generating_groups(self) -> tuple[ProcessGroup | None, ...]:
        """The groups whose ranks make the same calls when they generate. None: one rank."""
        return self.ranks.group, self._peers

    @property
    def _peers(self) -> ProcessGroup | None:
        """The ranks besides the tensor-parallel ones that make the same calls when they generate."""
        return self.place.experts.group if self.context_ranks is None else self.context_ranks.group

    def same_on_peers(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens (on the CPU) that the first context or expert-parallel rank has chosen. Others may have rounded in
        another way.
        """
        if self._peers is None:
            return tokens
        return collectives.all_gather(tokens.to(self.device), self._peers, self.counter)[0].cpu()

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
        modules, layers = dict(self.named_modules()), list(enumerate(self.layers))
        paths = [f"layers.{i}.{name}" for i, layer in layers for name in getattr(layer, "names_with_state", ())]
        with HugePages():
            states = {path: modules[path].new_state(batch) for path in paths}
        if self.draft_head is not None and self.context_ranks is None:
            hidden = torch.zeros(batch, 0, self.config.hidden_size, dtype=self.dtype, device=self.device)
            states |= {"final": State(per_token={"hidden": hidden})} | self.draft_head.new_states(batch)
        cache = Cache(states, torch.zeros(batch, dtype=torch.int64), max_length)
        if self.context_ranks is not None:
            cache.kv_lengths = torch.zeros(self.context_ranks.size, batch, dtype=torch.int64)
            cache.context_rank = self.context_ranks.rank
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
        such calls are made under torch.no_grad(). Where the step size dt is clamped (by a time_step_limit), a later
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
        return self._call(input_ids, attention_mask, cache, CallKind(logits_to_keep, seq, prompt, is_sharded))

    def next_logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        prompt: bool = False,
    ) -> torch.Tensor:
        """This rank's slice of the logits after the last token, (batch, ceil(vocab/ranks)); see `local_logits`.

        input_ids: (batch, seq), all tokens on every rank. Context ranks divide them, unless they are so few that a block
        would be shorter than the convolution: then every rank computes all of them.
        """
        schedule, context = self.schedule, self.context_ranks
        if schedule is None or context is None or not can_be_sharded(input_ids, context.blocks, self.config.history):
            return self._call(input_ids, attention_mask, cache, CallKind(1, None, prompt))[:, -1]
        local, seq = schedule.shard(input_ids, 1), input_ids.shape[1]
        kind = CallKind(1, seq, prompt, is_sharded=True)
        return self._call(local, attention_mask, cache, kind)[:, -1]

    def speculative_logits(self, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """This rank's slice of the logits after each of some tokens (batch, seq), which may be taken back: `local_logits`.

        The tokens count as decoded one by one. The cache stays as it was, until `cache.accept` says how many tokens to keep,
        which comes before the next call. Sends what `local_logits` sends. Not for context ranks.
        """
        return self._call(input_ids, None, cache, CallKind(speculative=True))

    def native_logits(self, input_ids: torch.Tensor, cache: Cache, speculative: bool) -> torch.Tensor | None:
        """The logits of decoded tokens by one call of C, which advances the cache as `_call` does; None: not done."""
        if getattr(self.compute, "__func__", None) is not Model.compute or self._graphs.handles(input_ids):
            return None

        def about() -> Call:
            call = self._about(input_ids, None, cache, cache.lengths[cache.rows].tolist(), True, None)
            return replace(call, speculative=speculative)

        return self._tapes.logits(self, input_ids, cache, speculative, about)

    def captured_logits(self, input_ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache) -> torch.Tensor | None:
        """The logits of a decoding step by a CUDA graph, or None if this step has none."""
        return self._graphs.logits(self, input_ids, mask, cache)

    def _call(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None, kind: CallKind
    ) -> torch.Tensor:
        """This rank's slice of the logits, (batch, kept, ceil(vocab/ranks)); updates the cache. See `local_logits`."""
        keep = kind.logits_to_keep
        is_usual = attention_mask is None and keep >= 0 and kind.seq is None and not kind.is_prompt_or_sharded
        if cache is not None and is_usual:
            local = self.native_logits(input_ids, cache, kind.speculative)
            if local is not None:
                return local

        mask, sharding = self._check_call(input_ids, attention_mask, cache, kind)
        lengths = [] if cache is None else cache.lengths[cache.rows].tolist()
        tokens = input_ids.shape[1]
        if self.ranks.sequence_parallel:
            input_ids, mask = pad_to_multiple(input_ids, mask, self.ranks.size)
        is_decoding, local, new_per_rank = kind.speculative, None, None
        if cache is not None and sharding is None and not kind.prompt and not is_decoding and input_ids.shape[1] == 1:
            is_decoding = all(length > 0 for length in lengths)
            local = self.captured_logits(input_ids, mask, cache) if is_decoding else None
        if local is None:
            call = self._about(input_ids, mask, cache, lengths, is_decoding, sharding)
            new_per_rank = None if call.placement is None else call.placement.new_per_rank
            if kind.without_head:
                call = call if self.routing is None else replace(call, routing=self.routing)
                local = self.compute(input_ids, call, without_head=True)
            elif self.ranks.sequence_parallel:
                local = self.compute(input_ids, call)[:, :tokens][:, -keep:]
            else:
                call = replace(call, speculative=True) if kind.speculative else call
                local = self.compute(input_ids, call, cache, keep)
        if cache is not None and not kind.speculative:
            cache.advance(input_ids.shape[1] if sharding is None else sharding.length, mask, new_per_rank)
        return local

    def _check_call(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None, kind: CallKind
    ) -> tuple[torch.Tensor | None, TokenSharding | None]:
        """The mask as (batch, seq, 1), or None; and how the tokens are sharded over context ranks, or None.

        ValueError for inputs that are wrong, and for what context parallelism does not support.
        """
        keep, context = kind.logits_to_keep, self.context_ranks
        if keep < 0:
            raise ValueError(f"logits_to_keep={keep} must be at least 0")
        mask = self.check_inputs(input_ids, attention_mask, cache)
        tokens = input_ids.shape[1]
        check_length(self.schedule, tokens, kind.seq)
        if self.ranks.sequence_parallel and cache is not None:
            raise ValueError("a model with sequence_parallel=True computes losses and logits, and takes no cache")
        if context is None:
            return mask, None
        if self.ranks.sequence_parallel:
            check_shares(tokens, self.ranks.size, keep)
        if mask is not None:
            raise ValueError("attention_mask has zeros, which context parallelism does not support")
        if (cache is not None or keep) and torch.is_grad_enabled():
            raise ValueError(
                "on context ranks, a cache and logits_to_keep have no gradient: call it under torch.no_grad()"
            )
        if cache is not None and cache.kv_lengths is None:
            raise ValueError("the cache was not made by the new_cache of a model on context ranks")
        if not kind.is_sharded:
            return None, None
        check_block_length(tokens, self.config.history, context)
        return None, TokenSharding(tokens * context.size if kind.seq is None else kind.seq, tokens, context)

    def _about(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None, lengths: list[int], is_decoding: bool,
        sharding: TokenSharding | None,
    ) -> Call:  # fmt: skip
        """A description of a call for the operators; reserves space for its keys and values."""
        batch, tokens = input_ids.shape
        begins = cache is not None and not any(lengths)
        call = Call(mask, is_decoding, EVERY_ROW if cache is None else cache.rows, None, begins, sharding)
        call = replace(call, same_tokens=cache is not None and sharding is None)
        if not self.config.attentions:
            return call
        starts = None if cache is None else cache.lengths[cache.rows]
        if sharding is None:
            positions = Positions.of(starts, batch, tokens, mask, self.device)
        else:
            positions = Positions.of_sharded(sharding, starts, batch, self.device)
        if cache is not None:
            cache.reserve(positions.longest)
        if cache is None or cache.kv_lengths is None:
            return replace(call, positions=positions)
        kv_lengths, rank = cache.kv_lengths[:, cache.rows], cache.context_rank
        placement = (
            KeyValuePlacement.of_replicated(tokens, kv_lengths, rank)
            if sharding is None
            else KeyValuePlacement.of_sharded(sharding, kv_lengths)
        )
        cache.allocate(int((kv_lengths + placement.new_per_rank)[rank].max()))
        return replace(call, positions=positions, placement=placement, lengths=kv_lengths[rank].tolist())

    def compute(
        self, input_ids: torch.Tensor, call: Call, cache: Cache | None = None, logits_to_keep: int = 0,
        without_head: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """`local_logits` after its checks, for a cache with enough space; updates the cache but not its lengths."""
        x = self.embedded(input_ids)
        embeddings = x if len(self.shared) else None  # without shared blocks they would only occupy memory
        read = self._tapes.read(self, call, cache, x)
        if read is not None:
            x = read
        else:
            for index, layer in enumerate(self.layers):
                x = layer(x, call, self.states_of(cache, index), self.shared, embeddings)
        if cache is not None and "final" in cache.states:  # the draft head reads all hidden states
            positions, x = call.positions, self.norm_f(x)
            assert positions is not None, "a model with a draft head has attention"
            final = cache.states["final"]
            final.append(positions.new, positions.longest, call.rows, call.mask is not None, hidden=x)
            return self.scaled_logits(x[:, -logits_to_keep:] if x.shape[1] > 1 else x)
        if call.sharding is not None and logits_to_keep:
            x = call.sharding.gather_last(x, logits_to_keep)
        x = x[:, -logits_to_keep:] if x.shape[1] > 1 else x
        x = self.norm_f(x)
        if without_head:
            return x
        return self.scaled_logits(x)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The embeddings (batch, seq, hidden) of ids (batch, seq), times their constant."""
        x = self.embeddings.embed(ids)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def drafted(self, ids: torch.Tensor, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The draft head's hidden states (batch, seq, hidden) of ids (batch, seq), the same on all ranks.

        hidden, cache: see `DraftHead.forward`. Sends the sum of the embeddings, and what the head sends.
        """
        assert self.draft_head is not None, "the model has no draft head"
        found = self._tapes.drafted(self, ids, hidden, cache)
        return self.draft_head(self.embedded(ids), hidden, cache) if found is None else found

    def drafted_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's logits (batch, width) of the draft head's hidden states (batch, hidden); see `DraftHead.logits`."""
        assert self.draft_head is not None, "the model has no draft head"
        return self.draft_head.logits(hidden, self.logits_layer)

    def scaled_logits(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's logits (batch, seq, width) of normalized hidden states, times their constant."""
        logits = self.logits_layer.logits(x)
        return logits if self.config.logits_scale == 1.0 else logits * self.config.logits_scale

    def states_of(self, cache: Cache | None, layer: int) -> dict[str, State] | None:
        """{name of an operator of this layer: its state}."""
        if cache is None:
            return None
        paths = {name: f"layers.{layer}.{name}" for name, _ in self.layers[layer].named_children()}
        return {name: cache.states[path] for name, path in paths.items() if path in cache.states}

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
        count, and if no position counts, the loss is 0. A replica may have no rows, (0, seq): it adds nothing.
        The mean is over the tokens of all ranks of `data_group`, and each of them gets the same value. The gradient on a
        rank is the share of its own tokens, to be summed over that group. Sends all-reduces of 1 and of 2 values per
        position over the tensor-parallel ranks, and one of 2 values over the data group. ValueError for ids outside the
        vocabulary, for labels of another shape than input_ids, and for a quantized model under autograd.

        Under context parallelism, input_ids and labels are this rank's tokens: the labels are shifted before they are
        sharded, and the mean and the sum of the gradients are also over the context ranks. seq: the length of the whole
        sequence, whose padding does not count (None: there is no padding).
        """
        labels = self._check_labels(input_ids, labels, ignore_index, seq)
        if self.routing is not None:
            self.routing.begin(self._valid(labels.shape[1], seq))
        hidden = self._call(
            input_ids, None, None, CallKind(is_sharded=self.context_ranks is not None, without_head=True)
        )
        nats = cross_entropy(hidden, self.logits_layer, labels, self.ranks, self.config.logits_scale)
        is_valid = labels != ignore_index
        sums = torch.stack([nats.masked_fill(~is_valid, 0).sum(), is_valid.sum().to(nats.dtype)])
        for group in self.token_groups:
            sums = reduce_from_ranks(
                sums, group, lambda tensor, group: collectives.all_reduce(tensor, group, self.counter)
            )
        total, count = sums
        loss = total / count.clamp(min=1)
        if self.routing is None:
            return loss
        return self.routing.added_to(loss, self.ranks, 1 if self.data_group is None else self.data_group.size())

    def _valid(self, tokens: int, seq: int | None) -> torch.Tensor:
        """(tokens,): which of this rank's tokens are no padding of a sequence of `seq` tokens."""
        if seq is None or self.schedule is None:
            return torch.ones(tokens, dtype=torch.bool, device=self.device)
        padded = tokens if self.context_ranks is None else tokens * self.context_ranks.size
        return (self.schedule.positions(padded) < seq).to(self.device)

    def _check_labels(self, input_ids, labels, ignore_index: int, seq: int | None) -> torch.Tensor:
        """The labels, with `ignore_index` in the padding of a sequence of `seq` tokens; see `loss` for what is refused."""
        if torch.is_grad_enabled():
            self.check_exact_weights("trained")
        if not torch.is_tensor(labels):
            raise ValueError(f"labels must be a tensor (batch, seq), not {type(labels).__name__}")
        if torch.is_tensor(input_ids) and labels.shape != input_ids.shape:
            raise ValueError(f"labels {tuple(labels.shape)} are not shaped like input_ids {tuple(input_ids.shape)}")
        context, padding = self.context_ranks, 0
        if self.ranks.sequence_parallel and context is not None:  # the tokens of a block divide over the ranks
            padding = context.blocks_per_rank * self.ranks.size
        check_length(self.schedule, labels.shape[1], seq, padding)
        if seq is not None and self.schedule is not None:
            labels = labels.masked_fill(~self._valid(labels.shape[1], seq).to(labels.device), ignore_index)
        check_ids(labels.masked_fill(labels == ignore_index, 0), self.config.vocab_size, "label")
        return labels

    def check_inputs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor | None:
        """Raise ValueError for invalid input, on every rank before anything is sent; returns the mask as (batch, seq, 1)."""
        return check_inputs(input_ids, attention_mask, cache, self.config.vocab_size, self.dtype)
