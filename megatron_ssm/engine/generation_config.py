"""generation_config.json: the tokens that end a text, and how the model's authors sample from it. Does not import torch."""

from pathlib import Path
from typing import Any

from commfabric.foundation.json_files import read_json

# Fields that are defaults of `serve` and `chat`.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_generation_config(directory: str | Path) -> dict[str, Any]:
    """The fields of directory/generation_config.json that are not null; {} without the file. ValueError names a bad file."""
    path = Path(directory) / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    return {name: value for name, value in values.items() if value is not None}


def sampling_defaults(directory: str | Path) -> dict[str, Any]:
    """The fields SAMPLING of directory/generation_config.json, as parameters of a request to the server.

    `do_sample: false` is greedy search, temperature 0. ValueError names the file and a value that is out of range.
    """
    from .options import GenerationOptions

    values = read_generation_config(directory)
    found = {name: values[name] for name in SAMPLING if name in values}
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    if found.get("top_k") in (0, -1):  # off, for transformers and for other engines
        del found["top_k"]
    try:
        GenerationOptions(**found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{Path(directory) / 'generation_config.json'}: {error}") from None
    return found
