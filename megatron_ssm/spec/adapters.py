"""Directories that hold LoRA adapters and not a model."""

import json
from pathlib import Path


def adapters_in(directory: Path) -> str:
    """The end of an error about a missing config.json that names the model of LoRA adapters; "" if there are none."""
    try:
        base = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f"; {directory} holds LoRA adapters of the model {base}: give that model, and --lora {directory}"
