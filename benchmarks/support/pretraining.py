"""Training speed of examples/pretrain.py."""

import json
import sys
from pathlib import Path
from typing import Any

from .cells import ROOT, torchrun

sys.path.insert(0, str(ROOT / "examples"))
from corpus import write_corpus  # noqa: E402


def write_text(folder: Path) -> Path:
    """Write the demo's training text below `folder`; returns the folder with its files."""
    return write_corpus(folder / "text", extra=False)[0][0].parent


def tokens_per_s(ranks: int, text: Path, folder: Path, steps: int, env: dict[str, str], **options: Any) -> float:
    """The tokens per second in the second half of a run of `steps` steps.

    text: folder of the training text. folder: for the run's files. env: added environment variables. options: of
    `train.options.Options`, and config, a YAML file.
    """
    log = folder / "log.jsonl"
    options |= dict(data=text, out=folder / "out", log=log, train_iters=steps, log_interval=steps // 2)
    flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), value)]
    torchrun(ranks, ROOT / "examples" / "pretrain.py", *flags, env=env, quiet=True)
    return json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["tokens_per_s"]
