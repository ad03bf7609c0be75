"""What people watch besides the log: TensorBoard and Weights & Biases. Rank 0 writes them."""

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .options import Options, flag


def check_trackers(options: Options) -> None:
    """ValueError if a package that the options need is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(options, name) and importlib.util.find_spec(name) is None:
            raise ValueError(f"{flag(name)} needs the package {name}: pip install 'megatron-ssm[log]'")


class Trackers:
    """The trackers that the options ask for. OSError if one cannot write.

    start: the step after which the run begins. TensorBoard then hides later steps that were written to the directory before.
    Weights & Biases continues the run of before, whose id is in OUT/wandb/run-id; a run that begins at 0 is a new one.
    """

    def __init__(self, options: Options, start: int):
        self._tensorboard: Any = None
        self._wandb: Any = None
        if options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(options.tensorboard, purge_step=start + 1)
        if options.wandb:
            self._wandb = _wandb_run(options, Path(options.out, "wandb", "run-id"), start)

    def write(self, line: dict[str, Any]) -> None:
        """Write the numbers of a logged step, which are those of the log."""
        values = {name: value for name, value in line.items() if name != "step" and value is not None}
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, line["step"])
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=line["step"])

    def close(self) -> None:
        """Write what is left."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _wandb_run(options: Options, id_file: Path, start: int) -> Any:
    """The run of Weights & Biases that `id_file` names, if it continues after step `start`, else a new one."""
    import wandb

    known = id_file.read_text(encoding="utf-8", errors="replace").strip() if start and id_file.is_file() else None
    try:  # its environment variables say to whom it sends, or that it does not (WANDB_MODE=offline)
        run = wandb.init(
            project=options.wandb, dir=options.out, config=asdict(options), id=known or None, resume="allow"
        )
    except wandb.Error as error:
        raise OSError(f"Weights & Biases: {error}") from None
    id_file.parent.mkdir(exist_ok=True)
    id_file.write_text(run.id, encoding="utf-8")
    return run
