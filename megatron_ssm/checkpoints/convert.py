"""Converts checkpoints of state-spaces/mamba (pytorch_model.bin and config.json) to Hugging Face directories, and back.

Also converts DeepSpeed's own checkpoints to Hugging Face directories (`deepspeed_files` reads them), and Hugging Face
directories to those of quantized models (`quantized_files`).

The mixers' tensors have the same names and shapes in both formats; the embedding's name, the head and the configuration
differ. Nothing is guessed: a tensor or a configuration field that has no counterpart is an error that names it.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from commfabric.foundation.command_line import Failure
from megatron_ssm.layers import families
from megatron_ssm.layers.families import check_directory, read_json
from megatron_ssm.model.adapters import merge_lora
from megatron_ssm.spec.fields import hf_shapes
from megatron_ssm.spec.reader import QUANTIZATION, FieldReader
from megatron_ssm.spec.stack import Stack

from .deepspeed_files import hugging_face_tensors, is_deepspeed
from .disk import os_errors_as
from .hf import load, save
from .hf_directory import (
    BIN,
    BIN_INDEX,
    FILE_BYTES,
    INDEX,
    WEIGHTS,
    Writer,
    file_plan,
    match_tensors,
    open_tensors,
    weight_files,
)
from .peft import check_lora, load_lora
from .quantized_files import BFLOAT16, write_quantized
from .quantized_files import FILE_BYTES as QUANTIZED_BYTES
from .shards import new_file

STATE_SPACES_EMBEDDING, HF_EMBEDDING, HEAD = "backbone.embedding.weight", "backbone.embeddings.weight", "lm_head.weight"
EPSILON = 1e-5  # of every norm in state-spaces' models

# {family: {field of state-spaces' `ssm_cfg`: (Hugging Face's name, state-spaces' default)}}
_SSM = {
    "mamba": dict(
        d_state=("state_size", 16), d_conv=("conv_kernel", 4), expand=("expand", 2), dt_rank=("time_step_rank", "auto"),
        dt_min=("time_step_min", 0.001), dt_max=("time_step_max", 0.1), dt_init_floor=("time_step_floor", 1e-4),
        conv_bias=("use_conv_bias", True), bias=("use_bias", False),
    ),
    "mamba2": dict(
        d_state=("state_size", 128), d_conv=("conv_kernel", 4), expand=("expand", 2), headdim=("head_dim", 64),
        ngroups=("n_groups", 1), dt_min=("time_step_min", 0.001), dt_max=("time_step_max", 0.1),
        dt_init_floor=("time_step_floor", 1e-4), conv_bias=("use_conv_bias", True), bias=("use_bias", False),
        dt_limit=("time_step_limit", (0.0, math.inf)), chunk_size=("chunk_size", 256),
    ),
}  # fmt: skip
# *_FIXED: fields without a counterpart in Hugging Face's classes, with the only supported value. _SSM_IRRELEVANT,
# _MODEL_KNOWN: fields that are ignored, or converted elsewhere.
_SSM_FIXED = dict(D_has_hdim=False, rmsnorm=True, norm_before_gate=False, d_ssm=None)
_SSM_IRRELEVANT = {"layer", "conv_init", "A_init_range", "use_mem_eff_path", "use_fast_path", "dt_init", "dt_scale"}
_MODEL_FIXED = dict(d_intermediate=0, rms_norm=True, attn_layer_idx=[], attn_cfg={})
_MODEL_KNOWN = {"d_model", "n_layer", "vocab_size", "ssm_cfg", "residual_in_fp32", "fused_add_norm",
                "pad_vocab_size_multiple", "tie_embeddings"}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A converted tensor, with its names before and after. A name is "" if its format does not store the copy of a tied
    tensor.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    dtype: str


def convert(
    source: str | Path, target: str | Path | None = None, file_bytes: int = FILE_BYTES, weights: str | None = None,
    lora: str | Path | None = None,
) -> list[Row]:  # fmt: skip
    """Convert a directory with a model into another format.

    A Hugging Face directory of a mamba or mamba2 model becomes a state-spaces directory, and the other way round; a
    checkpoint of DeepSpeed's becomes a Hugging Face directory. Tensors keep their dtype and bytes.

    Args:
        source: The directory to read.
        target: The directory to write, without a model in it. None: only check.
        file_bytes: The largest safetensors file to write.
        weights: "int8" or "int4" writes the matrices of a Hugging Face directory in 8 or 4 bits, for `load`, `generate` and
            `serve`; "bfloat16" writes an ordinary directory in bfloat16 (see `quantized_files`).
        lora: A directory of LoRA adapters to merge into the weights of a Hugging Face directory. Not with `weights`.

    Returns:
        One row per tensor.

    Raises:
        ValueError: Something has no counterpart, or files are damaged. Nothing is written.
        FileNotFoundError: A file does not exist. Nothing is written.
        Failure: The target cannot be written. Nothing of what was written is left.
    """
    check_directory(source)
    source = Path(source)
    if target is not None:
        _check_target(Path(target))
    if lora is not None and weights is not None:
        raise ValueError(f"lora={lora} and weights={weights!r}: convert with lora first, and the result with weights")
    if lora is not None:
        return _to_merged(source, target, lora, file_bytes)
    if weights is not None:
        return _to_quantized(source, target, weights, file_bytes)
    if is_deepspeed(source) and not weight_files(source):
        return _from_deepspeed(source, target, file_bytes)
    raw = read_json(source)
    if isinstance(raw, dict) and "d_model" in raw and "model_type" not in raw:
        return _to_hugging_face(source, raw, target, file_bytes)
    return _to_state_spaces(source, families.from_dict(raw), target)


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is not a directory")
    held = [name for name in ("config.json", WEIGHTS, INDEX, BIN, BIN_INDEX) if (target / name).exists()]
    if held:
        raise ValueError(f"{target} already holds a model ({held[0]}); name another directory")


def hugging_face_config(raw: dict[str, Any]) -> dict[str, Any]:
    """state-spaces' config.json as Hugging Face's; ValueError for a field or value that has no counterpart."""
    raw = _without_nulls(raw)
    ssm = raw.get("ssm_cfg") or {}
    layer = (ssm.get("layer") or "Mamba1") if isinstance(ssm, dict) else ssm
    family = {"Mamba1": "mamba", "Mamba2": "mamba2"}.get(str(layer))
    if family is None:
        raise ValueError(f"config.json: ssm_cfg.layer={layer!r} is not supported (supported: Mamba1, Mamba2)")
    ssm = _without_nulls(ssm)
    _check_fields(raw, _MODEL_FIXED, _MODEL_KNOWN, "")
    _check_fields(ssm, _SSM_FIXED, {*_SSM[family], *_SSM_IRRELEVANT}, "ssm_cfg.")
    multiple = raw.get("pad_vocab_size_multiple", 8)
    sizes = {name: raw.get(name) for name in ("d_model", "n_layer", "vocab_size")}
    sizes |= {"pad_vocab_size_multiple": multiple}
    sizes |= {f"ssm_cfg.{name}": ssm[name] for name in ("expand", "headdim") if name in ssm}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"config.json: {name}={size!r} must be a positive integer")
    config = {
        "architectures": ["MambaForCausalLM" if family == "mamba" else "Mamba2ForCausalLM"],
        "model_type": family,
        "vocab_size": -(-raw["vocab_size"] // multiple) * multiple,
        "hidden_size": raw["d_model"],
        "num_hidden_layers": raw["n_layer"],
        "layer_norm_epsilon": EPSILON,
        "residual_in_fp32": raw.get("residual_in_fp32", True),
        "tie_word_embeddings": raw.get("tie_embeddings", True),
        **{f"{name}_token_id": 0 for name in ("bos", "eos", "pad")},  # of GPT-NeoX's tokenizer, which these models use
        **{hf: ssm.get(name, default) for name, (hf, default) in _SSM[family].items()},
    }
    if family == "mamba2":
        inner = int(config["expand"] * config["hidden_size"])
        config["num_heads"] = inner // config["head_dim"]
        limit = FieldReader(families.FAMILIES[family], config).limits("time_step_limit")
        config["time_step_limit"] = [{"__float__": "Infinity"} if x == math.inf else x for x in limit]
    return config


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def state_spaces_config(config: Stack) -> dict[str, Any]:
    """A configuration as state-spaces' config.json; ValueError for a family or value that has no counterpart."""
    if config.family not in _SSM:
        raise ValueError(f"state-spaces' code has no {config.family} models (it has {' and '.join(_SSM)})")
    if config.norm_eps != EPSILON:
        raise ValueError(
            f"layer_norm_epsilon={config.norm_eps} has no counterpart in state-spaces' code, which uses {EPSILON}"
        )
    mixer: Any = config.layers[0][0].operators[0].spec
    low, high, floor = mixer.dt_range
    values = dict(
        d_state=mixer.state_size, d_conv=mixer.conv_kernel, dt_min=low, dt_max=high, dt_init_floor=floor,
        conv_bias=mixer.conv_bias, bias=mixer.bias, dt_rank=getattr(mixer, "dt_rank", None),
        headdim=getattr(mixer, "head_dim", None), ngroups=getattr(mixer, "groups", None),
        dt_limit=getattr(mixer, "dt_limit", None), chunk_size=config.raw.get("chunk_size", 256),
        expand=_expand(mixer.channels, config.hidden_size),
    )  # fmt: skip
    ssm = {"layer": "Mamba2" if hasattr(mixer, "groups") else "Mamba1"}
    automatic = math.ceil(config.hidden_size / 16)
    for name, (_, default) in _SSM[config.family].items():
        if values[name] != (automatic if default == "auto" else default):
            ssm[name] = values[name]
    return dict(
        d_model=config.hidden_size, d_intermediate=0, n_layer=config.num_layers, vocab_size=config.vocab_size, ssm_cfg=ssm,
        attn_layer_idx=[], attn_cfg={}, rms_norm=True, residual_in_fp32=config.residual_in_fp32, fused_add_norm=True,
        pad_vocab_size_multiple=1, tie_embeddings=config.tie_embeddings,
    )  # fmt: skip


def _expand(inner: int, hidden: int) -> int:
    """state-spaces' `expand`, an integer by which it multiplies the hidden size."""
    if inner % hidden:
        raise ValueError(
            f"{inner} channels are not a multiple of hidden_size={hidden} ({inner} % {hidden} = {inner % hidden})"
        )
    return inner // hidden


def _check_fields(values: dict[str, Any], supported: dict[str, Any], known: Iterable[str], prefix: str) -> None:
    """ValueError for a field that is unknown, or one of `supported` ({field: its only value}) that has another value."""
    for name, value in values.items():
        if name not in known and (name not in supported or value != supported[name]):
            only = f" (only {supported[name]!r})" if name in supported else ""
            raise ValueError(f"config.json: {prefix}{name}={value!r} has no counterpart in Hugging Face's format{only}")


def _to_hugging_face(source: Path, raw: dict[str, Any], target: str | Path | None, file_bytes: int) -> list[Row]:
    config_json = hugging_face_config(raw)
    config = families.from_dict(config_json)
    with ExitStack() as stack:
        slices = open_tensors(source, stack)
        names = match_tensors(config, slices, source)
        tensors = {hf: slices[name][:] for hf, name in names.items()}
        rows = [_row(name, hf, tensors[hf]) for hf, name in names.items()]
        rows += [_row(name, "", slices[name][:]) for name in sorted(slices.keys() - set(names.values()))]  # tied
        if target is not None:
            dtype = str(tensors[HF_EMBEDDING].dtype).removeprefix("torch.")
            with _writer(target) as writer:
                writer.close({**config_json, "dtype": dtype}, source, _write_files(writer, tensors, file_bytes))
    return rows


def _from_deepspeed(source: Path, target: str | Path | None, file_bytes: int) -> list[Row]:
    """`convert` from DeepSpeed's files; config.json is in the same folder or in its parent."""
    directory = source if (source / "config.json").is_file() else source.parent
    config = families.from_dict(read_json(directory))
    found = hugging_face_tensors(source, config)
    if target is not None:
        dtype = str(next(iter(found.values()))[1].dtype).removeprefix("torch.")
        written = {hf: tensor for hf, (_, tensor) in found.items()}
        with _writer(target) as writer:
            writer.close(config.to_dict(dtype), directory, _write_files(writer, written, file_bytes))
    return [_row(names, hf, tensor) for hf, (names, tensor) in found.items()]


def _to_quantized(source: Path, target: str | Path | None, weights: str, file_bytes: int) -> list[Row]:
    """`convert` from a Hugging Face directory to one with quantized matrices, or in bfloat16."""
    formats = (*QUANTIZATION, BFLOAT16)
    if weights not in formats:
        raise ValueError(f"unknown weights={weights!r}: expected {' or '.join(formats)}")
    with os_errors_as(f"cannot save to {target}", Failure):
        rows = write_quantized(
            source, None if target is None else Path(target), weights, min(file_bytes, QUANTIZED_BYTES)
        )
    return [Row(name, name, shape, kind) for name, shape, kind in rows]


def _to_merged(source: Path, target: str | Path | None, lora: str | Path, file_bytes: int) -> list[Row]:
    """`convert` from a Hugging Face directory and adapters to a Hugging Face directory; target None: only check."""
    check_lora(families.read(source), lora)
    model = load(source, dtype="auto")
    load_lora(model, lora)
    merge_lora(model)
    dtype = str(model.dtype).removeprefix("torch.")
    if target is not None:
        with os_errors_as(f"cannot save to {target}", Failure):
            save(model, target, file_bytes, left_out=True)
    return [Row(hf, hf, shape, dtype) for hf, shape in hf_shapes(model.config.fields()).items()]


def _to_state_spaces(source: Path, config: Stack, target: str | Path | None) -> list[Row]:
    config_json = state_spaces_config(config)
    with ExitStack() as stack:
        slices = open_tensors(source, stack)
        names = match_tensors(config, slices, source)
        tensors = {hf: slices[name][:] for hf, name in names.items()}
        rows = [
            _row(name, STATE_SPACES_EMBEDDING if hf == HF_EMBEDDING else hf, tensors[hf]) for hf, name in names.items()
        ]
        state = {row.target: tensor for row, tensor in zip(rows, tensors.values(), strict=True)}
        if config.tie_embeddings:  # state-spaces' code reads both names
            rows.append(_row("", HEAD, state[STATE_SPACES_EMBEDDING]))
            state[HEAD] = state[STATE_SPACES_EMBEDDING]
        if target is not None:
            with _writer(target) as writer:
                with new_file(writer.hidden / BIN) as file:
                    torch.save(state, file)
                writer.close(config_json, source, {})
    return rows


def _row(source: str, target: str, tensor: torch.Tensor) -> Row:
    return Row(source, target, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _write_files(writer: Writer, tensors: dict[str, torch.Tensor], file_bytes: int) -> dict[str, str]:
    """Write Hugging Face tensors in files of at most `file_bytes`; returns {tensor: file}."""
    weight_map: dict[str, str] = {}
    plan = file_plan({name: tensor.nbytes for name, tensor in tensors.items()}, file_bytes)
    for file, names in tqdm(plan.items(), "writing", unit=" files", disable=None):  # None: only at a terminal
        writer.write(file, {name: tensors[name].contiguous() for name in names})
        weight_map.update(dict.fromkeys(names, file))
    return weight_map


@contextmanager
def _writer(target: str | Path) -> Iterator[Writer]:
    """An open writer; if the body raises, what it has written is removed.

    Failure if the target cannot be written, for instance because the disk is full.
    """
    writer = Writer(Path(target))
    with os_errors_as(f"cannot save to {target}", Failure):
        try:
            writer.open()
            yield writer
        finally:
            writer.abandon()
