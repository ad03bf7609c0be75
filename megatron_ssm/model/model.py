"""The language model: vocabulary-parallel embeddings, layers and head, and the steps of a call."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from attention2d import Attention2D
from commfabric.collectives import counted as collectives
from commfabric.collectives.agreement import together
from megatron_ssm.kernels.huge_pages import HugePages
from megatron_ssm.kernels.report import dtype_name, kernels_line, size_text
from megatron_ssm.layers.attention import attend_with_cache
from megatron_ssm.layers.cache import Cache
from megatron_ssm.layers.call import EVERY_ROW, Call, Positions
from megatron_ssm.layers.context_attention import ContextAttention
from megatron_ssm.layers.cuda_graphs import DecodingGraphs
from megatron_ssm.layers.operator import Place
from megatron_ssm.layers.routing import Routing
from megatron_ssm.layers.state import State
from megatron_ssm.layers.tapes import Tapes
from megatron_ssm.layers.unit import Layer
from megatron_ssm.parallel.blocks import check_block_length
from megatron_ssm.parallel.layers import RMSNorm, VocabularyParallel
from megatron_ssm.parallel.operators import gather_last, reduce_from_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.token_sharding import KeyValuePlacement, TokenSharding
from megatron_ssm.parallel.tracked import TrackedList, TrackedModule
from megatron_ssm.spec.fields import divides
from megatron_ssm.spec.stack import Stack

from .context import check_length, check_schedule, context_ranks
from .draft_head import DraftHead
from .lora import Lora, lora_fields
from .loss import cross_entropy
from .parameters import attach_fields
from .token_ids import can_be_sharded, check_ids, check_inputs, pad_to_multiple


@dataclass(frozen=True)
class CallKind:
    """The kind of a call.

    Attributes:
        logits_to_keep, seq, prompt: The arguments of `Model.local_logits`.
        is_sharded: True if the tokens are split over the context ranks; False if every rank has all of them.
        speculative: True for `Model.speculative_logits`.
        without_head: True if the call returns the input of the head instead of logits. With sequence parallelism, this is
            the rank's share of the tokens.
    """

    logits_to_keep: int = 0
    seq: int | None = None
    prompt: bool = False
    is_sharded: bool = False
    speculative: bool = False
    without_head: bool = False


class Model(TrackedModule):
    """A state-space language model split over the tensor-parallel ranks, with uninitialized parameters.

    All ranks construct the model together, because this may create process groups. `load` makes models from checkpoints.

    With a schedule, sequences are split over the context-parallel ranks: the model takes and returns this rank's tokens,
    `schedule.shard(input_ids, 1)`. See `loss` for the labels.

    Args:
        config: The layers, sizes and constants.
        ranks: The tensor-parallel ranks, with the counter of sent bytes.
        data_group: The ranks that hold other tokens of the same batch, over which the loss is averaged; None for one rank.
        dtype: The dtype of parameters and activations.
        device: The device of the parameters.
        schedule: The attention schedule of the context-parallel ranks; None if this rank has whole sequences.
        exchange_channels: See `load`.
        experts: The expert-parallel ranks (`expert_group` of `load`); None for one rank.

    Attributes:
        context_ranks: The context-parallel ranks, or None if there is only one.
        draft_head: The layer that guesses tokens (see `load`), or None.
        directory: The directory from which the model was loaded, or None.
        routing: The object to which routers of experts report in `loss` (see `layers.routing`), or None.
        lora: The LoRA adapters, or None.
        weights: "int8" or "int4" if the matrices are quantized, so that the model can only generate; otherwise None.
        graphs: True if CUDA graphs may decode tokens. A failed capture sets it to False.

    Raises:
        ValueError: On every rank, if the model cannot be split over the ranks.
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
        self._is_compared = False
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
        copied = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.data_group)] = self.data_group
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, state: dict) -> None:
        """Restore a copy. Copied parameters lose their fields, which are attached again."""
        super().__setstate__(state)
        self.attach_fields()

    def attach_fields(self) -> None:
        """Attach the field of each parameter; see `parameters.attach_fields`."""
        fields = (*self.config.fields(), *lora_fields(self.config, self.lora))
        attach_fields(self, fields, self.place.part, is_complete=self.weights is None)

    def check_exact_weights(self, purpose: str) -> None:
        """Raise ValueError if the weights are quantized. purpose: a participle for the message, such as "trained"."""
        if self.weights is not None:
            raise ValueError(
                f"a model with weights={self.weights!r} cannot be {purpose}: load one that is not quantized"
            )

    def close(self) -> None:
        """Release the CUDA graphs and the memory that the ranks share. No thread may be running the model.

        Call it before the process group is destroyed, also after an exception: NCCL 2.26 and later destroys a communicator
        only after all graphs that were captured with it, and otherwise hangs (pytorch#115388).

        A closed model captures no graphs. It can still be used, unless its ranks share memory; then neither the model nor
        its copies can run. Copies have their own graphs, and are closed separately.
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
    def start_line(self) -> str:
        """The line that a command prints when it has loaded a model: its kernels, dtype, and the memory of its weights."""
        nbytes = sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))
        dtypes = f"{dtype_name(self.dtype)}{f' with matrices in {self.weights}' if self.weights else ''}"
        size = f"{size_text(nbytes)} of weights{' on each rank' if self.num_ranks > 1 else ''}"
        return f"{kernels_line(self.device, self.dtype, self.ranks.transport)}; {dtypes}, {size}"

    @property
    def num_ranks(self) -> int:
        """The number of ranks that make the same calls in generation.

        This is the number of tensor-parallel ranks times the number of context-parallel or expert-parallel ranks.
        """
        context = 1 if self.context_ranks is None else self.context_ranks.size
        return self.ranks.size * max(context, self.place.experts.size)

    @property
    def copy_groups(self) -> tuple[ProcessGroup | None, ...]:
        """The data-parallel, context-parallel and expert-parallel groups. None stands for one rank.

        The ranks of each group hold the same parameters, except experts in the expert-parallel group.
        """
        return *self.token_groups, self.place.experts.group

    @property
    def token_groups(self) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """The data-parallel and context-parallel groups. The ranks of each hold different tokens of a batch. None: one
        rank.
        """
        return self.data_group, None if self.context_ranks is None else self.context_ranks.group

    @property
    def generating_groups(self) -> tuple[ProcessGroup | None, ...]:
        """The groups whose ranks make the same calls in generation. None stands for one rank."""
        return self.ranks.group, self._peers

    @property
    def _peers(self) -> ProcessGroup | None:
        """The context-parallel or expert-parallel group, whose ranks make the same calls in generation."""
        return self.place.experts.group if self.context_ranks is None else self.context_ranks.group

    def same_on_peers(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens that the first context-parallel or expert-parallel rank has chosen, on the CPU.

        Ranks may choose differently, because their rounding errors differ. Sends one all-gather of the tokens.
        """
        if self._peers is None:
            return tokens
        return collectives.all_gather(tokens.to(self.device), self._peers, self.counter)[0].cpu()

    @property
    def counter(self) -> collectives.Counter:
        """The counter of the bytes that this rank sends."""
        return self.ranks.counter

    @property
    def logits_layer(self) -> VocabularyParallel:
        """The language-model head, or the embeddings if they are tied."""
        return self.embeddings if self.config.tie_embeddings else self.lm_head

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return self.norm_f.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.norm_f.weight.device

    @torch.inference_mode(False)  # so that a cache made inside inference mode can be updated outside of it
    def new_cache(self, batch: int, max_length: int | None = None) -> Cache:
        """An empty cache for `batch` sequences, with this rank's channels and heads.

        Args:
            batch: The number of sequences.
            max_length: The largest number of tokens of a sequence. The memory for the keys and values of attention is
                allocated at once; with context parallelism, each rank allocates its share. None: the memory grows as needed.
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
        """Compute the logits of all tokens. Sends an all-reduce of the embeddings and of each unit, and gathers the logits.

        In models with a time_step_limit, which clamps the step size dt, a call with one token per row that continues a
        sequence counts as decoding. As in transformers, decoding does not clamp dt, so a prompt that is read token by token
        has different logits.

        Under context parallelism, input_ids and the logits are those of this rank's tokens. With a cache, a call with one
        token per row has the same token on every context rank.

        Args:
            input_ids: (batch, seq).
            attention_mask: (batch, seq) of 0 and 1, with zeros only on the left, and only in the first call of a sequence.
                Context parallelism does not support zeros.
            cache: The sequences that the call continues, by any number of tokens. The call updates it. Gradients stop at
                the cache, so use torch.no_grad().
            logits_to_keep: The number of last positions whose logits are returned; 0 for all. Under context parallelism,
                these are the last positions of the whole sequence, on every rank.
            seq: Under context parallelism, the number of tokens that the call reads of each sequence, if the shards are
                padded.

        Returns:
            The logits (batch, kept, vocab) in at least fp32, the same on every tensor-parallel rank.

        Raises:
            ValueError: An input is invalid; on every rank, before anything is sent.
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
        """This rank's slice of the logits of `forward`: (batch, kept, ceil(vocab / ranks)), -inf beyond the vocabulary.

        The arguments are those of `forward`, and `prompt`: True if the tokens are part of a prompt, so that dt is clamped
        even if there is one token per row. Sends the messages of `forward` without the all-gather.
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
        """This rank's slice of the logits after the last token: (batch, ceil(vocab / ranks)). See `local_logits`.

        input_ids: (batch, seq), all tokens on every rank. They are split over the context ranks, unless blocks would be
        shorter than the history of the convolution; then every rank computes all tokens.
        """
        schedule, context = self.schedule, self.context_ranks
        if schedule is None or context is None or not can_be_sharded(input_ids, context.blocks, self.config.history):
            return self._call(input_ids, attention_mask, cache, CallKind(1, None, prompt))[:, -1]
        local, seq = schedule.shard(input_ids, 1), input_ids.shape[1]
        kind = CallKind(1, seq, prompt, is_sharded=True)
        return self._call(local, attention_mask, cache, kind)[:, -1]

    def hidden_states(self, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The normalized hidden states (batch, seq, hidden) after tokens of prompts, the same on all ranks.

        input_ids: (batch, seq). Sends the messages of `forward` without the all-gather. Not supported under context
        parallelism.
        """
        return self._call(input_ids, None, cache, CallKind(prompt=True, without_head=True))

    def speculative_logits(self, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """`local_logits` of tokens (batch, seq) that may be rejected.

        The tokens are decoded as if one by one. The cache does not change until `cache.accept`, with the number of accepted
        tokens, which must precede the next call. Not supported under context parallelism.
        """
        return self._call(input_ids, None, cache, CallKind(speculative=True))

    def describe_decoding(self, input_ids: torch.Tensor, cache: Cache, speculative: bool) -> Call:
        """The description of a call that decodes tokens (batch, tokens). Reserves space for their keys and values."""
        call = self._describe(input_ids, None, cache, cache.lengths[cache.rows].tolist(), True, None)
        return replace(call, speculative=speculative)

    def _call(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None, kind: CallKind
    ) -> torch.Tensor:
        """This rank's slice of the logits, (batch, kept, ceil(vocab / ranks)). Updates the cache. See `local_logits`."""
        keep = kind.logits_to_keep
        is_prompt = kind.prompt or kind.is_sharded
        if cache is not None and attention_mask is None and keep >= 0 and kind.seq is None and not is_prompt:
            local = self._tapes.logits(self, input_ids, cache, kind.speculative)
            if local is not None:
                return local

        mask, sharding = self._check_first_call(input_ids, attention_mask, cache, kind)
        lengths = [] if cache is None else cache.lengths[cache.rows].tolist()
        tokens = input_ids.shape[1]
        if self.ranks.sequence_parallel:
            input_ids, mask = pad_to_multiple(input_ids, mask, self.ranks.size)
        is_decoding, local, new_per_rank = kind.speculative, None, None
        if cache is not None and sharding is None and not kind.prompt and not is_decoding and input_ids.shape[1] == 1:
            is_decoding = all(length > 0 for length in lengths)
            local = self._graphs.logits(self, input_ids, mask, cache) if is_decoding else None  # by a CUDA graph
        if local is None:
            call = self._describe(input_ids, mask, cache, lengths, is_decoding, sharding)
            new_per_rank = None if call.placement is None else call.placement.new_per_rank
            if kind.without_head:
                call = call if self.routing is None else replace(call, routing=self.routing)
                local = self.compute(input_ids, call, cache, without_head=True)
            elif self.ranks.sequence_parallel:
                local = self.compute(input_ids, call)[:, :tokens][:, -keep:]
            else:
                call = replace(call, speculative=True) if kind.speculative else call
                local = self.compute(input_ids, call, cache, keep)
        if cache is not None and not kind.speculative:
            cache.advance(input_ids.shape[1] if sharding is None else sharding.length, mask, new_per_rank)
        return local

    def _check_first_call(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None, kind: CallKind
    ) -> tuple[torch.Tensor | None, TokenSharding | None]:
        """`_check_call`. In the first call in which context ranks have their own tokens, they compare the arguments."""
        if self._is_compared or not kind.is_sharded or self.context_ranks is None:
            return self._check_call(input_ids, attention_mask, cache, kind)
        checked = together(
            lambda: self._check_call(input_ids, attention_mask, cache, kind), [self.context_ranks.group],
            lambda _: {"input_ids": tuple(input_ids.shape), "seq": kind.seq, "cache": cache is not None}, self.device,
        )  # fmt: skip
        self._is_compared = True
        return checked

    def _check_call(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None, kind: CallKind
    ) -> tuple[torch.Tensor | None, TokenSharding | None]:
        """Check a call. Returns (the mask as (batch, seq, 1) or None, the split over the context ranks or None).

        Raises ValueError for inputs that are invalid, or that context parallelism does not support.
        """
        keep, context = kind.logits_to_keep, self.context_ranks
        if keep < 0:
            raise ValueError(f"logits_to_keep={keep} must be at least 0")
        mask = self.check_inputs(input_ids, attention_mask, cache)
        tokens = input_ids.shape[1]
        check_length(self.schedule, tokens, kind.seq)
        if self.ranks.sequence_parallel and cache is not None:
            raise ValueError("a model with sequence_parallel=True takes no cache and cannot generate")
        if context is None:
            return mask, None
        if self.ranks.sequence_parallel:
            divides(tokens, self.ranks.size, "tokens on each context rank", "sequence-parallel ranks")
            if keep:
                raise ValueError(f"logits_to_keep={keep} is not supported with sequence_parallel=True on context ranks")
        if mask is not None:
            raise ValueError("attention_mask has zeros, which context parallelism does not support")
        if (cache is not None or keep) and torch.is_grad_enabled():
            raise ValueError(
                "on context ranks, calls with a cache or logits_to_keep have no gradient: use torch.no_grad()"
            )
        if cache is not None and cache.kv_lengths is None:
            raise ValueError("the cache was not made by the new_cache of a model on context ranks")
        if not kind.is_sharded:
            return None, None
        check_block_length(tokens, self.config.history, context)
        return None, TokenSharding(tokens * context.size if kind.seq is None else kind.seq, tokens, context)

    def _describe(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None, lengths: list[int], is_decoding: bool,
        sharding: TokenSharding | None,
    ) -> Call:  # fmt: skip
        """The description of a call for the operators. Reserves space for its keys and values."""
        batch, tokens = input_ids.shape
        rows, is_first = EVERY_ROW if cache is None else cache.rows, cache is not None and not any(lengths)
        same_tokens = cache is not None and sharding is None
        call = Call(mask, is_decoding, rows, begins=is_first, sharding=sharding, same_tokens=same_tokens)
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
        """`local_logits` without its checks, for a cache with enough space. Updates the cache, except for its lengths."""
        x = self.embedded(input_ids)  # (batch, seq, hidden)
        embeddings = x if len(self.shared) else None  # only shared blocks read the embeddings; other models free them
        hidden = self._tapes.read_prompt(self, call, cache, x)
        if hidden is not None:
            x = hidden
        else:
            for index, layer in enumerate(self.layers):
                x = layer(x, call, self.states_of(cache, index), self.shared, embeddings)
        if cache is not None and "final" in cache.states:  # the draft head reads all hidden states
            positions, x = call.positions, self.norm_f(x)
            assert positions is not None, "a model with a draft head has attention"
            final = cache.states["final"]
            final.append(positions.new, positions.longest, call.rows, call.mask is not None, hidden=x)
            x = x[:, -logits_to_keep:] if x.shape[1] > 1 else x
            return x if without_head else self.scaled_logits(x)
        if call.sharding is not None and logits_to_keep:
            x = call.sharding.gather_last(x, logits_to_keep)
        x = x[:, -logits_to_keep:] if x.shape[1] > 1 else x  # (batch, kept, hidden)
        x = self.norm_f(x)
        return x if without_head else self.scaled_logits(x)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The scaled embeddings (batch, seq, hidden) of ids (batch, seq)."""
        x = self.embeddings.embed(ids)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def draft_hidden(self, ids: torch.Tensor, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The draft head's hidden states (batch, seq, hidden) of ids (batch, seq), the same on all ranks.

        hidden, cache: see `DraftHead.forward`. Sends the sum of the embeddings, and the messages of the draft head.
        """
        assert self.draft_head is not None, "the model has no draft head"
        by_tape = self._tapes.draft_hidden(self, ids, hidden, cache)
        return self.draft_head(self.embedded(ids), hidden, cache) if by_tape is None else by_tape

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's logits (batch, width) of the draft head's hidden states (batch, hidden); see `DraftHead.logits`."""
        assert self.draft_head is not None, "the model has no draft head"
        return self.draft_head.logits(hidden, self.logits_layer)

    def scaled_logits(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's scaled logits (batch, seq, width) of normalized hidden states (batch, seq, hidden)."""
        logits = self.logits_layer.logits(x)
        return logits if self.config.logits_scale == 1.0 else logits * self.config.logits_scale

    def states_of(self, cache: Cache | None, layer: int) -> dict[str, State] | None:
        """{name of an operator: its state} for the operators of a layer; None without a cache."""
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
        """Generate tokens, with the arguments of transformers' `generate`.

        Arguments default to the values in generation_config, then in the checkpoint, then to those of transformers: greedy
        search, 20 new tokens. Greedy search and beam search give the tokens of transformers. Sampling uses the random
        numbers of `megatron_ssm.generate`, so samples differ from those of transformers. Sequences end at eos_token_id;
        shorter ones are filled with pad_token_id.

        Args:
            input_ids: (batch, seq); the name `inputs` is accepted, too.
            generation_config: A GenerationConfig of transformers, or a dictionary.
            attention_mask: As in `forward`. Without it, pad_token_id at the left of a row counts as padding, as in
                transformers; pad_token_id elsewhere raises ValueError.
            seed: The seed of samples, see `megatron_ssm.generate`.
            arguments: max_new_tokens, max_length, min_new_tokens, min_length, do_sample, temperature, top_k, top_p,
                num_beams, num_return_sequences, length_penalty, early_stopping, repetition_penalty, eos_token_id,
                pad_token_id, stop_strings.

        Returns:
            The prompts and the new tokens, (batch * num_return_sequences, seq + new) int64.

        Raises:
            ValueError: On every rank, if an argument is unknown, differs between ranks, or would change the tokens but is
                not implemented.
        """
        from megatron_ssm.engine.transformers_generate import transformers_generate

        input_ids = arguments.pop("inputs", None) if input_ids is None else input_ids
        return transformers_generate(self, input_ids, attention_mask, generation_config, seed, arguments)

    def loss(
        self, input_ids: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100, seq: int | None = None
    ) -> torch.Tensor:
        """The mean cross-entropy in nats of predicting labels[b, t] after input_ids[b, :t + 1].

        The mean is over the tokens of all data-parallel and context-parallel ranks, which all get the same value. The
        gradients on a rank are those of its own tokens; sum them over these ranks. If no position counts, the loss is 0.

        Sends the messages of the model, all-reduces of 1 and of 2 values per position over the tensor-parallel ranks, and
        one of 2 values over the data-parallel and over the context-parallel ranks.

        Args:
            input_ids: (batch, seq) int64, the same on all tensor-parallel ranks. A data-parallel rank may have batch 0.
            labels: (batch, seq) int64, already shifted. Under context parallelism, shift them before they are sharded.
            ignore_index: The label of positions that do not count.
            seq: Under context parallelism, the length of the whole sequence, whose padding does not count; None without
                padding.

        Raises:
            ValueError: An id is outside the vocabulary, the shapes differ, or the model is quantized and gradients are
                enabled.
        """
        labels = self._check_labels(input_ids, labels, ignore_index, seq)
        if self.routing is not None:
            self.routing.begin(self._is_real_token(labels.shape[1], seq))
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

    def _is_real_token(self, tokens: int, seq: int | None) -> torch.Tensor:
        """(tokens,) bool: False for this rank's padding of a sequence of `seq` tokens."""
        if seq is None or self.schedule is None:
            return torch.ones(tokens, dtype=torch.bool, device=self.device)
        padded = tokens if self.context_ranks is None else tokens * self.context_ranks.size
        return (self.schedule.positions(padded) < seq).to(self.device)

    def _check_labels(self, input_ids, labels, ignore_index: int, seq: int | None) -> torch.Tensor:
        """The labels, with `ignore_index` in the padding of a sequence of `seq` tokens. Raises the errors of `loss`."""
        if torch.is_grad_enabled():
            self.check_exact_weights("trained")
        if labels.shape != input_ids.shape:
            raise ValueError(f"labels {tuple(labels.shape)} are not shaped like input_ids {tuple(input_ids.shape)}")
        context, padding = self.context_ranks, 0
        if self.ranks.sequence_parallel and context is not None:  # each block is padded to a multiple of the ranks
            padding = context.blocks_per_rank * self.ranks.size
        check_length(self.schedule, labels.shape[1], seq, padding)
        if seq is not None and self.schedule is not None:
            labels = labels.masked_fill(~self._is_real_token(labels.shape[1], seq).to(labels.device), ignore_index)
        check_ids(labels.masked_fill(labels == ignore_index, 0), self.config.vocab_size, "label")
        return labels

    def check_inputs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor | None:
        """The mask as (batch, seq, 1), or None. Raises ValueError for invalid inputs, before anything is sent."""
        return check_inputs(input_ids, attention_mask, cache, self.config.vocab_size, self.dtype)
