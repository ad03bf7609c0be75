"""Configurations and groups of ranks that the tests of whole models share; `assemble` joins the parts of their tensors."""

import random
from functools import cache, cached_property

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

from attention2d import USP, AllGather, Attention2D, Ring, Ulysses
from hf import SMALL, cache_name, hf_model, precisely
from megatron_ssm.spec.fields import hf_shapes

SEQ = 70  # more than one chunk of either scan
EXPERTS = dict(
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, moe_shared_expert_intermediate_size=20
)
DECODED = 3  # how many of them are decoded token by token

# name: (family, changes to the small model of hf.py). Its vocabulary of 61 is not divisible by 2. Two of its first three
# layers are hybrid.
CASES = {
    "mamba": ("mamba", {}),
    "mamba-biases-untied": ("mamba", dict(use_bias=True, tie_word_embeddings=False, vocab_size=64)),
    "mamba-no-conv-bias": ("mamba", dict(use_conv_bias=False, time_step_rank=5, conv_kernel=3, residual_in_fp32=False)),
    "mamba2-1-group": ("mamba2", dict(n_groups=1, num_hidden_layers=4)),
    "mamba2-1-group-biases-tied": ("mamba2", dict(n_groups=1, use_bias=True, tie_word_embeddings=True)),
    "mamba2-2-groups": ("mamba2", dict(n_groups=2, use_conv_bias=False, residual_in_fp32=False)),
    "mamba2-2-groups-biases-tied": ("mamba2", dict(n_groups=2, use_bias=True, tie_word_embeddings=True)),
    "mamba2-4-groups": ("mamba2", dict(n_groups=4, use_bias=True, conv_kernel=2, vocab_size=5)),
    "mamba2-dt-limit": ("mamba2", dict(n_groups=2, time_step_limit=(0.02, 0.2), tie_word_embeddings=True)),
    "falcon": ("falcon_mamba", dict(time_step_rank=5, mixer_rms_eps=0.0)),
    "falcon-biases-untied": (
        "falcon_mamba",
        dict(use_bias=True, tie_word_embeddings=False, vocab_size=64, mixer_rms_eps=0.01),
    ),
    "falcon-wider": (
        "falcon_mamba",
        dict(intermediate_size=96, use_conv_bias=False, conv_kernel=3, residual_in_fp32=False),
    ),
    "zamba-1-head": (
        "zamba",
        dict(n_mamba_heads=1, mamba_conv_bias=False, vocab_size=5, mamba_d_conv=3, layers_block_type=["hybrid"] * 2),
    ),
    "zamba-2-heads-biases": ("zamba", dict(mamba_proj_bias=True, num_hidden_layers=3, hidden_act="silu")),
    "zamba-4-heads-grouped-untied": (
        "zamba",
        dict(n_mamba_heads=4, tie_word_embeddings=False, num_hidden_layers=3, attention_head_dim=6, mamba_dt_rank=3)
        | dict(num_attention_heads=8, num_key_value_heads=4),
    ),
    "zamba-8-heads": ("zamba", dict(n_mamba_heads=8, mamba_expand=3, num_hidden_layers=3, hidden_act="relu")),
    "zamba2-1-group": ("zamba2", dict(layers_block_type=["linear_attention"] + ["hybrid"] * 3)),
    "zamba2-2-groups-adapters-rope": (
        "zamba2",
        dict(mamba_ngroups=2, use_shared_attention_adapter=True, use_mem_rope=True, hidden_act="relu", num_mem_blocks=1)
        | dict(layers_block_type=["hybrid"] * 2, time_step_min=0.05),
    ),
    "zamba2-4-groups-biases-adapters-untied": (
        "zamba2",
        dict(mamba_ngroups=4, add_bias_linear=True, use_shared_attention_adapter=True, tie_word_embeddings=False)
        | dict(layers_block_type=["hybrid"] * 3, hidden_act="gelu_pytorch_tanh", use_mem_rope=True),
    ),
    "zamba2-grouped-rope-1-use": (
        "zamba2",
        dict(num_attention_heads=8, num_key_value_heads=4, hidden_act="silu", use_mem_rope=True, mamba_d_conv=2)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=50.0)),
    ),
    "nemotron-2-groups": ("nemotron_h", dict(num_hidden_layers=4)),
    "nemotron-4-groups-biases": (
        "nemotron_h",
        dict(n_groups=4, use_bias=True, mlp_bias=True, layers_block_type=["mlp", "full_attention", "linear_attention"]),
    ),
    "nemotron-1-group-1-kv-head": ("nemotron_h", dict(n_groups=1, num_key_value_heads=1, mlp_hidden_act="silu")),
    "granite-1-group": ("granitemoehybrid", dict(mamba_n_groups=1, tie_word_embeddings=True)),
    "granite-2-groups-biases-rope": (
        "granitemoehybrid",
        dict(position_embedding_type="rope", attention_bias=True, mamba_proj_bias=True, mamba_conv_bias=False),
    ),
    "bamba-1-group": ("bamba", dict(mamba_n_groups=1, num_attention_heads=8, vocab_size=64)),
    "bamba-2-groups-biases-tied": (
        "bamba",
        dict(attention_bias=True, mlp_bias=True, mamba_proj_bias=True, tie_word_embeddings=True, head_dim=12)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=50.0), time_step_limit=(0.02, 0.2)),
    ),
    "falcon-h1-no-norm": ("falcon_h1", dict(num_key_value_heads=1)),
    "falcon-h1-norm-first-1-group": ("falcon_h1", dict(mamba_rms_norm=True, mamba_n_groups=1)),
    "falcon-h1-gate-first-1-group-biases": (
        "falcon_h1",
        dict(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=1, mamba_proj_bias=True, mlp_bias=True)
        | dict(attention_bias=True, projectors_bias=True, tie_word_embeddings=True),
    ),
    "falcon-h1-norm-first-2-groups": (
        "falcon_h1",
        dict(mamba_rms_norm=True, mamba_d_head="auto", mamba_d_ssm=None, time_step_limit=(0.02, 0.2)),
    ),
    "jamba": ("jamba", dict(num_hidden_layers=3)),
    "jamba-biases-tied": (
        "jamba",
        dict(mamba_proj_bias=True, mamba_conv_bias=False, tie_word_embeddings=True, num_key_value_heads=1),
    ),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-3-values-of-a-key": (
        "qwen3_5_text",
        dict(
            linear_num_key_heads=4,
            linear_num_value_heads=12,
            linear_value_head_dim=4,
            linear_conv_kernel_dim=3,
            vocab_size=5,
        ),
    ),
    "qwen3.5-1-key-head-tied-biases": (
        "qwen3_5_text",
        dict(linear_num_key_heads=1, num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True),
    ),
    "qwen3.5-experts": ("qwen3_5_moe_text", {}),
    "qwen3.5-1-expert-of-4": ("qwen3_5_moe_text", dict(num_experts=4, num_experts_per_tok=1, tie_word_embeddings=True)),
    "qwen3-next-experts": (
        "qwen3_next",
        dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=8)
        | dict(norm_topk_prob=False, decoder_sparse_step=2),
    ),
    "nemotron-experts": (
        "nemotron_h",
        dict(EXPERTS, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_group=4, topk_group=2)
        | dict(routed_scaling_factor=1.7),
    ),
    "nemotron-latent-experts-biases": (
        "nemotron_h",
        dict(
            EXPERTS,
            layers_block_type=["moe", "linear_attention", "mlp", "full_attention"],
            moe_latent_size=20,
            mlp_bias=True,
        )
        | dict(norm_topk_prob=False),
    ),
    "granite-experts": (
        "granitemoehybrid",
        dict(num_local_experts=6, num_experts_per_tok=3, intermediate_size=12, tie_word_embeddings=True),
    ),
    "jamba-experts": ("jamba", dict(num_experts=4, num_experts_per_tok=2, intermediate_size=24)),
    "qwen3-next": ("qwen3_next", dict(num_hidden_layers=3)),
    "olmo": ("olmo_hybrid", {}),
    "olmo-rope-tied": (
        "olmo_hybrid",
        dict(rope_parameters=dict(rope_type="default", rope_theta=50.0), tie_word_embeddings=True, attention_bias=True)
        | dict(linear_allow_neg_eigval=False, linear_num_value_heads=8, linear_value_head_dim=6, num_attention_heads=8),
    ),
    "zamba2-no-attention": ("zamba2", dict(layers_block_type=["linear_attention"] * 2, time_step_min=1e-9)),
}

RARE = (
    "mamba-no-conv-bias", "mamba2-4-groups", "falcon-wider", "zamba-1-head", "zamba-8-heads", "zamba2-grouped-rope-1-use",
    "zamba2-no-attention", "nemotron-4-groups-biases", "nemotron-1-group-1-kv-head", "granite-1-group", "bamba-1-group",
    "falcon-h1-norm-first-1-group", "falcon-h1-norm-first-2-groups", "jamba", "qwen3.5-3-values-of-a-key", "olmo-rope-tied",
    "mamba", "falcon", "mamba2-1-group", "mamba2-2-groups", "qwen3-next", "nemotron-experts",
)  # fmt: skip
MARKED = by_default(CASES.keys() - set(RARE), CASES)

# The largest error of fp32 logits, whose standard deviation is 1 to 4.
TOLERANCE = {"mamba": 5e-5, "falcon_mamba": 5e-5, "mamba2": 5e-5, "zamba": 1e-4, "zamba2": 3e-4}
TOLERANCE |= dict.fromkeys(("nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "jamba"), 1e-4)
TOLERANCE |= dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), 1e-4)


TWO_HYBRIDS = dict(num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"])
SSD = dict(mamba_num_heads=8, mamba_head_dim=64, ssm_state_size=64)
WIDE = dict(mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64)
DELTA = dict(
    linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=64, head_dim=64
)
# Two or three wide layers, so that what grows with the width outweighs the rest.
WIDE_CASES = {
    "mamba": ("mamba", dict(state_size=16)),
    "falcon": ("falcon_mamba", dict(intermediate_size=512)),
    "mamba2-1-group": ("mamba2", dict(num_heads=8, head_dim=64, n_groups=1, state_size=64)),
    "mamba2-4-groups": ("mamba2", dict(num_heads=8, head_dim=64, n_groups=4, state_size=32)),
    "zamba": ("zamba", dict(TWO_HYBRIDS, intermediate_size=1024)),
    "zamba2": ("zamba2", dict(TWO_HYBRIDS, intermediate_size=512, mamba_ngroups=1)),
    "nemotron": ("nemotron_h", dict(num_hidden_layers=3, head_dim=64, intermediate_size=512, **SSD, n_groups=4)),
    "granite": ("granitemoehybrid", dict(shared_intermediate_size=512, **WIDE, mamba_n_groups=4)),
    "falcon-h1": ("falcon_h1", dict(intermediate_size=512, **WIDE, mamba_d_ssm=512)),
    "falcon-h1-norm": ("falcon_h1", dict(intermediate_size=512, **WIDE, mamba_d_ssm=512, mamba_rms_norm=True)),
    "jamba": ("jamba", dict(intermediate_size=512, mamba_d_state=16, mamba_dt_rank=16)),
    "qwen3.5": ("qwen3_5_text", dict(intermediate_size=512, **DELTA)),
    "qwen3.5-experts": (
        "qwen3_5_moe_text",
        dict(moe_intermediate_size=128, shared_expert_intermediate_size=256, num_experts_per_tok=2, **DELTA),
    ),
    "nemotron-experts": (
        "nemotron_h",
        dict(layers_block_type=["moe", "full_attention"], n_routed_experts=8, num_experts_per_tok=2, head_dim=64, **SSD)
        | dict(moe_intermediate_size=256, moe_shared_expert_intermediate_size=128, moe_latent_size=128, n_groups=4),
    ),
    "olmo": ("olmo_hybrid", dict(intermediate_size=512, **DELTA)),
    "zamba-wide-attention": ("zamba", dict(TWO_HYBRIDS, intermediate_size=256)),
}


def wide_model(name, **changes):
    """The transformers model of one of WIDE_CASES, with `changes`."""
    family, sizes = WIDE_CASES[name]
    return hf_model(family, **dict(hidden_size=256, num_hidden_layers=2, vocab_size=64) | sizes | changes)


class Oracle:
    """The transformers model of one case, its directory, token ids (2, SEQ), and their logits by transformers.

    In float64, transformers computes everything in float64 (see `hf.Float64`).
    """

    def __init__(self, directory, family, changes, dtype=torch.float32):
        self.name, self.tolerance = f"{family} {changes}", TOLERANCE[family]
        self.directory = directory
        # A prompt can be processed in pieces of this length or more. In a piece of a single token, dt is not clamped to
        # time_step_limit, which Zamba2 always has.
        self.smallest_piece = 2 if family in ("zamba2", "nemotron_h") or "time_step_limit" in changes else 1
        self.vocab = changes.get("vocab_size", SMALL["vocab_size"])
        self.family, self.changes, self.dtype = family, with_layers(changes), dtype
        self.model = hf_model(family, dtype=dtype, **self.changes)
        self.model.save_pretrained(directory)
        self.ids = torch.randint(self.vocab, (2, SEQ), generator=torch.Generator().manual_seed(1))

    @cached_property
    @torch.no_grad()
    def exact(self):
        """The logits of transformers in float64 throughout."""
        with precisely(torch.float64):
            return hf_model(self.family, dtype=torch.float64, **self.changes)(self.ids, use_cache=False).logits

    @cached_property
    def whole(self):
        """The logits (batch, SEQ, vocab) of one call of transformers."""
        return self.logits(self.ids)

    @cached_property
    def decoded(self):
        """The last logits (batch, DECODED, vocab), decoded with transformers' cache."""
        return self.decode(self.ids, DECODED)

    @torch.no_grad()
    def logits(self, ids):
        """The logits (batch, seq, vocab) of one call of transformers, without a cache."""
        with precisely(self.dtype):
            return self.model(ids, use_cache=False).logits

    @torch.no_grad()
    def decode(self, ids, steps):
        """The logits after each of the last `steps` ids, decoded with transformers' cache.

        transformers cannot continue a Zamba2 without attention layers; such a case must not clamp dt.
        """
        if getattr(self.model.config, "hybrid_layer_ids", None) == []:
            return self.logits(ids)[:, -steps:]
        output = self.model(ids[:, :-steps], use_cache=True)
        cache, logits = cache_name(output), []
        for i in range(ids.shape[1] - steps, ids.shape[1]):
            # without positions, transformers' Bamba takes each token for the first one
            where = dict(position_ids=torch.full_like(ids[:, :1], i)) if self.family == "bamba" else {}
            output = self.model(ids[:, i : i + 1], use_cache=True, **{cache: output[cache]}, **where)
            logits.append(output.logits)
        return torch.cat(logits, dim=1)


def with_layers(changes):
    """`changes` with a number of layers: that of layers_block_type, or two, unless it is among the changes."""
    return {"num_hidden_layers": len(changes.get("layers_block_type", "12")), **changes}


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """oracle(name, dtype): the `Oracle` of a case, or of a (family, seed), made once."""

    @cache
    def make(name, dtype=torch.float32):
        family, changes = CASES[name] if name in CASES else (name[0], random_changes(*name))
        return Oracle(tmp_path_factory.mktemp("oracle"), family, changes, dtype)

    return make


# Random configurations that every tensor-parallel degree of 1, 2 and 4 can split


def random_changes(family, seed):
    """Random changes to the small model of `family` that 4 ranks can split and transformers supports."""
    rng = random.Random(f"{family} {seed}")
    changes = _RANDOM[family](rng)
    changes["vocab_size"], tied = rng.randint(2, 90), rng.random() < 0.5
    return dict(changes, tie_word_embeddings=tied and family != "nemotron_h")  # which transformers does not tie


def _random_constants(rng):
    return dict(
        num_hidden_layers=rng.randint(1, 3),
        state_size=rng.choice((1, 3, 8, 16)),
        conv_kernel=rng.randint(2, 5),
        use_bias=rng.random() < 0.5,
        use_conv_bias=rng.random() < 0.5,
        residual_in_fp32=rng.random() < 0.5,
    )


def _random_mamba(rng):
    sizes = dict(hidden_size=4 * rng.randint(2, 12), expand=rng.choice((1, 2, 3)))
    return dict(_random_constants(rng), **sizes, time_step_rank=rng.choice(("auto", 1, 7)))


def _random_heads(rng):
    """(heads, head dimension, groups, expand) of a Mamba-2 layer."""
    heads = rng.choice((4, 8, 12))
    groups = rng.choice([g for g in (1, 2, 4, 8, 12) if heads % g == 0])
    return heads, rng.choice((2, 6, 8)), groups, rng.choice((1, 2))


def _random_mamba2(rng):
    heads, head_dim, groups, expand = _random_heads(rng)
    sizes = dict(num_heads=heads, head_dim=head_dim, n_groups=groups, expand=expand)
    return dict(_random_constants(rng), **sizes, hidden_size=heads * head_dim // expand)


def _random_shared_block(rng, fewest, heads=(4, 8, 12)):
    """Settings of both Zambas, with `fewest` to 3 hybrid layers. transformers needs one, or two in Zamba to tie them."""
    kinds = ["hybrid"] * rng.randint(fewest, 3) + ["linear_attention"] * rng.randint(1, 2)
    rng.shuffle(kinds)
    heads = rng.choice(heads)
    return dict(
        layers_block_type=kinds,
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([k for k in (4, 8, 12) if heads % k == 0]),
        intermediate_size=4 * rng.randint(1, 16),
        hidden_act=rng.choice(("gelu", "gelu_pytorch_tanh", "silu", "relu")),
        mamba_d_state=rng.choice((1, 3, 8, 16)),
        mamba_d_conv=rng.randint(2, 5),
    )


def _random_zamba(rng):
    return dict(
        _random_shared_block(rng, fewest=2),
        hidden_size=8 * rng.randint(1, 5),
        mamba_expand=rng.choice((1, 2, 3)),
        n_mamba_heads=rng.choice((1, 2, 4, 8)),
        attention_head_dim=rng.choice((None, 3, 8)),
        mamba_dt_rank=rng.choice(("auto", 1, 7)),
        mamba_conv_bias=rng.random() < 0.5,
        mamba_proj_bias=rng.random() < 0.5,
    )


def _random_zamba2(rng):
    heads, head_dim, groups, expand = _random_heads(rng)
    hidden = heads * head_dim // expand
    shared = _random_shared_block(rng, 1, [n for n in (4, 8, 12) if hidden % n == 0])  # for rotary embeddings
    attention_heads = shared["num_attention_heads"]
    if adapters := rng.random() < 0.5 and 2 * hidden % attention_heads == 0:
        shared["num_key_value_heads"] = attention_heads
    return dict(
        shared,
        hidden_size=hidden,
        mamba_expand=expand,
        n_mamba_heads=heads,
        mamba_ngroups=groups,
        add_bias_linear=rng.random() < 0.5,
        num_mem_blocks=rng.randint(1, 3),
        adapter_rank=rng.choice((1, 6)),
        use_shared_attention_adapter=adapters,
        use_mem_rope=rng.random() < 0.7,
        time_step_min=rng.choice((0.001, 0.03)),
    )


def _random_ssd(rng):
    """Settings of hybrids with Mamba-2."""
    heads, head_dim, groups, expand = _random_heads(rng)
    return dict(
        hidden_size=heads * head_dim // expand,
        mamba_expand=expand,
        mamba_n_heads=heads,
        mamba_d_head=rng.choice(("auto", head_dim)),
        mamba_n_groups=groups,
        mamba_d_state=rng.choice((1, 3, 8, 16)),
        mamba_d_conv=rng.randint(2, 5),
        mamba_conv_bias=rng.random() < 0.5,
        mamba_proj_bias=rng.random() < 0.5,
    )


def _random_attention(rng):
    """Settings of hybrids whose attention is a layer's own."""
    heads = rng.choice((4, 8, 12))
    return dict(
        num_hidden_layers=rng.randint(1, 3),
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([k for k in (1, 2, 4, 8, 12) if heads % k == 0]),
        head_dim=4 * rng.randint(1, 3),
        intermediate_size=4 * rng.randint(1, 16),
        attention_bias=rng.random() < 0.5,
    )


def _random_nemotron(rng):
    heads, head_dim, groups, expand = _random_heads(rng)
    kinds = ["full_attention", *rng.choices(("linear_attention", "mlp", "moe"), k=rng.randint(1, 3))]
    rng.shuffle(kinds)
    groups_of_experts = rng.choice((1, 2))
    experts = dict(
        n_routed_experts=4 * rng.randint(1, 3),
        num_experts_per_tok=rng.randint(1, 2),
        n_group=groups_of_experts,
        topk_group=rng.randint(1, groups_of_experts),
        moe_intermediate_size=4 * rng.randint(1, 6),
        moe_shared_expert_intermediate_size=4 * rng.randint(1, 6),
        moe_latent_size=rng.choice((None, 5)),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice((1.0, 2.5)),
    )
    return experts | dict(
        {name: value for name, value in _random_attention(rng).items() if name != "attention_bias"},
        layers_block_type=kinds,
        num_hidden_layers=len(kinds),
        hidden_size=heads * head_dim // expand,
        mamba_num_heads=heads,
        mamba_head_dim=rng.choice((2, 6, 8)),
        n_groups=groups,
        ssm_state_size=rng.choice((1, 3, 8, 16)),
        conv_kernel=rng.randint(2, 5),
        use_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        mlp_hidden_act=rng.choice(("relu2", "silu")),
        time_step_min=rng.choice((0.001, 0.03)),
    )


def _random_granite(rng):
    changes = dict(_random_attention(rng), **_random_ssd(rng))
    changes["shared_intermediate_size"] = changes.pop("intermediate_size")
    kinds = ["full_attention", *rng.choices(("linear_attention", "full_attention"), k=changes["num_hidden_layers"] - 1)]
    experts, chosen, channels = _random_experts(rng)
    return dict(
        changes, layer_types=kinds, position_embedding_type=rng.choice((None, "rope")), intermediate_size=channels,
        num_local_experts=rng.choice((0, experts)), num_experts_per_tok=chosen,
    )  # fmt: skip


def _random_bamba(rng):
    changes = dict(_random_attention(rng), **_random_ssd(rng), mlp_bias=rng.random() < 0.5)
    indices = rng.sample(range(changes["num_hidden_layers"]), rng.randint(1, changes["num_hidden_layers"]))
    return dict(changes, attn_layer_indices=indices)


def _random_falcon_h1(rng):
    return dict(
        _random_attention(rng),
        **_random_ssd(rng),
        mamba_d_ssm=None,
        mamba_rms_norm=rng.random() < 0.6,
        mamba_norm_before_gate=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        projectors_bias=rng.random() < 0.5,
    )


def _random_jamba(rng):
    changes = _random_attention(rng)
    del changes["attention_bias"]
    experts, chosen, _ = _random_experts(rng)
    return dict(
        changes,
        num_experts=rng.choice((1, experts)),
        num_experts_per_tok=chosen,
        hidden_size=4 * rng.randint(2, 12),
        mamba_expand=rng.choice((1, 2, 3)),
        mamba_dt_rank=rng.choice(("auto", 1, 7)),
        mamba_d_state=rng.choice((1, 3, 8, 16)),
        mamba_d_conv=rng.randint(2, 5),
        mamba_conv_bias=rng.random() < 0.5,
        mamba_proj_bias=rng.random() < 0.5,
        attn_layer_period=2,
        attn_layer_offset=rng.randint(0, min(1, changes["num_hidden_layers"] - 1)),  # transformers needs attention
    )


def _random_qwen(rng):
    heads, keys = rng.choice((4, 8)), rng.choice((1, 2, 4))
    return dict(
        num_hidden_layers=rng.randint(2, 4),  # transformers needs attention
        hidden_size=4 * rng.randint(2, 12),
        vocab_size=rng.randint(2, 80),
        tie_word_embeddings=rng.random() < 0.5,
        num_attention_heads=heads,
        num_key_value_heads=rng.choice((1, 2, 4)),
        head_dim=4 * rng.randint(1, 4),
        intermediate_size=4 * rng.randint(1, 20),
        attention_bias=rng.random() < 0.5,
        linear_num_key_heads=keys,
        linear_num_value_heads=4 * rng.randint(1, 3),
        linear_key_head_dim=rng.randint(1, 20),
        linear_value_head_dim=rng.choice((3, 8, 16, 32)),
        linear_conv_kernel_dim=rng.randint(2, 5),
    )


def _random_olmo(rng):
    changes = dict(_random_qwen(rng), linear_allow_neg_eigval=rng.random() < 0.5)
    del changes["head_dim"]
    heads = changes["num_attention_heads"]
    layers = ["linear_attention", "full_attention"] + ["linear_attention"] * rng.randint(0, 1)
    return dict(changes, num_key_value_heads=4, hidden_size=heads * 2 * rng.randint(1, 4), layer_types=layers,
                num_hidden_layers=len(layers))  # fmt: skip


def _random_experts(rng):
    """The numbers of experts and of chosen ones; each expert has at least a channel on each of 4 ranks."""
    experts = rng.randint(2, 9)
    return experts, rng.randint(1, experts), 4 * rng.randint(1, 6)


def _random_moe(rng):
    experts, chosen, channels = _random_experts(rng)
    return dict(_random_qwen(rng), num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=channels,
                shared_expert_intermediate_size=4 * rng.randint(1, 6))  # fmt: skip


_RANDOM = {
    "qwen3_5_moe_text": _random_moe,
    "qwen3_5_text": _random_qwen,
    "qwen3_next": lambda rng: dict(_random_moe(rng), norm_topk_prob=rng.random() < 0.5),
    "olmo_hybrid": _random_olmo,
    "mamba": _random_mamba,
    "falcon_mamba": lambda rng: dict(_random_mamba(rng), mixer_rms_eps=rng.choice((1e-6, 0.01))),
    "mamba2": _random_mamba2,
    "zamba": _random_zamba,
    "zamba2": _random_zamba2,
    "nemotron_h": _random_nemotron,
    "granitemoehybrid": _random_granite,
    "bamba": _random_bamba,
    "falcon_h1": _random_falcon_h1,
    "jamba": _random_jamba,
}


def assemble(fields, shards, ep=1):
    """{Hugging Face name: whole tensor} from {our name: piece} of each rank; copies must be bitwise equal.

    ep: how many groups of tensor-parallel ranks, one after the other, divide the experts.
    """
    tp = len(shards) // ep
    whole = {}
    for name, shape in hf_shapes(fields).items():
        whole[name] = torch.full(shape, float("nan"), dtype=torch.float64)
    for field in fields:
        for rank, shard in enumerate(shards):
            part = rank % tp, tp, rank // tp, ep
            piece, known = shard[field.name].double(), field.read(whole[field.hf], *part)
            assert known.isnan().all() or known.equal(piece), f"rank {rank} holds another {field.name}"
            field.write(whole[field.hf], piece, *part)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


# Context ranks

SCHEDULES = {
    "ring": Ring,
    "contiguous": lambda group: Ring(group, "contiguous"),
    "all-gather": AllGather,
    "ulysses": Ulysses,
    "usp": lambda group: USP(group, 2),
    "2d": lambda group: Attention2D(group, 2, group.size() // 2),
    "2d-overlapped": lambda group: Attention2D(group, 2, group.size() // 2, overlap=True),
}


def groups_of(rank, tp, cp):
    """This rank's tensor-parallel and context-parallel groups in a world of tp * cp ranks; tensor ranks are neighbours."""
    tensor = [dist.new_group(range(first, first + tp)) for first in range(0, tp * cp, tp)]
    context = [dist.new_group(range(first, tp * cp, tp)) for first in range(tp)]
    return tensor[rank // tp], context[rank % tp]
