"""The oracle: small transformers models whose weights are drawn again, so that nothing hides behind a 1 or a 0.

transformers' own initialization leaves norm weights and D at one (a wrong split of them goes unseen) and is chaotic in
depth (ssm.md, fact 2); here they are spread, and the projections are scaled so that logits stay O(1..10).
"""

import torch
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig

SMALL = dict(hidden_size=32, num_hidden_layers=4, vocab_size=61, expand=2, conv_kernel=4)
CONFIGS = {
    "mamba": (MambaConfig, dict(state_size=8)),
    "mamba2": (Mamba2Config, dict(num_heads=8, head_dim=8, n_groups=1, state_size=8)),
}


def hf_model(family, seed=0, dtype=torch.float32, **changes):
    """A transformers model in eval mode of `family` ("mamba", "mamba2"), small unless `changes` say otherwise."""
    make, extra = CONFIGS[family]
    model = AutoModelForCausalLM.from_config(make(**{**SMALL, **extra, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter.shape, generator))
    return model.to(dtype)


def _draw(name, shape, generator):
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith(".D"):
        return 1 + 0.3 * noise
    if name.endswith("A_log"):
        return 0.7 * noise
    if name.endswith(("dt_bias", "dt_proj.bias")):
        return 0.7 * noise - 2
    if name.endswith("embeddings.weight"):
        return noise * 0.5
    if name.endswith("bias"):
        return 0.3 * noise
    return noise * shape[-1] ** -0.5


def save_hf(directory, family, **changes):
    """Write such a model to `directory` (created) and return it."""
    model = hf_model(family, **changes)
    model.save_pretrained(directory)
    return model
