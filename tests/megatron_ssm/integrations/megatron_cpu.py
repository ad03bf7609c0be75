"""Megatron's models without CUDA: process groups, this rank's tokens, the loss; and what its checkpoints need of CUDA."""

import inspect
import queue
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ssm.parallel.operators import gather_last
from megatron_ssm.parallel.ranks import Ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing takes seconds: once here instead of in every forked rank
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatron_ssm.integrations import megatron_weights

CPU = dict(use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False)


def join(tp=1, cp=1):
    """Set up Megatron's process groups anew."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)


def hybrid_model(config, spec, vocab_size, length, pattern):
    """Megatron's MambaModel or HybridModel."""
    model, argument = megatron_weights.model_class()
    return model(config, spec, vocab_size, length, **{argument: pattern})


def this_ranks_tokens(batch, group):
    """By Megatron's own function, which has another required argument from version 0.18 on."""
    is_newer = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
    return get_batch_on_this_cp_rank(batch, cp_group=group, **{"is_hybrid_cp": False} if is_newer else {})


def gradients_of(model, inputs, labels):
    """(loss, {name: gradient}) of the mean cross-entropy over the whole sequences; this rank computes its tokens.

    Megatron's own loss computes in fp32 whatever the dtype, so this one is torch's. Gradients are summed over context ranks.
    """
    context = parallel_state.get_context_parallel_group()
    batch = this_ranks_tokens(dict(inputs=inputs, labels=labels), context) if context.size() > 1 else None
    inputs, targets = (inputs, labels) if batch is None else (batch["inputs"], batch["labels"])
    logits = gather_last(
        model(inputs, None, None), Ranks.of(parallel_state.get_tensor_model_parallel_group(), share=None)
    )
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / labels.numel()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    total = loss.detach()
    for tensor in (total, *found.values()):
        dist.all_reduce(tensor, group=context)
    return total, found


class TorchCoreAttention(torch.nn.Module):
    """A core attention on one rank, with torch's own attention."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **_):
        """As `attention2d.CoreAttention.forward`."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)


def save_without_cuda(monkeypatch):
    """Let `dist_checkpointing.save` run without CUDA: it synchronizes, and asks for the current device.

    Its results go through a queue of this process instead of one in a process that it would start.
    """
    assert not torch.cuda.is_available(), "with CUDA, nothing has to be replaced"
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(filesystem_async, "_results_queue", queue.Queue())
