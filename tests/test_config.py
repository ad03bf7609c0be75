"""Reading config.json; oracle: transformers' configuration classes, and a table of what each field may be."""

import json
import logging
import math

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, Mamba2Config, MambaConfig

import megatron_ssm
from hf import SMALL, save_hf
from megatron_ssm import Config

MAMBA = dict(model_type="mamba", **SMALL, state_size=8)
MAMBA2 = dict(model_type="mamba2", **SMALL, state_size=8, num_heads=8, head_dim=8, n_groups=2)

OURS_OF_THEIRS = {  # our field: transformers' attribute
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "state_size": "state_size",
    "num_layers": "num_hidden_layers",
    "conv_kernel": "conv_kernel",
    "norm_eps": "layer_norm_epsilon",
    "use_bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "residual_in_fp32": "residual_in_fp32",
    "tie_embeddings": "tie_word_embeddings",
}
MAMBA_ONLY = {"dt_rank": "time_step_rank", "intermediate_size": "intermediate_size"}
MAMBA2_ONLY = {"heads": "num_heads", "head_dim": "head_dim", "groups": "n_groups"}


@pytest.mark.parametrize("theirs, only", [(MambaConfig, MAMBA_ONLY), (Mamba2Config, MAMBA2_ONLY)])
def test_defaults_are_those_of_transformers(theirs, only):
    theirs = theirs()
    ours = Config.from_dict({"model_type": theirs.model_type})
    for name, attribute in {**OURS_OF_THEIRS, **only}.items():
        assert getattr(ours, name) == getattr(theirs, attribute), name
    assert ours.dt_limit == tuple(getattr(theirs, "time_step_limit", (0.0, math.inf)))
    assert ours.dt_init == (theirs.time_step_min, theirs.time_step_max, theirs.time_step_floor)


@pytest.mark.parametrize("theirs", (MambaConfig, Mamba2Config))
def test_every_field_that_transformers_writes_is_known(theirs, tmp_path):
    """Also infinity in a time_step_limit, however this release of transformers writes it."""
    theirs().save_pretrained(tmp_path)
    config = Config.read(tmp_path)
    assert config.unknown == ()
    assert config == Config.from_dict({"model_type": theirs.model_type, "eos_token_id": list(config.eos_token_ids)})


# As in the config.json of state-spaces/mamba-130m-hf and of mistralai/Mamba-Codestral-7B-v0.1.
OLD_NAMES = dict(
    _name_or_path="/fsx/mamba", architectures=["MambaForCausalLM"], bos_token_id=0, d_inner=64, d_model=32, d_state=8,
    eos_token_id=0, fused_add_norm=True, hidden_act="silu", initializer_range=0.1, intermediate_size=64, n_layer=4,
    pad_token_id=0, pad_vocab_size_multiple=8, rescale_prenorm_residual=False, rms_norm=True, ssm_cfg={},
    time_step_init_scheme="random", time_step_scale=1.0, torch_dtype="float32", transformers_version="4.39.0.dev0",
    use_cache=True, use_mambapy=False, norm_before_gate=True, chunk_size=256, d_intermediate=0, attn_layer_idx=[],
)  # fmt: skip


@pytest.mark.parametrize("base", (MAMBA, MAMBA2), ids=("mamba", "mamba2"))
def test_old_names_of_the_hub_pass_silently(base):
    assert Config.from_dict({**base, **OLD_NAMES}).unknown == ()


@pytest.mark.parametrize("limit", [[0.0, {"__float__": "Infinity"}], [0, math.inf], None])
def test_ways_to_write_no_limit(limit, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MAMBA2, "time_step_limit": limit}))
    assert Config.read(path).dt_limit == (0.0, math.inf)


REFUSED = [  # (configuration, changes, what the message must contain)
    (MAMBA, dict(model_type="llama"), "model type 'llama' is not supported (supported: mamba, mamba2)"),
    (MAMBA, dict(model_type=None), "supported: mamba, mamba2"),
    (MAMBA, dict(model_type=["mamba"]), "supported: mamba, mamba2"),
    (MAMBA, dict(hidden_act="gelu"), "hidden_act='gelu' is not implemented (only 'silu')"),
    (MAMBA, dict(rms_norm=False), "rms_norm=False"),
    (MAMBA, dict(quantization_config={"bits": 4}), "quantization_config"),
    (MAMBA2, dict(attn_layer_idx=[3]), "attn_layer_idx=[3]"),
    (MAMBA2, dict(attn_cfg={"num_heads": 2}), "attn_cfg"),
    (MAMBA2, dict(d_intermediate=128), "d_intermediate=128"),
    (MAMBA2, dict(is_encoder_decoder=True), "is_encoder_decoder=True"),
    (MAMBA, dict(head_bias=True), "head_bias=True"),
    (MAMBA, dict(intermediate_size=96), "intermediate_size=96 is not expand * hidden_size = 64"),
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
]


@pytest.mark.parametrize("base, changes, words", REFUSED, ids=[str(changes) for _, changes, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused(base, changes, words):
    with pytest.raises(ValueError) as caught:
        Config.from_dict({**base, **changes})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "written, error, words",
    [
        (None, FileNotFoundError, "config.json does not exist"),
        ("{", ValueError, "is not JSON"),
        ("[]", ValueError, "is a JSON object, not list"),
    ],
)
def test_files_that_are_no_configuration(written, error, words, tmp_path):
    if written is not None:
        (tmp_path / "config.json").write_text(written)
    with pytest.raises(error) as caught:
        Config.read(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


INDIVISIBLE = [  # (configuration, changes, ranks that cannot split it, the equation)
    (MAMBA, dict(hidden_size=33, expand=1), 2, "33 channels do not divide over 2 tensor-parallel ranks (33 % 2 = 1)"),
    (MAMBA, dict(hidden_size=33), 4, "66 channels do not divide over 4 tensor-parallel ranks (66 % 4 = 2)"),
    (MAMBA2, {}, 3, "8 heads do not divide over 3 tensor-parallel ranks (8 % 3 = 2)"),
    (MAMBA2, dict(n_groups=1), 16, "8 heads do not divide over 16 tensor-parallel ranks (8 % 16 = 8)"),
    (MAMBA2, dict(num_heads=6, n_groups=3, hidden_size=24), 2, "3 groups do not divide over 2 tensor-parallel ranks"),
    (MAMBA2, dict(num_heads=12, n_groups=6, hidden_size=48), 4, "(6 % 4 = 2, 4 % 6 = 4)"),
]


@pytest.mark.parametrize("base, changes, size, words", INDIVISIBLE)
def test_sizes_that_do_not_divide(base, changes, size, words):
    config = Config.from_dict({**base, **changes})
    config.check_ranks(1)
    with pytest.raises(ValueError) as caught:
        config.check_ranks(size)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("tp", (1, 2))
def test_an_unknown_field_is_one_warning_of_one_rank(ranks, tp, tmp_path):
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


@pytest.mark.parametrize("base", (MAMBA, {**MAMBA2, "time_step_limit": [0.01, 0.2]}), ids=("mamba", "mamba2"))
def test_what_is_written_is_read_by_transformers(base, tmp_path):
    config = Config.from_dict({**base, "torch_dtype": "float32", "n_layer": 4})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict("bfloat16")))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    assert theirs.num_hidden_layers == config.num_layers
    assert Config.read(tmp_path) == config
