"""The language model: vocabulary-parallel embedding, residual blocks, head; and its loss."""

import torch
from torch import nn

from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import idle_tensors, layout
from megatron_ssm.decoding.cuda_graphs import DecodingGraphs
from megatron_ssm.decoding.decode_plan import DecodePlans
from megatron_ssm.inference.transformers_generate import transformers_generate
from megatron_ssm.layers.block import Block
from megatron_ssm.layers.cache import ALL, BatchInfo, Cache
from megatron_ssm.layers.mamba1 import MambaMixer
from megatron_ssm.layers.mamba2 import Mamba2Mixer
from megatron_ssm.layers.shared_attention import Positions, SharedBlock, SharedBlockInvocation
from megatron_ssm.parallel.layers import Ranks, RMSNorm, VocabularyParallel, gather_last, reduce_from_ranks
from sparsefusion.collectives import counted as collectives


class Model(nn.Module):
    """A state-space language model split over the tensor-parallel ranks; parameters uninitialized until loaded.

    ranks: who shares the model, and the counter of what this rank sends. data_group: the ranks that hold other tokens
    of the same batch (None: none), over which the loss is averaged.
    """

    def __init__(self, config: Config, ranks: Ranks, data_group=None, dtype=torch.float32, device="cpu"):
        super().__init__()
        config.check_ranks(ranks.size)
        self.config, self.ranks, self.data_group = config, ranks, data_group
        # The ranks that share a head of Mamba-1's kind. Making their group is collective: it comes before all that may fail.
        self.head_ranks = ranks if config.groups else ranks.sharing(config.heads)
        self.directory = None  # where it was loaded from
        self.weights = None  # "int8": its matrices are rounded, and it can only generate
        self.graphs = True  # may decode by CUDA graphs; False once a step could not be captured
        self._decode_plans, self._graphs = DecodePlans(Block), DecodingGraphs(Block)
        where = dict(dtype=dtype, device=device)
        self.embeddings = VocabularyParallel(config.vocab_size, config.hidden_size, ranks, **where)
        self.shared = nn.ModuleList(SharedBlock(config, ranks, **where) for _ in range(config.shared_copies))
        self.layers = nn.ModuleList()
        for layer in range(config.num_layers):
            mixer = (
                Mamba2Mixer(config, ranks, **where)
                if config.groups
                else MambaMixer(config, ranks, self.head_ranks, **where)
            )
            use = (
                SharedBlockInvocation(config, ranks, idle_tensors(config, layer), **where)
                if layer in config.hybrid_layers
                else None
            )
            self.layers.append(Block(config, mixer, use, **where))
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps, **where)
        if not config.tie_embeddings:
            self.lm_head = VocabularyParallel(config.vocab_size, config.hidden_size, ranks, **where)
        self._mark_parameters()

    def __setstate__(self, state):
        """A deep copy's parameters have lost their attributes."""
        super().__setstate__(state)
        self._mark_parameters()

    def _mark_parameters(self):
        """Give each parameter its `field`, and Megatron's attributes of how it is split."""
        fields, parameters = layout(self.config), dict(self.named_parameters())
        if self.weights is None and {f.name for f in fields} != set(parameters):
            raise AssertionError(f"layout and model differ in {set(parameters) ^ {f.name for f in fields}}")
        for field in (field for field in fields if field.name in parameters):
            parameter = parameters[field.name]
            shape = field.local_shape(self.ranks.rank, self.ranks.size)
            if shape != tuple(parameter.shape):
                raise AssertionError(f"{field.name} is {tuple(parameter.shape)}, its layout says {shape}")
            parameter.field = field
            parameter.tensor_model_parallel = self.ranks.size > 1 and field.copies(self.ranks.size) < self.ranks.size
            parameter.partition_dim = field.split if parameter.tensor_model_parallel else -1
            parameter.partition_stride = 1

    def check_exact_weights(self, done: str) -> None:
        """ValueError if the weights are rounded, and so cannot be saved or trained."""
        if self.weights is not None:
            raise ValueError(f"a model with weights={self.weights!r} cannot be {done}: load it without")

    def close(self) -> None:
        """Give up the CUDA graphs, and the memory that the ranks share (if they do). No thread may be running the model.

        Call it before destroying the group, also after an exception: NCCL waits, in the destruction of a communicator, for
        all graphs that were captured with it, for ever while they are there (since 2.26; pytorch#115388). No graphs are
        made afterwards. A model whose ranks share no memory can still be used, and decodes as usual; one whose ranks do,
        and its copies, cannot run on them any more. Copies have graphs of their own, and are closed one by one.
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
        """What this rank has sent."""
        return self.ranks.counter

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return self.norm_f.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.norm_f.weight.device

    def new_cache(self, batch: int, max_length: int | None = None) -> Cache:
        """An empty cache for `batch` sequences, this rank's channels and heads only.

        max_length: the tokens a sequence may have, for the keys and values of models with attention, which then never
        move (None: room is made as they come).
        """
        layers = [block.mixer.new_cache(batch) for block in self.layers]  # type: ignore[operator, union-attr]
        for index in self.config.hybrid_layers:
            layers[index].keys, layers[index].values = self.shared[0].new_cache(batch, max_length or 0)  # type: ignore[operator]
        return Cache(layers, torch.zeros(batch, dtype=torch.int64), max_length)

    def forward(self, input_ids, attention_mask=None, cache=None, logits_to_keep=0):
        """input_ids (batch, seq) -> logits (batch, kept, vocab), at least fp32, the same on every rank.

        attention_mask: (batch, seq) of 0 and 1, zeros only on the left and only in a sequence's first call.
        cache: continues from it and updates it, any number of tokens per call; the gradient stops at the cache, and such
        a call is for torch.no_grad(). (Where dt has a limit, Zamba2 or a time_step_limit, a later one-token call is a
        decoding step and does not clamp dt, as in transformers: a prompt given token by token is not the same there.)
        logits_to_keep=k: the last k positions (0: all). Sends each block's all-reduces, one of the embeddings, one
        all-gather of the logits.
        """
        local = self.local_logits(input_ids, attention_mask, cache, logits_to_keep)
        return gather_last(local, self.ranks)[..., : self.config.vocab_size]

    def local_logits(self, input_ids, attention_mask=None, cache=None, logits_to_keep=0, prompt=False):
        """As forward, but this rank's slice of the vocabulary: (batch, kept, ceil(vocab/ranks)), -inf beyond its end.

        prompt: the tokens are part of a prompt even where there is one of them, and dt is clamped.
        """
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep} must be at least 0")
        mask = self.check(input_ids, attention_mask, cache)
        decoding = input_ids.shape[1] == 1 and not prompt and cache is not None
        decoding = decoding and bool((cache.lengths[cache.rows] > 0).all())
        local = self._graphs.logits(self, input_ids, mask, cache) if decoding else None
        if local is None:
            local = self.compute(input_ids, self._batch_info(input_ids, mask, cache, decoding), cache, logits_to_keep)
        if cache is not None:
            cache.advance(input_ids.shape[1], mask)
        return local

    def compute(self, input_ids, info: BatchInfo, cache=None, logits_to_keep=0):
        """`local_logits` of a call that was checked and has room; the cache is updated but for its lengths."""
        x = self.embeddings.embed(input_ids)
        embeddings = x if self.shared else None  # which would only lie in memory
        use = iter(range(len(self.config.hybrid_layers)))
        for index, block in self._decode_plans.layers(self, info, cache):
            shared = None if block.use is None else self.shared[next(use) % len(self.shared)]
            x = block(x, info, None if cache is None else cache.layers[index], shared, embeddings)
        x = self.norm_f(x[:, -logits_to_keep:])
        return (self.embeddings if self.config.tie_embeddings else self.lm_head).logits(x)

    def _batch_info(self, input_ids, mask, cache, decoding) -> BatchInfo:
        """What the layers must know of a call; makes room for its keys and values."""
        batch, seq = input_ids.shape
        positions = Positions.of(batch, seq, mask, cache, self.device) if self.shared else None
        if positions is not None and cache is not None:
            cache.reserve(positions.longest)
        begins = cache is not None and not cache.lengths[cache.rows].any()
        return BatchInfo(mask, decoding, ALL if cache is None else cache.rows, positions, begins)

    def generate(self, input_ids=None, generation_config=None, attention_mask=None, seed=None, **arguments):
        """transformers' `generate`: the prompts and what follows them, (batch * num_return_sequences, seq + new) int64.

        arguments: transformers' own (max_new_tokens, max_length, min_new_tokens, min_length, do_sample, temperature,
        top_k, top_p, num_beams, num_return_sequences, length_penalty, early_stopping, repetition_penalty, eos_token_id,
        pad_token_id, stop_strings), with its defaults: those of generation_config (an object of transformers or a
        dictionary), then of the checkpoint; greedy, 20 new tokens, stops at the checkpoint's eos_token_id, shorter rows
        filled with pad_token_id. Greedy search and beam search give transformers' tokens; samples are drawn as
        `megatron_ssm.generate` draws them, from `seed`. input_ids may be called inputs. Without attention_mask,
        pad_token_id on the left of a row is padding, as there, and an error elsewhere. ValueError for an argument that
        is unknown, or would change the tokens and is not implemented.
        """
        input_ids = arguments.pop("inputs", None) if input_ids is None else input_ids
        return transformers_generate(self, input_ids, attention_mask, generation_config, seed, arguments)

    def loss(self, input_ids, labels, ignore_index=-100):
        """Mean cross-entropy, in nats, of predicting labels[b, t] after input_ids[b, :t + 1]: labels are already shifted.

        input_ids, labels: (batch, seq), the same on all tensor-parallel ranks; positions with `ignore_index` do not
        count. The mean is over the tokens of all ranks of `data_group`, each of which gets the same value; the
        gradient left on a rank is its own tokens' share, to be summed over that group. Sends all-reduces of one and of two
        numbers per position over the tensor-parallel ranks, and one of two numbers over the data group.
        """
        if torch.is_grad_enabled():
            self.check_exact_weights("trained")
        self._check_ids(labels.masked_fill(labels == ignore_index, 0), "label")
        nats = self._nats(self.local_logits(input_ids), labels)
        counted = labels != ignore_index
        sums = torch.stack([nats.masked_fill(~counted, 0).sum(), counted.sum().to(nats.dtype)])
        total, count = reduce_from_ranks(sums, self.data_group, self._reduce_data)
        return total / count.clamp(min=1)

    def _reduce_data(self, tensor, group):
        return collectives.all_reduce(tensor, group, self.counter)

    def _nats(self, local, labels):
        """-log p(label) per position from this rank's logits: a shifted log-sum-exp and the label's logit, reduced."""
        ranks, start = self.ranks, self.embeddings.start
        mine = (labels >= start) & (labels < self.embeddings.stop)
        label_logit = local.gather(-1, (labels - start).where(mine, 0).unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        log_sum = local.logsumexp(-1)
        if ranks.group is None:
            return log_sum - label_logit
        largest = ranks.largest(log_sum)
        parts = torch.stack([(log_sum - largest).exp(), label_logit])
        total, label_logit = reduce_from_ranks(parts, ranks.group, ranks.exact)
        return total.log() + largest - label_logit

    def check(self, input_ids, attention_mask=None, cache=None):
        """Raise ValueError for what cannot be meant, on every rank before anything is sent; the mask as (batch, seq, 1)."""
        if not torch.is_tensor(input_ids) or input_ids.ndim != 2 or input_ids.numel() == 0:
            given = tuple(input_ids.shape) if torch.is_tensor(input_ids) else type(input_ids).__name__
            raise ValueError(f"input_ids must be (batch, seq) with at least one token, not {given}")
        self._check_ids(input_ids, "token id")
        if cache is not None and cache.batch != input_ids.shape[0]:
            raise ValueError(f"a cache for {cache.batch} sequences was given {input_ids.shape[0]}")
        return None if attention_mask is None else self._check_mask(attention_mask, input_ids, cache)

    def _check_mask(self, mask, input_ids, cache):
        """The mask as (batch, seq, 1), None if it hides nothing."""
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} is not shaped like input_ids {tuple(input_ids.shape)}"
            )
        if not ((mask == 0) | (mask == 1)).all() or (mask.long().diff(dim=1) < 0).any():
            raise ValueError("attention_mask must be 0 or 1 with zeros only on the left of each row")
        if not mask[:, -1].all():
            raise ValueError(f"row {int((mask[:, -1] == 0).nonzero()[0])} of attention_mask has no token")
        if mask.all():
            return None
        if cache is not None and (before := cache.lengths[cache.rows][~mask.all(1).cpu()].max()):
            raise ValueError(f"attention_mask has zeros after {before} tokens: padding stands only before a sequence")
        return mask.unsqueeze(-1).to(self.dtype)

    def _check_ids(self, ids, what):
        if ids.is_cuda and ids.shape[1] == 1:
            return  # a look would wait for the GPU, at every decoded token
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            worst = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"{what} {int(worst)} is outside the vocabulary of {self.config.vocab_size}")
