"""Hybrids of Mamba, attention and MLPs in GGUF: the tensors and fields that llama.cpp's architectures of them have."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from megatron_ssm import families
from megatron_ssm.layers.attention import AttentionSpec
from megatron_ssm.layers.experts import ExpertsSpec
from megatron_ssm.layers.gated_delta import GatedDeltaSpec
from megatron_ssm.layers.mamba1 import Mamba1Spec
from megatron_ssm.layers.mamba2 import Mamba2Spec
from megatron_ssm.layers.mlp import MlpSpec

ARCHITECTURES = {
    "nemotron_h": "nemotron_h", "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1", "jamba": "jamba",
    "qwen3_5_text": "qwen35", "qwen3_next": "qwen3next",
}  # fmt: skip
# Of a layer's tensors: the end of our field's usual name in files, GGUF's name
NAMES = {
    "in_proj.weight": "ssm_in.weight", "conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias",
    "x_proj.weight": "ssm_x.weight", "dt_proj.weight": "ssm_dt.weight", "dt_proj.bias": "ssm_dt.bias",
    "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d", "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight", "dt_layernorm.weight": "ssm_dt_norm.weight",
    "b_layernorm.weight": "ssm_b_norm.weight", "c_layernorm.weight": "ssm_c_norm.weight",
    "q_proj.weight": "attn_q.weight", "k_proj.weight": "attn_k.weight", "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight", "gate_proj.weight": "ffn_gate.weight", "up_proj.weight": "ffn_up.weight",
    "down_proj.weight": "ffn_down.weight", "gate_up_proj.weight": "gate and up", "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight", "in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight",
    "q_norm.weight": "attn_q_norm.weight", "k_norm.weight": "attn_k_norm.weight", "in_proj_qkvz.weight": "qkv and z",
    "in_proj_ba.weight": "ssm_ba.weight", "gate.weight": "ffn_gate_inp.weight", "router.layer.weight": "ffn_gate_inp.weight",
    "experts.gate_up_proj": "gate and up of experts", "experts.down_proj": "ffn_down_exps.weight",
    "score.weight": "ffn_gate_inp_shexp.weight",
}  # fmt: skip


def write(directory: Path, path: Path) -> None:
    """The model of a Hugging Face directory in float32, without a tokenizer. Its constants are part of the weights."""
    stack = families.read(directory)
    raw = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[stack.family])
    _write_fields(writer, stack, raw)
    tensors, made = load_file(directory / "model.safetensors"), {}
    for field in stack.fields():
        tensor = (tensors[field.hf] if field.hf in tensors else _of_experts(field, tensors)).float()
        for name, converted in _converted(stack, field, tensor, raw):
            made[name] = converted
    for name, tensor in made.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_fields(writer: Any, stack: Any, raw: dict) -> None:
    """The sizes and constants."""
    per_layer = [[part.spec for unit in layer for part in unit.operators] for layer in stack.layers]
    every = [spec for specs in per_layer for spec in specs]
    attention = next(spec for spec in every if isinstance(spec, AttentionSpec))
    mixer: Any = next(spec for spec in every if isinstance(spec, Mamba1Spec | Mamba2Spec | GatedDeltaSpec))
    is_mamba2, is_delta = isinstance(mixer, Mamba2Spec), isinstance(mixer, GatedDeltaSpec)
    kv = [next((s.kv_heads for s in specs if isinstance(s, AttentionSpec)), 0) for specs in per_layer]
    mlps = [next((s.channels for s in specs if isinstance(s, MlpSpec)), 0) for specs in per_layer]
    experts = next((spec for spec in every if isinstance(spec, ExpertsSpec)), None)
    if experts is not None:
        writer.add_expert_count(experts.router.experts)
        writer.add_expert_used_count(experts.router.chosen)
        writer.add_expert_feed_forward_length(experts.channels)
        writer.add_expert_shared_feed_forward_length(mlps[0])
        mlps = [experts.channels] * len(mlps)
    writer.add_context_length(2**20)
    writer.add_embedding_length(stack.hidden_size)
    writer.add_feed_forward_length(mlps if 0 in mlps else mlps[0])
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads if is_delta else kv if 0 in kv else kv[0])
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(attention.rope_size or attention.head_dim)
    writer.add_block_count(len(per_layer))
    writer.add_layer_norm_rms_eps(stack.norm_eps)
    writer.add_layer_norm_eps(stack.norm_eps)  # nemotron_h reads it under this name
    writer.add_ssm_conv_kernel(mixer.conv_kernel)
    if is_delta:
        writer.add_ssm_inner_size(mixer.value_heads * mixer.value_dim)
        writer.add_ssm_state_size(mixer.key_dim)
        writer.add_ssm_time_step_rank(mixer.value_heads)
        writer.add_ssm_group_count(mixer.key_heads)
        writer.add_full_attention_interval(4)
        if stack.family == "qwen3_5_text":
            writer.add_rope_dimension_sections([11, 11, 10, 0])
    else:
        writer.add_ssm_inner_size(mixer.channels)
        writer.add_ssm_state_size(mixer.state_size)
        writer.add_ssm_time_step_rank(mixer.heads if is_mamba2 else mixer.dt_rank)
    if is_mamba2:
        writer.add_ssm_group_count(mixer.groups)
    if attention.rope_theta:
        writer.add_rope_freq_base(attention.rope_theta)
    if stack.family == "granitemoehybrid":
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
        writer.add_rope_scaling_finetuned(False)  # llama.cpp's flag for rotary embeddings
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(stack.vocab_size)


def _converted(stack: Any, field: Any, tensor: torch.Tensor, raw: dict) -> list[tuple[str, torch.Tensor]]:
    """(GGUF's name, tensor) of what a field is a part of; falcon_h1's constants are multiplied in."""
    scaled = raw if stack.family == "falcon_h1" else {}
    if field.name == "embeddings.weight":
        return [("token_embd.weight", tensor * scaled.get("embedding_multiplier", 1))]
    if field.init == "zero":  # norms whose weights are centred around zero
        tensor = 1 + tensor
    if field.name == "norm_f.weight":
        return [("output_norm.weight", tensor)]
    if field.name == "lm_head.weight":
        return [("output.weight", tensor * scaled.get("lm_head_multiplier", 1))]
    _, layer, module, *_ = field.name.split(".")
    if not field.usual:  # a block's norm
        name = (
            "attn_norm"
            if module != "mlp_norm"
            else "ffn_norm"
            if stack.family not in ("qwen3_5_text", "qwen3_next")
            else "post_attention_norm"
        )
        has_ending = module != "mlp_norm" or stack.family != "falcon_h1"
        return [(f"blk.{layer}.{name}{'.weight' if has_ending else ''}", tensor)]
    name, spec = NAMES[field.usual], next(s for p, s in stack.operators if p == f"layers.{layer}.{module}")
    shared = "_shexp" if any(isinstance(s, ExpertsSpec) for _, s in stack.operators) else ""
    if name == "gate and up":
        gate, up = tensor.chunk(2)
        return [(f"blk.{layer}.ffn_gate{shared}.weight", gate), (f"blk.{layer}.ffn_up{shared}.weight", up)]
    if name == "gate and up of experts":
        gate, up = tensor.chunk(2, dim=1)
        return [(f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up)]
    if name == "qkv and z":
        q, k, v, z = _by_kind(tensor, spec)
        return [(f"blk.{layer}.attn_qkv.weight", torch.cat([q, k, v])), (f"blk.{layer}.attn_gate.weight", z)]
    if isinstance(spec, MlpSpec) and name.startswith("ffn_") and field.usual != "score.weight":
        name = name.replace(".weight", f"{shared}.weight")
    if field.usual == "score.weight":
        tensor = tensor.squeeze(0)
    is_mamba2 = isinstance(spec, Mamba2Spec)
    if field.usual == "conv1d.weight":
        tensor = tensor.squeeze(1)
    if field.usual == "A_log":
        tensor = -torch.exp(tensor)
    if is_mamba2 and field.usual in ("A_log", "D"):
        tensor = tensor.unsqueeze(1)
    if is_mamba2 and field.usual == "norm.weight":
        tensor = tensor.view(spec.groups, -1)
    if isinstance(spec, GatedDeltaSpec) and stack.family == "qwen3_5_text":
        tensor = _tiled(field.usual, spec, tensor)
    if scaled:
        tensor = tensor * _constant(field.usual, spec, raw)
    return [(f"blk.{layer}.{name}", tensor)]


def _of_experts(field: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The matrices of all experts (experts, out, in) that a file has one by one."""
    count = field.shape[0]
    return torch.stack([torch.cat([tensors[name.format(i)] for name in field.apart]) for i in range(count)])


def _by_kind(tensor: torch.Tensor, spec: GatedDeltaSpec) -> list[torch.Tensor]:
    """q, k, v and z of all heads, of a tensor that has them by key head."""
    values = spec.value_heads // spec.key_heads * spec.value_dim
    parts = tensor.unflatten(0, (spec.key_heads, -1)).split([spec.key_dim, spec.key_dim, values, values], dim=1)
    return [part.flatten(0, 1) for part in parts]


def _tiled(usual: str, spec: GatedDeltaSpec, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a gated delta net with the first value head of each key head before the second ones, as in llama.cpp."""

    def tiled(x: torch.Tensor, dim: int) -> torch.Tensor:
        return (
            x.unflatten(dim, (spec.key_heads, spec.value_heads // spec.key_heads, -1))
            .transpose(dim, dim + 1)
            .flatten(dim, dim + 2)
        )

    if usual in ("in_proj_qkv.weight", "conv1d.weight"):
        keys = 2 * spec.key_heads * spec.key_dim
        return torch.cat([tensor[:keys], tiled(tensor[keys:], 0)])
    return tensor if usual == "norm.weight" else tiled(tensor, 1 if usual == "out_proj.weight" else 0)


def _constant(usual: str, spec: Any, raw: dict) -> Any:
    """What multiplies a tensor of falcon_h1: a number, or a column of numbers."""
    inner = raw["attention_in_multiplier"]
    numbers = {
        "q_proj.weight": inner, "k_proj.weight": inner * raw["key_multiplier"], "v_proj.weight": inner,
        "o_proj.weight": raw["attention_out_multiplier"], "out_proj.weight": raw["ssm_out_multiplier"],
        "gate_proj.weight": raw["mlp_multipliers"][0], "down_proj.weight": raw["mlp_multipliers"][1],
    }  # fmt: skip
    if usual != "in_proj.weight":
        return numbers.get(usual, 1)
    bc = spec.groups * spec.state_size
    rows = (spec.channels, spec.channels, bc, bc, spec.heads)
    return torch.cat([torch.full((n, 1), raw["ssm_in_multiplier"] * s) for n, s in zip(rows, spec.scales, strict=True)])
