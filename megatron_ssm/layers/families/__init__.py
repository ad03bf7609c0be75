"""The families of models, one file each: a config.json becomes a stack, with the names of tensors in files.

In: a Hugging Face config.json. Out: a `Stack`. `register` adds a family from outside; no other module names a family.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from commfabric.foundation import json_files
from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Stack

from .bamba import BAMBA
from .falcon_h1 import FALCON_H1
from .falcon_mamba import FALCON_MAMBA
from .granitemoehybrid import GRANITE
from .jamba import JAMBA
from .mamba import MAMBA
from .mamba2 import MAMBA2
from .nemotron_h import NEMOTRON_H
from .olmo_hybrid import OLMO_HYBRID
from .qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from .zamba import ZAMBA
from .zamba2 import ZAMBA2

_ALL = (
    MAMBA, FALCON_MAMBA, MAMBA2, ZAMBA, ZAMBA2, NEMOTRON_H, GRANITE, BAMBA, FALCON_H1, JAMBA, QWEN3_5, QWEN3_5_TEXT,
    QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_NEXT, OLMO_HYBRID,
)  # fmt: skip
# organization/name, and not a path to a file
HUB_ID = re.compile(r"\w[\w.-]*/(?!.*\.(json|safetensors|bin)$)\w[\w.-]*", re.ASCII)
FAMILIES: dict[str, Family] = {each.name: each for each in _ALL}


def register(family: Family) -> None:
    """Add a family, or replace the family of this name, so that directories with this model_type can be loaded."""
    FAMILIES[family.name] = family


def family_of(raw: object) -> Family:
    """The family of a config.json; ValueError if its model_type is not registered."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"config.json must be an object, not {type(raw).__name__}")
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        hint = ""
        if "d_model" in raw:
            hint = "; it looks like state-spaces' own: python -m megatron_ssm convert translates those"
        raise ValueError(f"model type {name!r} is not supported (supported: {', '.join(FAMILIES)}){hint}")
    return FAMILIES[name]


def from_dict(raw: Mapping[str, Any]) -> Stack:
    """The stack of a Hugging Face config.json. Fields that are null count as missing.

    ValueError if a field has a wrong type, an unsupported value, or one that contradicts other fields.
    """
    family = family_of(raw)
    if family.nested is not None:
        return from_dict(family.nested.fields(raw))
    fields = {name: value for name, value in raw.items() if value is not None}
    family.check_supported(fields)
    named = {} if "architectures" in fields or not family.architecture else {"architectures": [family.architecture]}
    return replace(family.read(FieldReader(family, fields, raw.keys() - fields.keys())), raw={**raw, **named})


def read(directory: str | Path) -> Stack:
    """The stack of `directory`/config.json, or of the JSON file at this path. Raises like `read_json` and `from_dict`."""
    return from_dict(read_json(directory))


def read_json(directory: str | Path) -> Any:
    """The content of `directory`/config.json, or of the JSON file at this path.

    FileNotFoundError or ValueError, with one line, if the file does not exist or is not JSON.
    """
    path = Path(directory)
    if not path.is_file() or path.suffix == ".gguf":
        check_directory(directory)
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no model configuration: {path} does not exist{_adapters_in(path.parent)}")
    return json_files.read_json(path)


def _adapters_in(directory: Path) -> str:
    """The end of an error about a missing config.json that names the model of LoRA adapters; "" if there are none."""
    try:
        base = json_files.read_json(directory / "adapter_config.json")["base_model_name_or_path"]
    except (OSError, ValueError, KeyError):
        return ""
    return f"; {directory} holds LoRA adapters of the model {base}: give that model, and --lora {directory}"


def check_directory(model: str | Path) -> None:
    """FileNotFoundError or ValueError, which says what to give instead, unless `model` is a directory."""
    path = Path(model)
    if path.is_dir():
        return
    if path.suffix == ".gguf":
        raise ValueError(f"{model}: GGUF files cannot be read yet; give a Hugging Face directory with safetensors")
    if path.exists():
        raise ValueError(f"{model} is a file; give its directory, {path.parent}")
    if HUB_ID.fullmatch(str(model)) and not path.parent.exists():
        raise FileNotFoundError(f"{model} is not a directory; to fetch it: hf download {model} --local-dir {path.name}")
    raise FileNotFoundError(f"{model} does not exist")


def read_for_ranks(model: str, ranks: int, experts: int = 1) -> Stack:
    """The stack of --model DIR; a one-line ValueError unless `ranks` tensor-parallel ranks can split the model.

    experts: The number of expert-parallel ranks, over which its experts must divide.
    """
    check_directory(model)
    stack = read(model)
    stack.check_ranks(ranks, experts)
    return stack
