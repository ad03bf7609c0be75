"""Reading JSON files, with one-line errors. Loads no torch."""

import json
from pathlib import Path
from typing import Any


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file, which may begin with a byte-order mark.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a JSON object. The message is one line, with the path and the reason.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object: it is of type {type(content).__name__}")
    return content
