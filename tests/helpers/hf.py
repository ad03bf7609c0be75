"""The oracle: small transformers models with new random weights.

transformers initializes the weights of norms and D with ones, so that a wrong split of them would change nothing, and with
its initial weights the rounding errors of deep models grow from layer to layer. Here all weights are random, and the
projections are scaled so that logits stay between 1 and 10.
"""

from contextlib import nullcontext

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, FalconMambaConfig, Mamba2Config, MambaConfig, Zamba2Config, ZambaConfig

SMALL = dict(hidden_size=32, num_hidden_layers=4, vocab_size=61)
LAYERS = ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"]
HYBRID = dict(
    num_hidden_layers=6, layers_block_type=LAYERS, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48,
    mamba_d_state=8, pad_token_id=None,  # otherwise the embedding of id 0 would get no gradient
)  # fmt: skip
CONFIGS = {
    "mamba": (MambaConfig, dict(state_size=8)),
    "falcon_mamba": (FalconMambaConfig, dict(state_size=8)),
    "mamba2": (Mamba2Config, dict(num_heads=8, head_dim=8, n_groups=1, state_size=8)),
    "zamba": (ZambaConfig, HYBRID),
    "zamba2": (Zamba2Config, dict(HYBRID, n_mamba_heads=8, num_mem_blocks=2, adapter_rank=6)),
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
    if "layers_block_type" in values and "layers_block_type" not in changes:
        values["layers_block_type"] = [LAYERS[i % len(LAYERS)] for i in range(values["num_hidden_layers"])]
    with precisely(dtype):
        model = AutoModelForCausalLM.from_config(make(**values), dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter.shape, generator))
    return model


def _draw(name, shape, generator):
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith(".D"):
        return 1 + 0.3 * noise
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
