"""Reading config.json. Oracle: transformers' configuration classes, and a table of refused values."""

import json
import logging
import math
import re

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    FalconMambaConfig,
    Mamba2Config,
    MambaConfig,
    Zamba2Config,
    ZambaConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import megatron_ssm
from cases import random_changes, with_layers
from hf import CONFIGS, SMALL, save_hf
from megatron_ssm import families

MAMBA = dict(model_type="mamba", **SMALL, state_size=8)
MAMBA2 = dict(model_type="mamba2", **SMALL, state_size=8, num_heads=8, head_dim=8, n_groups=2)

LAYERS = dict(layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"])
ZAMBA = dict(model_type="zamba", **SMALL, **LAYERS, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48)
ZAMBA2 = dict(ZAMBA, model_type="zamba2", adapter_rank=6)
FALCON = dict(MAMBA, model_type="falcon_mamba")
CLASSES = {
    "mamba": MambaConfig, "falcon_mamba": FalconMambaConfig, "mamba2": Mamba2Config, "zamba": ZambaConfig,
    "zamba2": Zamba2Config,
}  # fmt: skip

SAME_IN_ALL_FAMILIES = {  # our name, in the stack or its mixer: names of transformers' attribute, of which a class has some
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "state_size": ("state_size", "mamba_d_state"),
    "num_layers": ("num_hidden_layers",),
    "conv_kernel": ("conv_kernel", "mamba_d_conv"),
    "norm_eps": ("layer_norm_epsilon", "rms_norm_eps"),
    "bias": ("use_bias", "mamba_proj_bias", "add_bias_linear"),
    "tie_embeddings": ("tie_word_embeddings",),
}
MAMBA_FIELDS = {
    "dt_rank": ("time_step_rank", "mamba_dt_rank"),
    "conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "residual_in_fp32": ("residual_in_fp32",),
    "inner_norm_eps": ("mixer_rms_eps",),
    "channels": ("intermediate_size",),
}
MAMBA2_FIELDS = {
    "conv_bias": ("use_conv_bias",), "residual_in_fp32": ("residual_in_fp32",), "heads": ("num_heads",),
    "head_dim": ("head_dim",), "groups": ("n_groups",),
}  # fmt: skip
ZAMBA_FIELDS = {"heads": ("n_mamba_heads",), "dt_rank": ("mamba_dt_rank",), "conv_bias": ("mamba_conv_bias",)}
ZAMBA2_FIELDS = {"heads": ("n_mamba_heads",), "head_dim": ("mamba_headdim",), "groups": ("mamba_ngroups",)}
ATTENTION_FIELDS = {
    "heads": ("num_attention_heads",), "kv_heads": ("num_key_value_heads",), "head_dim": ("attention_head_dim",),
}  # fmt: skip
MLP_FIELDS = {"channels": ("intermediate_size",), "activation": ("hidden_act",), "bias": ("add_bias_linear",)}
USE_FIELDS = {"adapter_rank": ("adapter_rank",), "attention_adapters": ("use_shared_attention_adapter",)}
FIELDS = {  # that only this family has
    "mamba": MAMBA_FIELDS,
    "falcon_mamba": MAMBA_FIELDS,
    "mamba2": MAMBA2_FIELDS,
    "zamba": ZAMBA_FIELDS,
    "zamba2": ZAMBA2_FIELDS,
}


def assert_same(ours, theirs, attributes):
    """Assert that our numbers equal those attributes of transformers' configuration that it has.

    ours: what has the numbers, the first object that does. attributes: {our name: names of theirs}.
    """
    compared = 0
    for name, their_names in attributes.items():
        number = next(getattr(each, name) for each in ours if hasattr(each, name))
        for attribute in their_names:
            if hasattr(theirs, attribute):
                assert number == getattr(theirs, attribute), name
                compared += 1
    assert compared >= len(attributes) - 4


def mixer_of(stack):
    """The mixer of the first layer; the others are equal."""
    (first, *others) = [layer[0].operators[0].spec for layer in stack.layers]
    assert all(each == first for each in others)
    return first


def uses_of(stack):
    """[(layer, use of a shared block, index of the block)] of the hybrid layers."""
    sides = [(index, unit.side) for index, (unit,) in enumerate(stack.layers) if unit.side is not None]
    return [(index, side.part.spec, side.shared) for index, side in sides]


def assert_same_configuration(ours, theirs):
    """Assert that our Stack and transformers' configuration describe the same model."""
    mixer, uses = mixer_of(ours), uses_of(ours)
    assert_same((ours, mixer), theirs, {**SAME_IN_ALL_FAMILIES, **FIELDS[ours.family]})
    assert {unit.norm.eps for (unit,) in ours.layers} == {ours.norm_eps}
    low = theirs.time_step_min if ours.family == "zamba2" else 0.0
    assert getattr(mixer, "dt_limit", (0.0, math.inf)) == tuple(getattr(theirs, "time_step_limit", (low, math.inf)))
    assert mixer.dt_range == (theirs.time_step_min, theirs.time_step_max, theirs.time_step_floor)
    kinds = getattr(theirs, "layers_block_type", [])
    assert [index for index, *_ in uses] == [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    blocks = min(getattr(theirs, "num_mem_blocks", 1), len(uses)) if theirs.tie_word_embeddings else len(uses)
    assert len(ours.shared) == (blocks if uses else 0)
    assert [shared for *_, shared in uses] == [number % blocks for number in range(len(uses))]
    for _, use, _ in uses:
        attended = use.block.attended
        assert_same((attended,), theirs, ATTENTION_FIELDS)
        assert_same((use.block.mlp,), theirs, MLP_FIELDS)
        assert_same((use,), theirs, USE_FIELDS)
        rope = theirs.rope_parameters["rope_theta"] if getattr(theirs, "use_mem_rope", False) else 0.0
        assert attended.rope_theta == rope


@pytest.mark.parametrize("family", CLASSES)
def test_defaults_are_those_of_transformers(family):
    assert_same_configuration(families.from_dict({"model_type": family}), CLASSES[family]())


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("seed", range(10))
def test_configurations_written_by_transformers(family, seed, tmp_path):
    changes = {**SMALL, **CONFIGS[family][1], **with_layers(random_changes(family, seed))}
    theirs = CLASSES[family](**changes)
    theirs.save_pretrained(tmp_path)
    ours = families.read(tmp_path)
    assert_same_configuration(ours, theirs)
    assert ours.unknown == ()


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_that_transformers_writes_is_known(family, tmp_path):
    """Also infinity in a time_step_limit, however this release of transformers writes it."""
    CLASSES[family]().save_pretrained(tmp_path)
    config = families.read(tmp_path)
    assert config.unknown == ()
    assert config == families.from_dict({"model_type": family, "eos_token_id": list(config.eos_token_ids)})


@pytest.mark.parametrize("base", (ZAMBA, ZAMBA2), ids=("zamba", "zamba2"))
def test_the_old_name_of_a_layer_without_attention(base):
    old = [kind.replace("linear_attention", "mamba") for kind in base["layers_block_type"]]
    assert families.from_dict({**base, "layers_block_type": old}) == families.from_dict(base)


@pytest.mark.parametrize("base", (ZAMBA, ZAMBA2), ids=("zamba", "zamba2"))
def test_transformers_other_name_of_the_layers(base):
    """transformers reads layer_types as well, and prefers it."""
    layers = ["hybrid", "linear_attention", "linear_attention", "hybrid"]
    for written in (base | dict(layers_block_type=None), base):
        assert [index for index, *_ in uses_of(families.from_dict({**written, "layer_types": layers}))] == [0, 3]
        kinds = CLASSES[base["model_type"]].from_dict({**written, "layer_types": layers}).layers_block_type
        assert kinds == layers


@pytest.mark.parametrize(
    "written, theta",
    [
        (dict(), 10000.0),
        (dict(rope_theta=500), 500.0),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=50.0)), 50.0),
        (dict(rope_parameters=dict(rope_type="default")), 10000.0),
        (dict(rope_scaling=dict(type="default"), rope_theta=70.0), 70.0),
        (dict(rope_scaling=None, rope_parameters=None), 10000.0),
        (dict(rope_parameters=dict(rope_type="yarn"), use_mem_rope=False), 0.0),
    ],
)
def test_ways_to_write_the_base_of_the_rotary_embedding(written, theta):
    raw = {**ZAMBA2, "use_mem_rope": True, **written}
    assert families.from_dict(raw).shared[0].spec.attended.rope_theta == theta
    if theta:
        assert Zamba2Config.from_dict(raw).rope_parameters["rope_theta"] == theta


# As in the config.json of state-spaces/mamba-130m-hf and of mistralai/Mamba-Codestral-7B-v0.1.
OLD_NAMES = dict(
    _name_or_path="/fsx/mamba", architectures=["MambaForCausalLM"], bos_token_id=0, d_inner=64, d_model=32, d_state=8,
    eos_token_id=0, fused_add_norm=True, hidden_act="silu", initializer_range=0.1, intermediate_size=64, n_layer=4,
    pad_token_id=0, pad_vocab_size_multiple=8, rescale_prenorm_residual=False, rms_norm=True, ssm_cfg={},
    time_step_init_scheme="random", time_step_scale=1.0, torch_dtype="float32", transformers_version="4.39.0.dev0",
    use_cache=True, use_mambapy=False, norm_before_gate=True, chunk_size=256, d_intermediate=0, attn_layer_idx=[],
)  # fmt: skip


@pytest.mark.parametrize("base", (MAMBA, MAMBA2, FALCON), ids=("mamba", "mamba2", "falcon_mamba"))
def test_old_names_of_the_hub_are_known(base):
    assert families.from_dict({**base, **OLD_NAMES}).unknown == ()


PUBLISHED = {  # fields of published files, beside those that transformers writes
    "nemotron_h": dict(rms_norm_eps=1e-5, attention_head_dim=6, time_step_rank=2, norm_eps=1e-5, hidden_dropout=0.0),
    "granitemoehybrid": dict(normalization_function="rmsnorm", init_method="mup", rope_theta=10000, rope_scaling=None),
    "qwen3_5_text": dict(output_gate_type="swish", mamba_ssm_dtype="float32", attn_output_gate=True),
    "jamba": dict(n_ctx=64, calc_logits_for_entire_prompt=False, mamba_inner_layernorms=True, unsloth_fixed=True),
    "falcon_h1": dict(attn_layer_indices=None, mamba_use_mlp=True, mlp_expansion_factor=8, sliding_window=None),
    "bamba": dict(attn_rotary_emb=4, partial_rotary_factor=0.5, num_logits_to_keep=1),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_fields_of_published_files_are_known(family):
    assert families.from_dict({**hybrid(family), **PUBLISHED[family]}).unknown == ()


@pytest.mark.parametrize("family", CONFIGS)
def test_saves_name_transformers_class(family):
    written = families.from_dict(dict(model_type=family, architectures=None)).to_dict("float32")
    assert written["architectures"] == [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]


def test_long_context_scales_only_the_rotary_embedding():
    assert families.from_dict({**ZAMBA2, "use_long_context": True}) == families.from_dict(ZAMBA2)


@pytest.mark.parametrize("base", (MAMBA, MAMBA2, FALCON, ZAMBA, ZAMBA2), ids=CLASSES)
def test_null_is_as_if_the_field_were_left_out(base):
    names = "hidden_act rms_norm attention_dropout zebra time_step_limit use_long_context d_intermediate eos_token_id"
    config = families.from_dict({**base, **dict.fromkeys(names.split())})
    assert config == families.from_dict(base)
    assert config.unknown == ()


@pytest.mark.parametrize("limit", [[0.0, {"__float__": "Infinity"}], [0, math.inf], None])
def test_ways_to_write_an_infinite_limit(limit, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MAMBA2, "time_step_limit": limit}))
    assert mixer_of(families.read(path)).dt_limit == (0.0, math.inf)


REFUSED = [  # (configuration, changes, part of the message)
    (MAMBA, dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be at most 10000"),
    (MAMBA, dict(vocab_size=2**40), "vocab_size=1099511627776 must be at most 2147483647"),
    (MAMBA, dict(expand=-1), "expand=-1 * hidden_size=32 is -32 channels, not between 1 and"),
    (MAMBA, dict(expand=1e-3), "expand=0.001 * hidden_size=32 is 0 channels"),
    (MAMBA, dict(expand=1e308), "expand=1e+308 * hidden_size=32 is inf channels, not between 1 and"),
    (MAMBA, dict(expand=math.inf), "expand=inf must be a finite number"),
    (MAMBA, dict(expand=math.nan), "expand=nan must be a finite number"),
    (MAMBA2, dict(expand=10**400), "must be a finite number"),
    (MAMBA, dict(layer_norm_epsilon=math.nan), "layer_norm_epsilon=nan must be a finite number"),
    (MAMBA2, dict(time_step_limit=[math.nan, 1.0]), "must be two numbers"),
    (MAMBA2, dict(time_step_limit=[0, 10**400]), "must be two numbers"),
    (MAMBA, dict(model_type="llama"), "model type 'llama' is not supported (supported: mamba, falcon_mamba, mamba2"),
    (MAMBA, dict(model_type=None), "supported: mamba, falcon_mamba"),
    (MAMBA, dict(model_type=["mamba"]), "supported: mamba, falcon_mamba"),
    (MAMBA, dict(hidden_act="gelu"), "hidden_act='gelu' is not implemented (only 'silu')"),
    (MAMBA, dict(rms_norm=False), "rms_norm=False"),
    (MAMBA, dict(quantization_config={"bits": 4}), "quantization_config"),
    (MAMBA, dict(quantization_config=dict(quant_method="fp8")), "a quantization_config of quant_method='fp8' is not"),
    (MAMBA2, dict(attn_layer_idx=[3]), "attn_layer_idx=[3]"),
    (MAMBA2, dict(attn_cfg={"num_heads": 2}), "attn_cfg"),
    (MAMBA2, dict(d_intermediate=128), "d_intermediate=128"),
    (MAMBA2, dict(is_encoder_decoder=True), "is_encoder_decoder=True"),
    (MAMBA, dict(head_bias=True), "head_bias=True"),
    (ZAMBA2, dict(use_mem_rope=True, use_long_context=True), "zamba2 with use_long_context=True is not implemented"),
    (ZAMBA2, dict(use_mem_rope=True, use_long_context="yes"), "use_long_context='yes' must be true or false"),
    (ZAMBA2, dict(gated_linear_unit=False), "gated_linear_unit=False is not implemented (only True)"),
    (MAMBA2, dict(intermediate_size=96), "intermediate_size=96 is not expand * hidden_size = 64"),
    (MAMBA, dict(intermediate_size=0), "intermediate_size=0 must be a positive integer"),
    (FALCON, dict(hidden_act="gelu"), "falcon_mamba with hidden_act='gelu' is not implemented (only 'silu')"),
    (FALCON, dict(mixer_rms_eps=None, layer_norm_epsilon="x"), "layer_norm_epsilon='x' must be a number"),
    (FALCON, dict(mixer_rms_eps="small"), "mixer_rms_eps='small' must be a number"),
    (MAMBA2, dict(num_heads=7), "7 heads of 8 are 56 channels, not expand * hidden_size = 64"),
    (MAMBA2, dict(n_groups=3), "8 heads do not divide over 3 groups (8 % 3 = 2)"),
    (MAMBA, dict(hidden_size="32"), "hidden_size='32' must be a positive integer"),
    (MAMBA, dict(num_hidden_layers=0), "num_hidden_layers=0 must be a positive integer"),
    (MAMBA, dict(vocab_size=True), "vocab_size=True must be a positive integer"),
    (MAMBA, dict(time_step_rank="most"), "time_step_rank='most' must be a positive integer"),
    (MAMBA, dict(expand="2"), "expand='2' must be a number"),
    (MAMBA, dict(layer_norm_epsilon="tiny"), "layer_norm_epsilon='tiny' must be a number"),
    (MAMBA, dict(use_bias="false"), "use_bias='false' must be true or false"),
    (MAMBA, dict(tie_word_embeddings=1), "tie_word_embeddings=1 must be true or false"),
    (MAMBA2, dict(time_step_limit=0.1), "time_step_limit=0.1 must be two numbers"),
    (MAMBA2, dict(time_step_limit=[0.1]), "must be two numbers"),
    (MAMBA2, dict(time_step_limit=[0, {"float": "inf"}]), "must be two numbers"),
    (MAMBA, dict(eos_token_id="</s>"), "eos_token_id='</s>'"),
    *((base, changes, words) for base in (ZAMBA, ZAMBA2) for changes, words in [
        (dict(num_hidden_layers=5), "layers_block_type has 4 layers, num_hidden_layers=5"),
        (dict(layers_block_type=["hybrid"]), "layers_block_type has 1 layers, num_hidden_layers=4"),
        (dict(layers_block_type=["attention"] * 4), "must be a list of 'linear_attention' and 'hybrid'"),
        (dict(layers_block_type="hybrid"), "must be a list of 'linear_attention' and 'hybrid'"),
        (dict(layers_block_type=[["hybrid"]] * 4), "must be a list of 'linear_attention' and 'hybrid'"),
        (dict(attention_hidden_size=32), "attention_hidden_size=32 is not 2 * hidden_size = 64"),
        (dict(num_key_value_heads=3), "4 attention heads do not divide over 3 key/value heads (4 % 3 = 1)"),
        (dict(num_key_value_heads=8), "4 attention heads do not divide over 8 key/value heads (4 % 8 = 4)"),
        (dict(num_attention_heads=0), "num_attention_heads=0 must be a positive integer"),
        (dict(attention_head_dim=2.5), "attention_head_dim=2.5 must be a positive integer"),
        (dict(n_mamba_heads=3), "64 channels do not divide over 3 mamba heads (64 % 3 = 1)"),
        (dict(attention_dropout=0.1), "attention_dropout=0.1 is not implemented (only 0)"),
        (dict(hidden_act="gelu_new"), "hidden_act='gelu_new' is not implemented (only gelu, gelu_pytorch_tanh, silu"),
        (dict(intermediate_size="wide"), "intermediate_size='wide' must be a positive integer"),
        (dict(mamba_d_state=0), "mamba_d_state=0 must be a positive integer"),
        (dict(rms_norm_eps=None, tie_word_embeddings="no"), "tie_word_embeddings='no' must be true or false"),
    ]),
    (ZAMBA, dict(hidden_mamba_act="gelu"), "hidden_mamba_act='gelu' is not implemented (only 'silu')"),
    (ZAMBA, dict(layers_block_type=None, attn_layer_period=0), "attn_layer_period=0 must be a positive integer"),
    (ZAMBA, dict(layers_block_type=None, num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be at most 10000"),
    (ZAMBA, dict(layers_block_type=None, attn_layer_offset="4"), "attn_layer_offset='4' must be an integer"),
    (ZAMBA, dict(num_attention_heads=128, num_key_value_heads=128), "128 attention heads are more than the 64 channels"),
    (ZAMBA2, dict(use_mem_rope=True, rope_theta=0), "rope_theta=0.0 must be positive"),
    (ZAMBA, dict(mamba_dt_rank="most"), "mamba_dt_rank='most' must be a positive integer"),
    (ZAMBA, dict(mamba_proj_bias=1), "mamba_proj_bias=1 must be true or false"),
    (ZAMBA2, dict(layers_block_type=None), "layers_block_type has 54 layers, num_hidden_layers=4"),
    (ZAMBA2, dict(hybrid_layer_ids=[0]), "hybrid_layer_ids=[0] is not the hybrid layers of layers_block_type = [1, 3]"),
    (ZAMBA2, dict(mamba_headdim=64), "an old layout of Zamba2, mamba_headdim=64 without n_mamba_heads, which"),
    (ZAMBA2, dict(mamba_headdim=64, n_mamba_heads=8), "is not mamba_expand * hidden_size / n_mamba_heads = 8"),
    (ZAMBA2, dict(mamba_ngroups=3), "8 heads do not divide over 3 groups (8 % 3 = 2)"),
    (ZAMBA2, dict(num_mem_blocks=0), "num_mem_blocks=0 must be a positive integer"),
    (ZAMBA2, dict(adapter_rank=0), "adapter_rank=0 must be a positive integer"),
    (
        ZAMBA2, dict(use_shared_attention_adapter=True, num_key_value_heads=2),
        "64 channels, not 4 heads and 2 key/value heads of 16",
    ),
    (ZAMBA2, dict(use_shared_attention_adapter=True, attention_head_dim=8), "keys of 2 * hidden_size = 64 channels"),
    (ZAMBA2, dict(use_mem_rope=True, rope_scaling=dict(type="linear")), "rope_type='linear' is not implemented"),
    (ZAMBA2, dict(use_mem_rope=True, rope_parameters=dict(rope_type="yarn")), "rope_type='yarn' is not implemented"),
    (ZAMBA2, dict(use_mem_rope=True, attention_head_dim=5), "rotary embeddings need heads of even size, not 5"),
    (ZAMBA2, dict(use_mem_rope=True, rope_parameters=[1]), "rope_parameters=[1] must be an object"),
    (ZAMBA2, dict(use_mem_rope=True, rope_parameters=dict(rope_theta="big")), "rope_theta='big' must be a number"),
    (ZAMBA2, dict(use_mem_rope=True, rope_theta="big"), "rope_theta='big' must be a number"),
]  # fmt: skip


@pytest.mark.parametrize(
    "base, changes, words", REFUSED, ids=[f"{base['model_type']} {changes}" for base, changes, _ in REFUSED]
)
def test_refused_values(base, changes, words):
    with pytest.raises(ValueError) as caught:
        families.from_dict({**base, **changes})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "written, error, words",
    [
        (None, FileNotFoundError, "config.json does not exist"),
        ("{", ValueError, "is not a JSON object"),
        ("[]", ValueError, "config.json is not a JSON object"),
        ("[" * 100_000, ValueError, "is not a JSON object"),
    ],
)
def test_files_that_are_not_a_configuration(written, error, words, tmp_path):
    if written is not None:
        (tmp_path / "config.json").write_text(written)
    with pytest.raises(error) as caught:
        families.read(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


INDIVISIBLE = [  # (configuration, changes, ranks that cannot split it, the equation)
    (MAMBA, dict(hidden_size=33, expand=1), 2, "33 channels do not divide over 2 tensor-parallel ranks (33 % 2 = 1)"),
    (MAMBA, dict(hidden_size=33), 4, "66 channels do not divide over 4 tensor-parallel ranks (66 % 4 = 2)"),
    (MAMBA2, {}, 3, "8 heads do not divide over 3 tensor-parallel ranks (8 % 3 = 2)"),
    (MAMBA2, dict(n_groups=1), 16, "8 heads do not divide over 16 tensor-parallel ranks (8 % 16 = 8)"),
    (MAMBA2, dict(num_heads=6, n_groups=3, hidden_size=24), 2, "3 groups do not divide over 2 tensor-parallel ranks"),
    (MAMBA2, dict(num_heads=12, n_groups=6, hidden_size=48), 4, "(6 % 4 = 2, 4 % 6 = 4)"),
    (FALCON, dict(intermediate_size=66), 4, "66 channels do not divide over 4 tensor-parallel ranks (66 % 4 = 2)"),
    (ZAMBA, dict(n_mamba_heads=1), 3, "64 channels do not divide over 3 tensor-parallel ranks (64 % 3 = 1)"),
    (ZAMBA, dict(hidden_size=48, n_mamba_heads=6), 4, "6 mamba heads do not divide over 4 tensor-parallel ranks, nor"),
    (ZAMBA, {}, 8, "4 attention heads do not divide over 8 tensor-parallel ranks (4 % 8 = 4)"),
    (ZAMBA, dict(num_attention_heads=6, num_key_value_heads=3), 2, "3 key/value heads do not divide over 2"),
    (ZAMBA, dict(num_attention_heads=12, num_key_value_heads=6), 4, "(6 % 4 = 2, 4 % 6 = 4)"),
    (ZAMBA, dict(intermediate_size=50), 4, "50 channels of the MLP do not divide over 4 tensor-parallel ranks"),
    (ZAMBA2, dict(n_mamba_heads=2), 4, "2 heads do not divide over 4 tensor-parallel ranks (2 % 4 = 2)"),
    (ZAMBA2, dict(hidden_size=24, n_mamba_heads=6, mamba_ngroups=3), 2, "3 groups do not divide over 2"),
]


@pytest.mark.parametrize("base, changes, size, words", INDIVISIBLE)
def test_sizes_that_do_not_divide(base, changes, size, words):
    config = families.from_dict({**base, **changes})
    with pytest.raises(ValueError, match="^0 tensor-parallel ranks"):
        config.check_ranks(0)
    config.check_ranks(1)
    with pytest.raises(ValueError) as caught:
        config.check_ranks(size)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("tp", (1, 2))
def test_unknown_fields_are_one_warning_on_one_rank(ranks, tp, tmp_path):
    save_hf(tmp_path, "mamba2", num_hidden_layers=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "n_gruops": 4, "zebra": 1}))

    def run(rank):
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
        logging.getLogger("megatron_ssm").addHandler(handler)
        megatron_ssm.load(tmp_path, dist.group.WORLD)
        return lines

    line = "config.json: ignored unknown fields n_gruops (did you mean n_groups?), zebra"
    assert ranks(run, tp) == [[("WARNING", line)]] + [[]] * (tp - 1)


WRITTEN = MAMBA, {**MAMBA2, "time_step_limit": [0.01, 0.2]}, FALCON, ZAMBA, {**ZAMBA2, "use_mem_rope": True}


@pytest.mark.parametrize("base", WRITTEN, ids=CLASSES)
def test_transformers_reads_what_is_written(base, tmp_path):
    config = families.from_dict({**base, "torch_dtype": "float32", "n_layer": 4})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict("bfloat16")))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    assert_same_configuration(config, theirs)
    assert families.read(tmp_path) == config


def hybrid(family, **changes):
    """config.json of a small hybrid."""
    return {**CONFIGS[family][0](**{**SMALL, **CONFIGS[family][1], "num_hidden_layers": 2}).to_dict(), **changes}


@pytest.mark.parametrize(
    "family, changes, message",
    [
        (
            "granitemoehybrid",
            dict(num_local_experts=4, num_experts_per_tok=5),
            "num_experts_per_tok=5 is more than num_local_experts=4",
        ),
        ("qwen3_5_text", dict(attn_output_gate=False), "attn_output_gate=False is not implemented"),
        ("qwen3_5_text", dict(linear_num_key_heads=3), "4 value heads do not divide over 3 key heads"),
        ("olmo_hybrid", dict(layer_types=["sliding_attention"] * 2), "must be a list of linear_attention"),
        (
            "nemotron_h",
            dict(layers_block_type=["moe"], n_group=3),
            "8 experts do not divide over 3 groups (8 % 3 = 2)",
        ),
        ("nemotron_h", dict(layers_block_type=["moe"], n_group=2, topk_group=3), "topk_group=3 is more than n_group=2"),
        (
            "nemotron_h",
            dict(layers_block_type=["moe"], n_group=4, num_experts_per_tok=3),
            "num_experts_per_tok=3 is more than the 2 experts of topk_group=1 groups",
        ),
        ("nemotron_h", dict(layers_block_type=["mamba", "window"]), "must be a list of linear_attention, mamba"),
        (
            "nemotron_h",
            dict(layers_block_type=["mlp"] * 3, num_hidden_layers=2),
            "3 kinds of layers for num_hidden_layers=2",
        ),
        ("granitemoehybrid", dict(normalization_function="layernorm"), "only 'rmsnorm'"),
        ("qwen3_5_text", dict(output_gate_type="sigmoid"), "output_gate_type='sigmoid' is not implemented"),
        ("bamba", dict(rope_parameters=dict(partial_rotary_factor=2.0)), "partial_rotary_factor=2.0"),
        ("bamba", dict(attn_layer_indices=3), "attn_layer_indices=3 must be a list"),
        ("falcon_h1", dict(head_dim=7), "heads of even size, not 7"),
        ("falcon_h1", dict(ssm_multipliers=[1.0]), "ssm_multipliers=[1.0] must be 5 numbers"),
        ("falcon_h1", dict(rope_scaling=dict(rope_type="yarn")), "rope_type='yarn' is not implemented"),
        ("jamba", dict(attn_layer_offset=5), "attn_layer_offset=5 must be at least 0 and below"),
        ("granitemoehybrid", dict(mamba_d_head=9), "mamba_d_head=9 is not"),
    ],
)
def test_hybrids_that_are_refused(family, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        families.from_dict(hybrid(family, **changes))


def test_fields_of_hybrids_under_other_names():
    """Megatron's letters, old names of kinds and sizes, and nulls that transformers reads otherwise than fields left out."""
    raw = hybrid("nemotron_h", layers_block_type=["mamba", "attention"])
    named = families.from_dict(raw)
    letters = {**raw, "layers_block_type": None, "hybrid_override_pattern": "M*", "mamba_dt_min": 0.5, "head_dim": None}
    read = families.from_dict({**letters, "attention_head_dim": 10})
    assert [type(spec) for _, spec in read.operators] == [type(spec) for _, spec in named.operators]
    (_, mixer), (_, attention) = read.operators
    assert mixer.dt_limit[0] == 0.5 and attention.head_dim == 10
    bamba = families.from_dict(hybrid("bamba", num_key_value_heads=None)).operators
    attention = next(spec for _, spec in bamba if spec.attention is not None)
    assert attention.kv_heads == attention.heads == 4
