"""The language model: vocabulary-parallel embedding, residual blocks, head; and its loss."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from sparsefusion import collectives

from .cache import Cache
from .config import Config
from .families import layout
from .layers import Ranks, VocabularyParallel, at_least_fp32, gather_last, reduce_from_ranks
from .mamba import MambaMixer
from .mamba2 import Mamba2Mixer


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in at least fp32; whole on every rank."""

    def __init__(self, size, eps, dtype=None, device=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x):
        """(..., size) -> the same shape in the weight's dtype."""
        x = x.to(at_least_fp32(x.dtype))
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps).to(self.weight.dtype)


class Block(nn.Module):
    """x + mixer(norm(x)); the residual stream is whole on every rank."""

    def __init__(self, config: Config, mixer, dtype=None, device=None):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device)
        self.mixer = mixer
        self.residual_in_fp32 = config.residual_in_fp32

    def forward(self, x, mask=None, cache=None, first=True):
        """(batch, seq, hidden) -> the same; see the mixers for mask, cache and first."""
        dtype = self.norm.weight.dtype
        residual = x.to(at_least_fp32(dtype) if self.residual_in_fp32 else dtype)
        return residual + self.mixer(self.norm(x), mask, cache, first)


class Model(nn.Module):
    """A state-space language model split over the tensor-parallel ranks; parameters uninitialized until loaded.

    ranks: who shares the model, and the counter of what this rank sends. data_group: the ranks that hold other tokens
    of the same batch (None: none), over which the loss is averaged.
    """

    def __init__(self, config: Config, ranks: Ranks, data_group=None, dtype=torch.float32, device="cpu"):
        super().__init__()
        config.check_ranks(ranks.size)
        self.config, self.ranks, self.data_group = config, ranks, data_group
        self.directory = None  # where it was loaded from
        mixer = MambaMixer if config.family == "mamba" else Mamba2Mixer
        where = dict(dtype=dtype, device=device)
        self.embeddings = VocabularyParallel(config.vocab_size, config.hidden_size, ranks, **where)
        self.layers = nn.ModuleList(
            Block(config, mixer(config, ranks, **where), **where) for _ in range(config.num_layers)
        )
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
        if {f.name for f in fields} != set(parameters):
            raise AssertionError(f"layout and model differ in {set(parameters) ^ {f.name for f in fields}}")
        for field in fields:
            parameter = parameters[field.name]
            shape = field.local_shape(self.ranks.rank, self.ranks.size)
            if shape != tuple(parameter.shape):
                raise AssertionError(f"{field.name} is {tuple(parameter.shape)}, its layout says {shape}")
            parameter.field = field
            parameter.tensor_model_parallel = self.ranks.size > 1 and field.copies(self.ranks.size) < self.ranks.size
            parameter.partition_dim = field.split if parameter.tensor_model_parallel else -1
            parameter.partition_stride = 1

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
        """An empty cache for `batch` sequences, this rank's channels only; max_length is for models with attention."""
        return Cache([block.mixer.new_cache(batch) for block in self.layers])

    def forward(self, input_ids, attention_mask=None, cache=None, logits_to_keep=0):
        """input_ids (batch, seq) -> logits (batch, kept, vocab), at least fp32, the same on every rank.

        attention_mask: (batch, seq) of 0 and 1, zeros only on the left and only in a sequence's first call.
        cache: continues from it and updates it, any number of tokens per call; the gradient stops at the cache, and such
        a call is for torch.no_grad(). (With a time_step_limit, a later one-token call does not clamp dt: see Mamba2Mixer.)
        logits_to_keep=k: the last k positions (0: all). Sends each block's all-reduces, one of the embeddings, one
        all-gather of the logits.
        """
        local = self.local_logits(input_ids, attention_mask, cache, logits_to_keep)
        return gather_last(local, self.ranks)[..., : self.config.vocab_size]

    def local_logits(self, input_ids, attention_mask=None, cache=None, logits_to_keep=0):
        """As forward, but this rank's slice of the vocabulary: (batch, kept, ceil(vocab/ranks)), -inf beyond its end."""
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep} must be at least 0")
        mask = self._check(input_ids, attention_mask, cache)
        first = cache is None or cache.tokens == 0
        x = self.embeddings.embed(input_ids)
        for index, block in enumerate(self.layers):
            x = block(x, mask, None if cache is None else cache.layers[index], first)
        if cache is not None:
            cache.tokens += input_ids.shape[1]
        x = self.norm_f(x[:, -logits_to_keep:])
        return (self.embeddings if self.config.tie_embeddings else self.lm_head).logits(x)

    def loss(self, input_ids, labels, ignore_index=-100):
        """Mean cross-entropy, in nats, of predicting labels[b, t] after input_ids[b, :t + 1]: labels are already shifted.

        input_ids, labels: (batch, seq), the same on all tensor-parallel ranks; positions with `ignore_index` do not
        count. The mean is over the tokens of all ranks of `data_group`, each of which gets the same value; the
        gradient left on a rank is its own tokens' share, to be summed over that group. Sends all-reduces of one and of two
        numbers per position over the tensor-parallel ranks, and one of two numbers over the data group.
        """
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
        largest = collectives.all_reduce(log_sum.detach(), ranks.group, self.counter, dist.ReduceOp.MAX)
        parts = torch.stack([(log_sum - largest).exp(), label_logit])
        total, label_logit = reduce_from_ranks(parts, ranks.group, ranks.exact)
        return total.log() + largest - label_logit

    def _check(self, input_ids, attention_mask, cache):
        """Raise ValueError for what cannot be meant, on every rank before anything is sent; the mask as (batch, seq, 1)."""
        if input_ids.ndim != 2 or input_ids.numel() == 0:
            raise ValueError(f"input_ids must be (batch, seq) with at least one token, not {tuple(input_ids.shape)}")
        self._check_ids(input_ids, "token id")
        if cache is not None and cache.batch != input_ids.shape[0]:
            raise ValueError(f"a cache for {cache.batch} sequences was given {input_ids.shape[0]}")
        if attention_mask is None:
            return None
        return self._check_mask(attention_mask, input_ids, 0 if cache is None else cache.tokens)

    def _check_mask(self, mask, input_ids, before):
        """The mask as (batch, seq, 1), None if it hides nothing; `before`: the tokens of earlier calls."""
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
        if before:
            raise ValueError(f"attention_mask has zeros after {before} tokens: padding stands only before a sequence")
        return mask.unsqueeze(-1).to(self.dtype)

    def _check_ids(self, ids, what):
        if ids.is_cuda and ids.shape[1] == 1:
            return  # a look would wait for the GPU, at every decoded token
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            worst = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"{what} {int(worst)} is outside the vocabulary of {self.config.vocab_size}")
