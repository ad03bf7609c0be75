"""Zamba: Mamba-1 mixers with several heads, and one transformer block that the hybrid layers share; ZambaForCausalLM."""

import math
from typing import Any

from megatron_ssm.layers.attention import AttentionSpec
from megatron_ssm.layers.mamba1 import Mamba1Spec
from megatron_ssm.layers.mlp import ACTIVATIONS, MlpSpec
from megatron_ssm.layers.shared_block import SharedBlockInvocationSpec, SharedBlockSpec
from megatron_ssm.spec.fields import divides
from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Part, Side, Spec, Stack, Unit

from .common import MIXER, channels, dt_range, dt_rank, layer_count, mixer_layer, stack_of

PLAIN = "linear_attention"  # a layer without the shared block; "mamba" is its old name
PATTERN = {"M": PLAIN, "*": "hybrid"}
SHARED_BLOCK: dict[str, Any] = dict(
    vocab_size=32000, tie_word_embeddings=True, hidden_act="gelu", layers_block_type=None, attention_head_dim=None,
    attention_hidden_size=None,
)  # fmt: skip
DEFAULTS: dict[str, Any] = MIXER | SHARED_BLOCK | dict(
    hidden_size=3712, state_size=16, num_hidden_layers=76, num_heads=2, feed_forward_size=14848,
    num_attention_heads=16, num_key_value_heads=16, attn_layer_period=6, attn_layer_offset=4,
)  # fmt: skip
NAMES = dict(
    state_size="mamba_d_state", conv_kernel="mamba_d_conv", expand="mamba_expand", layer_norm_epsilon="rms_norm_eps",
    num_heads="n_mamba_heads", feed_forward_size="intermediate_size",
)  # fmt: skip


def hybrid_layers(fields: FieldReader, kinds: list[str]) -> tuple[int, ...]:
    """The indices of the layers that invoke a shared block. kinds: the kinds of the layers if config.json has none."""
    kinds = fields.raw.get("layer_types") or fields["layers_block_type"] or kinds  # transformers prefers the first
    if not isinstance(kinds, list) or not all(kind in (PLAIN, "mamba", "hybrid") for kind in kinds):
        raise ValueError(f"config.json: layers_block_type={kinds!r} must be a list of 'linear_attention' and 'hybrid'")
    if len(kinds) != layer_count(fields):
        raise ValueError(
            f"config.json: layers_block_type has {len(kinds)} layers, num_hidden_layers={layer_count(fields)}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "hybrid")


def shared_block(fields: FieldReader, bias: bool = False, packed: bool = False, **attention: Any) -> SharedBlockSpec:
    """The shared block. bias, packed: as in `MlpSpec`. attention: further fields of its attention."""
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    fields.check_derived("attention_hidden_size", 2 * hidden, "2 * hidden_size")
    head_dim = fields.positive("attention_head_dim") if fields["attention_head_dim"] else 2 * hidden // heads
    if not head_dim:
        raise ValueError(f"{heads} attention heads are more than the {2 * hidden} channels of the shared block")
    kv_heads = heads if fields["num_key_value_heads"] is None else fields.positive("num_key_value_heads")
    divides(heads, kv_heads, "attention heads", "key/value heads")
    activation = fields.choice("hidden_act", ACTIVATIONS)
    feed_forward = 4 * hidden if fields["feed_forward_size"] is None else fields.positive("feed_forward_size")
    scale = math.sqrt(2 / head_dim)
    attended = AttentionSpec(hidden, heads, kv_heads, head_dim, 2 * hidden, scale, **attention)
    mlp = MlpSpec(hidden, feed_forward, activation, bias=bias, packed=packed)
    return SharedBlockSpec(attended, mlp, fields.number("layer_norm_epsilon"))


def shared_block_stack(
    fields: FieldReader, mixer: Spec, hybrid: tuple[int, ...], block: SharedBlockSpec | None, blocks: int, name: str,
    renamed: tuple[tuple[str, str], ...] = (), **adapters: Any,
) -> Stack:  # fmt: skip
    """Layers with one mixer each; the hybrid ones invoke the shared blocks in turn.

    The tensors of a block have the name of the first layer that invokes it. Without tied embeddings, transformers does not
    share the blocks either, so each hybrid layer has its own.

    Args:
        fields: The fields of config.json.
        mixer: The specification of the mixer.
        hybrid: The indices of the hybrid layers.
        block: The specification of the shared block; None without hybrid layers.
        blocks: The number of shared blocks.
        name: The name of a block in its layer.
        renamed: Pairs (usual prefix, this family's prefix) for tensors of the mixer.
        adapters: Further fields of each `SharedBlockInvocationSpec`.
    """
    tied, eps = fields.boolean("tie_word_embeddings"), fields.number("layer_norm_epsilon")
    copies = min(blocks, len(hybrid)) if tied else len(hybrid)
    layers: list[tuple[Unit, ...]] = []
    for index in range(layer_count(fields)):
        path, side = f"model.layers.{index}.", None
        if index in hybrid and block is not None:
            number = hybrid.index(index)
            files = f"model.layers.{hybrid[number % copies]}.{name}."
            others = range(number % blocks, 0 if tied else len(hybrid), blocks) if adapters.get("adapter_rank") else ()
            spec = SharedBlockInvocationSpec(
                block, number, idle=tuple(other for other in others if other != number), **adapters
            )
            side = Side(Part("use", spec, path, (("block.", files),)), number % copies)
            path += "mamba_decoder."
        names = tuple((usual, f"{path}mamba.{theirs}") for usual, theirs in renamed)
        layers.append(mixer_layer(mixer, path, eps, "input_layernorm", "mamba", renamed=names, side=side))
    aliases: list[tuple[str, tuple[str, ...]]] = [("model.embed_tokens.weight", ("lm_head.weight",))] if tied else []
    shared = []
    for copy, layer in enumerate(hybrid[:copies]):
        shared.append(Part(str(copy), block, f"model.layers.{layer}.{name}."))  # type: ignore[arg-type]
        if tied:
            same = tuple(f"model.layers.{other}.{name}." for other in hybrid[copy::blocks])
            aliases.append((f"model.layers.{layer}.{name}.", same))
    return stack_of(
        fields, layers, shared=tuple(shared), aliases=tuple(aliases), final_norm="model.final_layernorm.weight"
    )


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    inner, heads, count = channels(fields), fields.positive("num_heads"), layer_count(fields)
    divides(inner, heads, "channels", "mamba heads")
    mixer = Mamba1Spec(
        hidden_size=fields.positive("hidden_size"), channels=inner, state_size=fields.positive("state_size"),
        conv_kernel=fields.positive("conv_kernel"), dt_rank=dt_rank(fields), heads=heads, bias=fields.boolean("use_bias"),
        conv_bias=fields.boolean("use_conv_bias"), dt_range=dt_range(fields), interleaved=True, stored_by_head=True,
    )  # fmt: skip
    period, offset = fields.positive("attn_layer_period"), fields.integer("attn_layer_offset")
    kinds = [PLAIN, PLAIN, "hybrid"] + ["hybrid" if i % period == offset else PLAIN for i in range(count - 3)]
    hybrid = hybrid_layers(fields, kinds)
    projections = (("x_proj.", "x_proj_"), ("dt_proj.", "dt_proj_"))
    block = shared_block(fields) if hybrid else None
    return shared_block_stack(fields, mixer, hybrid, block, 1, "shared_transf", projections)


def new_hybrid_config(options: Any, minimum: int) -> dict:
    """The fields of both Zamba families. minimum: the number of hybrid layers that transformers requires."""
    every, count = options.hybrid_interval, options.num_layers // options.hybrid_interval
    if count < minimum:
        raise ValueError(
            f"--model-type {options.model_type} needs the shared block in at least {minimum} blocks; --num-layers "
            f"{options.num_layers} with --hybrid-interval {every} has it in {count}"
        )
    return dict(
        layers_block_type=[PLAIN if layer % every else "hybrid" for layer in range(1, options.num_layers + 1)],
        num_attention_heads=options.num_attention_heads,
        num_key_value_heads=options.num_query_groups or options.num_attention_heads,
        intermediate_size=options.ffn_hidden_size or 4 * options.hidden_size,
        mamba_d_state=options.mamba_state_dim,
        n_mamba_heads=2 * options.hidden_size // options.mamba_head_dim,
    )


def new_config(options: Any) -> dict:
    """See `Family.from_options`."""
    return new_hybrid_config(options, 2)


ZAMBA = Family(
    "zamba", read, DEFAULTS,
    NAMES | dict(use_bias="mamba_proj_bias", use_conv_bias="mamba_conv_bias", time_step_rank="mamba_dt_rank"),
    from_options=new_config, shares_blocks=True, pattern=PATTERN, architecture="ZambaForCausalLM",
)  # fmt: skip
