"""Loss and gradients of a whole model by transformers, and the comparison of our gradients with them."""

from functools import cache

import torch
import torch.nn.functional as F

from cases import assemble
from hf import precisely
from megatron_ssm import families


def shifted(ids, ignored=0.0, value=-100, seed=5):
    """(inputs, labels) for predicting the next id; a fraction `ignored` of the labels is set to `value`."""
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    drawn = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed))
    return inputs, labels.masked_fill(drawn < ignored, value)


def cross_entropy(logits, labels, ignore_index=-100):
    """The loss of logits over the whole vocabulary."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index)


def gradients(model):
    """{our name: this rank's gradient}; only unused adapters and corrections of routers have none."""
    idle = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert idle == {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert all(".use.idle." in name or name.endswith(".correction") for name in idle)
    return {name: parameter.grad for name, parameter in model.named_parameters() if name not in idle}


def whole(oracle, shards, ep=1):
    """{Hugging Face name: whole gradient} from all ranks' parts; replicated gradients must be bitwise equal."""
    fields = families.read(oracle.directory).fields()
    return assemble([field for field in fields if field.name in shards[0]], shards, ep)


@cache
def transformers_loss(oracle, ignored=0.0):
    """(loss, {name: gradient}) of transformers, from its logits and labels that are already shifted."""
    model, (inputs, labels) = oracle.model, shifted(oracle.ids, ignored)
    model.zero_grad(set_to_none=True)
    with precisely(oracle.dtype):
        loss = cross_entropy(model(inputs, use_cache=False).logits, labels)
        loss.backward()
    return loss.detach().double(), transformers_gradients(model)


def transformers_gradients(model):
    """{name in files: gradient}; adapters that are unused because blocks are untied have none."""
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    if model.config.model_type == "nemotron_h":
        return {name.replace("model.", "backbone.", 1): grad for name, grad in found.items()}
    for name, other in OF_GRANITE.items():
        found = {each.replace(name, other): grad for each, grad in found.items()}
    return _names_of_olmo(model.config, found) if model.config.model_type == "olmo_hybrid" else found


OF_GRANITE = {
    "sparse_moe.experts.gate_up_proj": "sparse_moe.input_linear.weight",
    "sparse_moe.experts.down_proj": "sparse_moe.output_linear.weight",
    "sparse_moe.router.weight": "sparse_moe.router.layer.weight",
}


def _names_of_olmo(config, gradients):
    """OLMo Hybrid's norms have other names in files, and the convolutions of q, k and v are apart."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    named = {}
    for name, grad in gradients.items():
        if "conv1d" in name:
            parts = grad.split([keys, keys, len(grad) - 2 * keys])
            named |= {name.replace("conv1d", f"{part}_conv1d"): piece for part, piece in zip("qkv", parts, strict=True)}
        else:
            name = name.replace("input_layernorm", "attention_layer_norm")
            named[name.replace("post_attention_layernorm", "feedforward_layer_norm")] = grad
    return named


def errors(ours, theirs):
    """{name: ||g - g_ref|| / ||g_ref||}, absolute where ||g_ref|| < 1e-8."""
    assert set(ours) == set(theirs)
    scales = {name: theirs[name].norm() for name in theirs}
    return {n: ((ours[n] - theirs[n]).norm() / (s if s >= 1e-8 else 1)).item() for n, s in scales.items()}


def assert_near(ours, theirs, tolerance):
    """Assert that the error of every tensor is at most the tolerance."""
    __tracebackhide__ = True
    wrong = {name: error for name, error in errors(ours, theirs).items() if not error <= tolerance}
    assert not wrong, f"beyond {tolerance}: {wrong}"
