"""The weights of transformers' Mamba and Mamba-2 in GGUF, and llama.cpp's models of them as functions of tokens."""

import ctypes
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_ssm.cli import benchmark

FORMATS = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_K": "MOSTLY_Q4_K_S"}
NAMES = {  # of a layer's tensors, in transformers and in GGUF
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.x_proj.weight": "ssm_x.weight",
    "mixer.dt_proj.weight": "ssm_dt.weight",
    "mixer.dt_proj.bias": "ssm_dt.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
}
WHOLE = {"backbone.embeddings.weight": "token_embd.weight", "backbone.norm_f.weight": "output_norm.weight"}


def write(model: PreTrainedModel, path: Path) -> None:
    """The weights of a model with tied embeddings, in float32, without a tokenizer."""
    config, is_mamba2 = model.config, model.config.model_type == "mamba2"
    inner = config.num_heads * config.head_dim if is_mamba2 else config.intermediate_size
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.num_heads if is_mamba2 else config.time_step_rank)
    if is_mamba2:
        writer.add_ssm_group_count(config.n_groups)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name in WHOLE:
            writer.add_tensor(WHOLE[name], tensor.float().numpy())
        elif name.startswith("backbone.layers."):
            layer, field = name.removeprefix("backbone.layers.").split(".", 1)
            converted = _converted(field, tensor.float(), config.n_groups if is_mamba2 else 0)
            writer.add_tensor(f"blk.{layer}.{NAMES[field]}", np.ascontiguousarray(converted.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _converted(field: str, tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """A layer's tensor as llama.cpp stores it. groups: Mamba-2's; 0 for Mamba-1."""
    if field == "mixer.conv1d.weight":
        return tensor.squeeze(1)
    if field == "mixer.A_log":
        tensor = -torch.exp(tensor)
    if groups and field in ("mixer.A_log", "mixer.D"):
        return tensor.unsqueeze(1)
    return tensor.view(groups, -1) if field == "mixer.norm.weight" else tensor


def quantize(source: Path, target: Path, format: str) -> None:
    """A GGUF file in a format of FORMATS, by llama.cpp: all matrices in it, but for the small ones that it never rounds."""
    silence()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{FORMATS[format]}")
    parameters.pure = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)):
        raise RuntimeError(f"llama.cpp could not write {format}")


class LlamaModel:
    """A GGUF file in llama.cpp, with a cache of one sequence, and prompts of up to `longest` tokens."""

    def __init__(self, path: Path, longest: int):
        self._begin = benchmark.llama_cpp(str(path), 2 * longest, "cpu").begin
        self.reset()

    def use_threads(self, count: int) -> None:
        """Threads of prompts and of single tokens."""
        torch.set_num_threads(count)

    def reset(self) -> None:
        """Begin a new sequence."""
        self._read = self._begin()

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        """Reads tokens -> the logits after the last one, (vocabulary,)."""
        return self._read(torch.tensor([tokens])).clone()


@llama_cpp.llama_log_callback
def _ignore(level: int, text: bytes, data: Any) -> None:
    """Drops a line of llama.cpp's log."""


def silence() -> None:
    """llama.cpp prints nothing."""
    llama_cpp.llama_log_set(_ignore, None)
