"""The oracle: small transformers models with new random weights. Also reads and changes checkpoints in directories.

transformers initializes the weights of norms and D with ones, so that a wrong split of them would change nothing, and with
its initial weights the rounding errors of deep models grow from layer to layer. Here all weights are random, and the
projections are scaled so that logits stay between 1 and 10.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
    ZambaConfig,
)

INDEX = "model.safetensors.index.json"
SMALL = dict(hidden_size=32, num_hidden_layers=4, vocab_size=61)
LAYERS = ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"]
HYBRID = dict(
    num_hidden_layers=6, layers_block_type=LAYERS, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48,
    mamba_d_state=8, pad_token_id=None,  # otherwise the embedding of id 0 would get no gradient
)  # fmt: skip
SSD = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2)
ATTENDED = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, pad_token_id=None)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
ROTATED = dict(rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5))
CONFIGS = {
    "mamba": (MambaConfig, dict(state_size=8)),
    "falcon_mamba": (FalconMambaConfig, dict(state_size=8)),
    "mamba2": (Mamba2Config, dict(num_heads=8, head_dim=8, n_groups=1, state_size=8)),
    "zamba": (ZambaConfig, HYBRID),
    "zamba2": (Zamba2Config, dict(HYBRID, n_mamba_heads=8, num_mem_blocks=2, adapter_rank=6)),
    "nemotron_h": (
        NemotronHConfig,
        dict(ATTENDED, head_dim=6, ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2),
    ),
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        dict(ATTENDED, **SSD, num_local_experts=0, shared_intermediate_size=48, attention_multiplier=0.3)
        | dict(embedding_multiplier=1.5, residual_multiplier=0.7, logits_scaling=1.6),
    ),
    "bamba": (BambaConfig, dict(ATTENDED, **SSD, attn_layer_indices=[1])),
    "falcon_h1": (
        FalconH1Config,
        dict(ATTENDED, **SSD, mamba_d_ssm=64, key_multiplier=0.6, lm_head_multiplier=0.8, embedding_multiplier=1.3)
        | dict(attention_in_multiplier=0.9, attention_out_multiplier=0.7, ssm_in_multiplier=1.2, ssm_out_multiplier=0.5)
        | dict(mlp_multipliers=[0.8, 0.6], ssm_multipliers=[0.7, 1.1, 0.9, 1.2, 0.8]),
    ),
    "jamba": (
        JambaConfig,
        dict(ATTENDED, mamba_d_state=8, num_experts=1, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=5),
    ),
    "qwen3_5_text": (Qwen3_5TextConfig, dict(ATTENDED, **DELTA, **ROTATED, head_dim=8)),
    "qwen3_5_moe_text": (
        Qwen3_5MoeTextConfig,
        dict(ATTENDED, **DELTA, **ROTATED, head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12)
        | dict(shared_expert_intermediate_size=20),
    ),
    "qwen3_next": (Qwen3NextConfig, dict(ATTENDED, **DELTA, **ROTATED, head_dim=8, num_experts=0)),
    "olmo_hybrid": (
        OlmoHybridConfig,  # transformers saves the convolutions of q, k and v as equal parts, whatever their sizes
        dict(ATTENDED, **DELTA | dict(linear_num_key_heads=4, linear_value_head_dim=8), num_key_value_heads=4),
    ),
}
CENTRED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # their norms multiply by 1 + weight
# The kinds of layers, repeated as often as needed
KINDS = {
    "zamba": ("layers_block_type", LAYERS),
    "zamba2": ("layers_block_type", LAYERS),
    "nemotron_h": ("layers_block_type", ["linear_attention", "full_attention", "mlp"]),
    **dict.fromkeys(
        ("granitemoehybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"),
        ("layer_types", ["linear_attention", "full_attention"]),
    ),
}


class Float64(TorchFunctionMode):
    """Makes transformers compute in float64 what it computes in float32 whatever the model's dtype (norms, scans, angles).

    A float64 model that is made and run in this mode is an oracle to 1e-10 and better.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def wider(value):
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})


def precisely(dtype):
    """The context in which to make and run a model of this dtype: `Float64` for float64, no change for others."""
    return Float64() if dtype == torch.float64 else nullcontext()


def hf_model(family, seed=0, dtype=torch.float32, **changes):
    """A transformers model in eval mode of `family` (one of CONFIGS), small unless `changes` say otherwise."""
    make, extra = CONFIGS[family]
    values = {**SMALL, **extra, **changes}
    name, kinds = KINDS.get(family, ("", []))
    if name and name not in changes:
        values[name] = [kinds[i % len(kinds)] for i in range(values["num_hidden_layers"])]
    with precisely(dtype):
        # torch's grouped product takes no float64, and only some sizes
        config = make(**values, experts_implementation="eager")
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return with_random_weights(model, family, seed)


def with_random_weights(model, family, seed=0):
    """A model of `family`, whose weights are drawn."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter.shape, generator))
            if family in CENTRED and "norm" in name and "linear_attn" not in name:
                parameter.sub_(1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # so large that it changes which experts are chosen
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def _draw(name, shape, generator):
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith(".D"):
        return 1 + 0.3 * noise
    if name.endswith("linear_attn.A_log"):
        return 0.7 * noise - 3  # so that a head remembers tens to hundreds of tokens
    if name.endswith("A_log"):
        return 0.7 * noise
    if name.endswith(("dt_bias", "dt_proj.bias", "dt_proj_bias")):
        return 0.7 * noise - 2
    if name.endswith(("embeddings.weight", "embed_tokens.weight")):
        return noise * 0.5
    if name.endswith("bias"):
        return 0.3 * noise
    return noise * shape[-1] ** -0.5


def cache_name(output) -> str:
    """The name of the cache in a model's output and among its arguments: transformers renamed it in version 5.24."""
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in output)


def save_hf(directory, family, **changes):
    """Write such a model to `directory` (created) and return it."""
    model = hf_model(family, **changes)
    model.save_pretrained(directory)
    return model


# Directories


def tensors_in(directory):
    """{name: tensor} of all the safetensors files of a directory."""
    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def assert_same_bytes(ours, theirs):
    """Assert that two dictionaries of tensors have the same names, dtypes, shapes and bits."""
    __tracebackhide__ = True
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def rewritten(change):
    """A function(directory) that applies `change` to the {name: tensor} of the one safetensors file there."""

    def corrupt(directory):
        tensors = tensors_in(directory)
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return corrupt


def in_two_files(directory):
    """Split a one-file directory into two files and an index."""
    tensors = tensors_in(directory)
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_config(directory, **changes):
    """Change fields of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
