"""Megatron's GPTModel with a sequence sharded over ranks. Oracle: the same model on one rank with torch's own attention.

(Megatron's own core attention needs CUDA.)
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention2d import CoreAttention
from megatron_ssm.integrations.specs import core_attention, with_core_attention

SEQ, VOCAB = 72, 50  # twice 2, 4 and 9 divide the length
CASES = {  # by number of ranks: (cp_comm_type, arguments of `core_attention`, part of the schedule's repr)
    2: [
        ("p2p", {}, "rows=2, cols=1, ulysses=1"),
        ("a2a", {}, "rows=1, cols=1, ulysses=2"),
        ("2d", dict(rows=1, cols=2), "rows=1, cols=2, ulysses=1"),
    ],
    4: [
        ("2d", dict(rows=2, cols=2), "rows=2, cols=2, ulysses=1, order='zigzag')"),
        (
            "2d",
            dict(rows=1, cols=2, ulysses=2, overlap=True),
            "rows=1, cols=2, ulysses=2, order='zigzag', overlap=True",
        ),
        ("2d", {}, "ulysses=2"),
        ("p2p", {}, "rows=4, cols=1, ulysses=1, order='zigzag', overlap=True"),
        ("all_gather", {}, "rows=4, cols=1, ulysses=1, order='zigzag')"),
        ("a2a+p2p", {}, "rows=2, cols=1, ulysses=2, order='zigzag', overlap=True"),
    ],
    9: [("2d", dict(rows=3, cols=3), "rows=3, cols=3, ulysses=1"), ("p2p", {}, "rows=9, cols=1, ulysses=1")],
}


class TorchCoreAttention(torch.nn.Module):
    """A core attention on one rank, with torch's own attention."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **_):
        """As `attention2d.CoreAttention.forward`."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def gpt(ranks, kind=None, **grid):
    """A model with two layers in float64, with the same parameters on every rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, use_cpu_initialization=True,
        attention_dropout=0.0, hidden_dropout=0.0, context_parallel_size=ranks, cp_comm_type=kind,
        bias_dropout_fusion=False, masked_softmax_fusion=False, pipeline_dtype=torch.float32,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = TorchCoreAttention
    torch.manual_seed(0)
    return GPTModel(
        config, with_core_attention(spec, **grid) if kind else spec, VOCAB, SEQ,
        position_embedding_type="learned_absolute", share_embeddings_and_output_weights=False,
    ).double()  # fmt: skip


def whole_batch():
    """Tokens, labels and positions of two sequences; Megatron's causal mask."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
    mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    positions = torch.arange(SEQ).expand(2, SEQ)
    return dict(tokens=tokens[:, :-1], labels=tokens[:, 1:], position_ids=positions, attention_mask=mask)


def run_backward(model, batch):
    """(logits, loss, gradients); the loss is this rank's share of the mean over all tokens."""
    logits = model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / (2 * SEQ)
    loss.backward()
    return logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def initialize_megatron(ranks):
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=ranks)


def run_on_one_rank(rank):
    initialize_megatron(1)
    return run_backward(gpt(1), whole_batch())


@pytest.fixture(scope="module")
def expected(ranks):
    """The results on one rank. Megatron is imported before the fork, once for all ranks and tests."""
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    return ranks(run_on_one_rank, 1)[0]


def run_cases(rank, cases):
    """For each case: the schedules, this rank's logits and their positions, the loss and gradients over all ranks."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    initialize_megatron(dist.get_world_size())
    found = []
    for kind, grid, _ in cases:
        model = gpt(dist.get_world_size(), kind, **grid)
        batch = get_batch_on_this_cp_rank(whole_batch())
        logits, loss, gradients = run_backward(model, batch)
        for t in (loss, *gradients.values()):
            dist.all_reduce(t)
        schedules = {repr(layer.self_attention.core_attention.schedule) for layer in model.decoder.layers}
        found.append((schedules, logits, batch["position_ids"][0], loss, gradients))
    return found


@pytest.mark.parametrize("world_size", (2, 4, 9))
def test_gpt_model(world_size, ranks, expected):
    """Megatron itself shards the tokens."""
    logits, loss, gradients = expected
    for found in ranks(run_cases, world_size, CASES[world_size], timeout=120):
        for (_, _, name), (schedules, ours, positions, ours_loss, ours_gradients) in zip(
            CASES[world_size], found, strict=True
        ):
            assert len(schedules) == 1 and name in schedules.pop()
            assert (ours - logits[:, positions]).abs().max() <= 1e-10
            assert (ours_loss - loss).abs() <= 1e-10 and ours_gradients.keys() == gradients.keys()
            assert max((ours_gradients[key] - gradients[key]).abs().max() for key in gradients) <= 1e-10


# Unsupported options

CONFIG = dict(
    num_attention_heads=4, num_query_groups=2, kv_channels=8, attention_dropout=0.0, window_size=None, qk_clip=False,
    softmax_type="vanilla", hierarchical_context_parallel_sizes=None, context_parallel_size=1,
)  # fmt: skip


def make_core_attention(mask="causal", kind="self", arguments=None, **config_changes):
    """A CoreAttention on one rank. arguments: of its constructor. config_changes: to CONFIG."""
    config = SimpleNamespace(**CONFIG | config_changes)
    return CoreAttention(config, 1, SimpleNamespace(name=mask), kind, **arguments or {})


REFUSED = {
    "window_size=\\(4, 0\\)": partial(make_core_attention, window_size=(4, 0)),
    "softmax_type=learnable": partial(make_core_attention, softmax_type="learnable"),
    "qk_clip=True": partial(make_core_attention, qk_clip=True),
    "fp8_dot_product_attention=True": partial(make_core_attention, fp8_dot_product_attention=True),
    "attention_type=cross": partial(make_core_attention, kind="cross"),
    "k_channels=4": partial(make_core_attention, arguments=dict(k_channels=4)),
    "unknown cp_comm_type 'ring': expected p2p, all_gather, a2a, a2a\\+p2p, 2d": partial(
        make_core_attention, arguments=dict(cp_comm_type="ring")
    ),
    "rows: only for cp_comm_type='2d', not for 'p2p'": partial(make_core_attention, arguments=dict(rows=2)),
    "rows=0: expected at least 1": partial(make_core_attention, arguments=dict(cp_comm_type="2d", rows=0, cols=1)),
    "'2d' with ulysses or overlap needs rows or cols": partial(
        make_core_attention, arguments=dict(cp_comm_type="2d", overlap=True)
    ),
    "context_parallel_size=2, and pg_collection.cp has 1 ranks": partial(make_core_attention, context_parallel_size=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_layers(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_refused_calls():
    q, kv = torch.ones(4, 1, 4, 8), torch.ones(4, 1, 2, 8)
    core = make_core_attention(attention_dropout=0.1, window_size=(-1, -1))
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        core(q, kv, kv)
    core.eval()
    assert core(q, kv, kv).shape == (4, 1, 32)
    for name in ("attention_bias", "packed_seq_params"):
        with pytest.raises(ValueError, match=name):
            core(q, kv, kv, **{name: object()})
    with pytest.raises(ValueError, match="attn_mask_type=arbitrary"):
        core(q, kv, kv, attn_mask_type=SimpleNamespace(name="arbitrary"))


def test_module_spec():
    assert core_attention(rows=2, cols=3).params == dict(rows=2, cols=3)
