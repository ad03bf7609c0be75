"""Directories that hold LoRA adapters and not a model."""

from pathlib import Path

from commfabric.foundation.json_files import read_json


def adapters_in(directory: Path) -> str:
    """The end of an error about a missing config.json that names the model of LoRA adapters; "" if there are none."""
    try:
        base = read_json(directory / "adapter_config.json")["base_model_name_or_path"]
    except (OSError, ValueError, KeyError):
        return ""
    return f"; {directory} holds LoRA adapters of the model {base}: give that model, and --lora {directory}"
