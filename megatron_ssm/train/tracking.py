"""The trackers beside the log: TensorBoard and Weights & Biases. Rank 0 writes them."""

import importlib.util
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commfabric.foundation.command_line import first_line
from megatron_ssm.checkpoints.disk import in_one_line

from .options import Options, flag

FINISH_TIMEOUT_S = 60.0  # how long Weights & Biases may send what is left when a run ends


def check_trackers(options: Options) -> None:
    """ValueError if a package that the options need is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(options, name) and importlib.util.find_spec(name) is None:
            raise ValueError(f"{flag(name)} needs the package {name}: pip install {name}")


class Trackers:
    """The trackers that the options ask for. Failure, with the option's name, if one cannot begin or TensorBoard fails.

    report: prints a line about an error of Weights & Biases, after which the run goes on: its service may fail at any time.
    """

    def __init__(self, options: Options, report: Callable[[str], object]):
        self._options, self._report = options, report
        self._tensorboard: Any = None
        self._wandb: Any = None

    def begin(self, start: int) -> None:
        """The run begins after step `start`.

        TensorBoard then hides later steps that were written to the directory before. Weights & Biases continues the
        earlier run, whose id is in OUT/wandb/run-id; a run that begins at 0 is a new one.
        """
        options = self._options
        if options.wandb:  # first: if it cannot begin, TensorBoard has hidden nothing
            with in_one_line("cannot write to --wandb"):
                self._wandb = _wandb_run(options, Path(options.out, "wandb", "run-id"), start)
        if options.tensorboard:
            with in_one_line(f"cannot write to --tensorboard {options.tensorboard}"):
                from torch.utils.tensorboard import SummaryWriter

                threading.excepthook = _without_tensorboard(threading.excepthook)
                self._tensorboard = SummaryWriter(options.tensorboard, purge_step=start + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Write the numbers of a logged step: the same as in the log."""
        values = {name: value for name, value in line.items() if name != "step" and value is not None}
        if self._tensorboard is not None:
            with in_one_line(f"cannot write to --tensorboard {self._options.tensorboard}"):
                for name, value in values.items():
                    self._tensorboard.add_scalar(name, value, line["step"])
                self._tensorboard.flush()
        self._call_wandb(lambda run: run.log({"step": line["step"], **values}), f"logs nothing of step {line['step']}")

    def close(self) -> None:
        """Write what is left. Weights & Biases has FINISH_TIMEOUT_S seconds for it, or WANDB_FINISH_TIMEOUT if it is set."""
        if self._tensorboard is not None:
            with in_one_line(f"cannot write to --tensorboard {self._options.tensorboard}"):
                self._tensorboard.close()
        self._call_wandb(lambda run: run.finish(), "cannot finish")

    def _call_wandb(self, action: Callable[[Any], object], failure: str) -> None:
        """Let its run do something, if there is one; an error is reported."""
        if self._wandb is None:
            return
        try:
            action(self._wandb)
        except Exception as error:  # its own errors, and those of its service process, are of many kinds
            self._report(f"--wandb: Weights & Biases {failure}: {first_line(error)}")


def _without_tensorboard(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """A threading.excepthook that is silent about the threads of TensorBoard's writer.

    A writer whose thread cannot write raises the thread's error when it is called the next time.
    """

    def report(what: Any) -> None:
        if not type(what.thread).__module__.startswith("tensorboard."):
            hook(what)

    return report


def _wandb_run(options: Options, id_file: Path, start: int) -> Any:
    """The run of Weights & Biases that `id_file` names, if it continues after step `start`, else a new one."""
    import wandb

    known = id_file.read_text(encoding="utf-8", errors="replace").strip() if start and id_file.is_file() else None
    more: dict[str, Any] = {}
    if "WANDB_FINISH_TIMEOUT" not in os.environ and "finish_timeout" in getattr(wandb.Settings, "model_fields", {}):
        more["settings"] = wandb.Settings(finish_timeout=FINISH_TIMEOUT_S)
    try:  # its environment variables say to whom it sends, or that it does not (WANDB_MODE=offline)
        run = wandb.init(
            project=options.wandb, name=options.wandb_exp_name or None, dir=options.out, config=asdict(options),
            id=known or None, resume="allow", **more,
        )  # fmt: skip
        run.define_metric("*", step_metric="step")  # its own axis never goes back, as steps do after a fault
    except wandb.Error as error:
        raise OSError(f"Weights & Biases: {error}") from None
    except ValueError as error:
        raise OSError(f"Weights & Biases: {_wrong_setting(error)}") from None
    id_file.parent.mkdir(exist_ok=True)
    id_file.write_text(run.id, encoding="utf-8")
    return run


def _wrong_setting(error: Any) -> str:
    """pydantic's error about a setting in one line: its variable, its value, and what it must be."""
    if not hasattr(error, "errors"):  # another ValueError
        return first_line(error)
    first = error.errors()[0]
    name = "_".join(map(str, first["loc"]))
    variable = f"WANDB_{name.upper()}"
    return f"{variable if variable in os.environ else name}={first['input']!r}: {first['msg']}"
