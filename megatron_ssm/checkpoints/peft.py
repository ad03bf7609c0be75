"""LoRA adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors, which PEFT itself loads."""

import json
import math
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from commfabric.collectives.agreement import together
from commfabric.foundation.command_line import first_line
from commfabric.foundation.json_files import read_json
from megatron_ssm.model.adapters import adapter_parameters, attach_lora, remove_lora, share_parameters
from megatron_ssm.model.lora import NOT_TRAINED, Lora, lora_fields, lora_targets
from megatron_ssm.model.model import Model
from megatron_ssm.spec.fields import hf_shapes
from megatron_ssm.spec.stack import Stack

from .disk import HiddenFolder
from .hf import broadcast, gather, help_gather
from .hf_directory import open_safetensors
from .quantized_files import format_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Fields of adapter_config.json that change what an adapter computes, and the values that are implemented.
_SUPPORTED: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], {}, None),
    "layer_replication": ([], None),
    "init_lora_weights": (True, False, "gaussian", None),  # the others change the model's weights, too
    **{
        name: (False, [], {}, None)
        for name in (
            "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "monteclora_config", "kasa_config",
            "velora_config", "corda_config", "eva_config", "loftq_config", "lora_ga_config",
        )
    },
}  # fmt: skip


def save_lora(model: Model, directory: str | Path, base_model: str | None = None) -> None:
    """Write the adapters of a model to `directory`, as PEFT does; all ranks of the model and of its groups call it.

    Rank 0 of the first replica receives the other ranks' parts and writes two files, each under a temporary name first.

    Args:
        model: A model with adapters.
        directory: Where to write; it may exist.
        base_model: The base_model_name_or_path for PEFT (None: the directory that the model was loaded from).

    Raises:
        OSError: The files cannot be written; on every rank.
        ValueError: The model has no adapters; on every rank.
    """
    lora = model.lora
    if lora is None:
        raise ValueError("the model has no LoRA adapters: add_lora or load_lora makes them")
    tensors: dict[str, list] = {}
    for field, parameter in adapter_parameters(model):
        tensors.setdefault(field.hf, []).append(parameter)
    copies = model.copy_groups
    error = None
    if all(group is None or dist.get_rank(group) == 0 for group in copies):
        whole = {name: gather(model, name, parameters) for name, parameters in tensors.items()}
        if model.ranks.rank == 0:
            error = _write(Path(directory), whole, _configuration(model, lora, base_model))
        error = broadcast(error, model.ranks.group, model.device)
    else:
        help_gather(model, tensors)
    for group in copies:
        error = broadcast(error, group, model.device)
    if error:
        raise OSError(error)


def _configuration(model: Model, lora: Lora, base_model: str | None) -> dict[str, Any]:
    """PEFT's adapter_config.json. Its target modules are names of layers if all layers of these names have adapters."""
    targets = lora_targets(model.config)
    names = {targets[module].name for module in lora.modules}
    is_complete = len(lora.modules) == sum(target.name in names for target in targets.values())
    directory = None if model.directory is None else str(model.directory)
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model or directory,
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rank_stabilized, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(names) if is_complete else list(lora.modules), "inference_mode": True,
    }  # fmt: skip


def _write(directory: Path, tensors: dict[str, Any], configuration: dict[str, Any]) -> str | None:
    """Write both files, the configuration last; an error as one line."""
    try:
        hidden = HiddenFolder(directory)
        try:
            _write_files(hidden.path, tensors, configuration)
            for name in (WEIGHTS, CONFIG):
                os.replace(hidden.path / name, directory / name)
        finally:
            hidden.remove()
    except Exception as error:  # of any kind: the other ranks must learn of it
        return f"cannot save to {directory}: {first_line(error)}"
    return None


def _write_files(folder: Path, tensors: dict[str, Any], configuration: dict[str, Any]) -> None:
    """Write both files, with the permissions of new files."""
    for name in (WEIGHTS, CONFIG):
        (folder / name).touch()
    mode = (folder / WEIGHTS).stat().st_mode & 0o777
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(mode)
    (folder / CONFIG).write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")


def remove_adapters(directory: Path) -> None:
    """Remove what `save_lora` has written, the configuration first: without it, PEFT and transformers read no adapters."""
    for name in (CONFIG, WEIGHTS):
        (directory / name).unlink(missing_ok=True)


def check_lora(config: Stack, directory: str | Path) -> None:
    """Check that `load_lora` can load the adapters of a directory into a model of this configuration. Sends nothing.

    Raises:
        ValueError: The matrices of the model are stored quantized, or as for `load_lora`.
        FileNotFoundError: A file does not exist.
    """
    if held := format_of(config.raw):
        raise ValueError(f"{directory}: LoRA adapters need a model that is not quantized; its matrices are in {held}")
    with ExitStack() as stack:
        _open(config, Path(directory), stack)


def with_lora(model: Model, directory: str | Path) -> Model:
    """A model with the adapters of a directory that shares all other parameters with `model`, which has no adapters still.

    Both only generate: gradients of the shared parameters are switched off. An `Engine` takes several of them as `adapters`.
    See `share_parameters`, and `load_lora` for errors and messages.
    """
    adapted = share_parameters(model)
    load_lora(adapted, directory)
    return adapted


def load_lora(model: Model, directory: str | Path, trainable: bool = False) -> None:
    """Add the LoRA adapters that PEFT or `save_lora` wrote to a model; each rank reads its own slices.

    All ranks of the model and of its groups call it together. The groups compare twice, as in `load`.

    Args:
        model: A model without adapters.
        directory: With adapter_config.json and adapter_model.safetensors.
        trainable: Train the adapters (and nothing else), without dropout; those of dt_proj stay as they are, as in PEFT.

    Raises:
        ValueError: The files are damaged, or hold adapters of layers that the model does not have or of a kind that is not
            implemented; on every rank, with the model unchanged.
        FileNotFoundError: A file does not exist; likewise.
    """
    groups = (model.ranks.group, *model.copy_groups)
    with ExitStack() as stack:
        lora, tensors = together(
            lambda: _open(model.config, Path(directory), stack), groups, lambda opened: opened[0], model.device
        )
        attach_lora(model, lora)
        try:
            together(lambda: _fill(model, tensors, trainable), groups, device=model.device)
        except BaseException:
            remove_lora(model)
            raise


@torch.no_grad()
def _fill(model: Model, tensors: dict[str, Any], trainable: bool) -> None:
    for field, parameter in adapter_parameters(model):
        if parameter.numel():
            parameter.copy_(field.read(tensors[field.hf], model.ranks.rank, model.ranks.size))
        parameter.requires_grad_(trainable and f".{NOT_TRAINED}." not in field.name)


def _open(config: Stack, directory: Path, stack: ExitStack) -> tuple[Lora, dict[str, Any]]:
    """The adapters that the configuration describes, and {name: slice object} of the tensors, after all checks."""
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"no LoRA adapters: {path} does not exist")
    raw = read_json(path)
    for name, allowed in _SUPPORTED.items():
        if name in raw and raw[name] not in allowed:
            raise ValueError(f"{path}: {name}={raw[name]!r} is not implemented (only {allowed[0]!r})")
    for name, kinds in (("r", (int,)), ("lora_alpha", (int, float))):
        if type(raw.get(name)) not in kinds or not 0 < raw[name] < math.inf:
            raise ValueError(f"{path}: {name}={raw.get(name)!r} must be a positive and finite number")
    tensors = open_safetensors(directory / WEIGHTS, stack)
    lora = Lora(raw["r"], raw["lora_alpha"], _modules(config, directory, list(tensors)), bool(raw.get("use_rslora")))
    expected = hf_shapes(lora_fields(config, lora))
    for name, shape in expected.items():
        found = tuple(tensors[name].get_shape()) if name in tensors else "missing"
        if found != shape:
            raise ValueError(
                f"{directory / WEIGHTS}: {name} is {found}, and with r={lora.rank} the model needs {shape}"
            )
    return lora, tensors


def _modules(config: Stack, directory: Path, names: list[str]) -> tuple[str, ...]:
    """The layers that the tensors are for; ValueError for a layer that the model does not have."""
    targets, found = lora_targets(config), set()
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in targets:
            kinds = ", ".join(sorted({target.name for target in targets.values()}))
            raise ValueError(
                f"{directory / WEIGHTS}: {name} is not for a linear layer of this {config.family} model ({kinds})"
            )
        found.add(match[1])
    return tuple(module for module in targets if module in found)
