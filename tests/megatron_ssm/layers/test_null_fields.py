"""Fields of config.json that are null, absent or incomplete. Oracle: transformers' model of the same config.json."""

import copy
import json

import pytest
import torch
from chosen import full
from transformers import AutoModelForCausalLM

import megatron_ssm
from hf import CONFIGS, KINDS, SMALL, with_random_weights
from megatron_ssm import families

ABSENT = "absent"
LARGE = 10**7  # elements of a model, from which only the sizes are compared
IDS = torch.arange(22).view(2, 11) % 61
EXPERTS = dict(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=20)
VARIANTS = {  # with what the small models of hf.py leave out
    "zamba2": dict(use_mem_rope=True),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention", "mlp", "moe"], n_routed_experts=4, n_group=2,
        moe_intermediate_size=8, moe_shared_expert_intermediate_size=12, moe_latent_size=10, routed_scaling_factor=1.5,
    ),
    "granitemoehybrid": dict(position_embedding_type="rope", num_local_experts=4, intermediate_size=24),
    "falcon_h1": dict(mamba_rms_norm=True),
    "jamba": dict(num_experts=4),
    "qwen3_next": EXPERTS,
}  # fmt: skip
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
ROTATED = {  # names of rotary embeddings: the fields that config.json has of them
    "": {},
    "null": dict(rope_parameters=None),
    "null scaling": dict(rope_scaling=None, rope_theta=33.0),
    "empty": dict(rope_parameters={}, rope_theta=33),
    "type": dict(rope_parameters=dict(rope_type="default")),
    "old type": dict(rope_scaling=dict(type="default"), rope_theta=33.0),
    "base": dict(rope_parameters=dict(rope_theta=77.0)),
    "null base": dict(rope_parameters=dict(rope_theta=None, rope_type="default")),
    "null outer base": dict(rope_theta=None),
    "null outer base and base": dict(rope_theta=None, rope_parameters=dict(rope_theta=77.0)),
    "part": dict(rope_parameters=dict(partial_rotary_factor=0.5)),
    "outer part": dict(partial_rotary_factor=0.5, rope_theta=33.0),
    "null part": dict(partial_rotary_factor=None),
}
# With their default, other sizes of the small model would be 0 or contradict it.
LEFT_AS_THEY_ARE = ("hidden_size", "num_attention_heads")


def raw_of(family):
    """config.json of a small model."""
    values = SMALL | CONFIGS[family][1] | VARIANTS.get(family, {})
    if family in KINDS:
        name, kinds = KINDS[family]
        values.setdefault(name, [kinds[i % len(kinds)] for i in range(values["num_hidden_layers"])])
    return CONFIGS[family][0](**values).to_dict()


def cases():
    """(family, changes) of each field that the family reads, null and absent, and of the ways to write the rotation."""
    for family in CONFIGS:
        known = families.FAMILIES[family]
        for name in sorted((known.known | known.supported.keys()) - set(LEFT_AS_THEY_ARE)):
            yield family, {name: None}
            if name in raw_of(family):
                yield family, {name: ABSENT}
        if "rope_theta" in known.known:
            for fields in ROTATED.values():
                yield family, dict.fromkeys(ROTARY, ABSENT) | fields


CHOSEN = [
    ("bamba", {"mamba_conv_bias": None}),
    ("falcon_h1", {"mamba_norm_before_gate": None}),
    ("granitemoehybrid", {"attention_multiplier": None}),
    ("nemotron_h", {"layers_block_type": ABSENT}),
    ("nemotron_h", {"tie_word_embeddings": True}),  # transformers reads lm_head nevertheless
    ("qwen3_5_text", dict.fromkeys(ROTARY, ABSENT) | ROTATED["null part"]),
    *(("olmo_hybrid", dict.fromkeys(ROTARY, ABSENT) | ROTATED[name]) for name in ("null", "type", "null base")),
]
REST = [case for case in cases() if case not in CHOSEN]


def model_of(family, raw):
    """(number of elements, transformers' model or None if it is large, its logits); skips what transformers refuses."""
    try:
        config = CONFIGS[family][0].from_dict(copy.deepcopy(raw), experts_implementation="eager")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        corrections = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
        count = sum(each.numel() for each in [*model.parameters(), *corrections])
        if count > LARGE:
            return count, None, None
        model = with_random_weights(AutoModelForCausalLM.from_config(config).eval(), family)
        return count, model, model(IDS).logits
    except Exception as error:  # of any kind
        pytest.skip(f"transformers refuses it: {error!r}")


@pytest.mark.parametrize("family, changes", [*CHOSEN, *(full(*case) for case in REST)])
@torch.no_grad()
def test_nulls_and_absent_fields(family, changes, tmp_path):
    raw = {name: value for name, value in (raw_of(family) | changes).items() if value != ABSENT}
    count, model, expected = model_of(family, raw)
    if model is None:
        assert families.from_dict(raw).elements == count
        return
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    torch.testing.assert_close(megatron_ssm.load(tmp_path)(IDS), expected, rtol=0, atol=3e-4)
