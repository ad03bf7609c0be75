"""The speed of a run: its share of the devices' peak, and a trace that Perfetto and chrome://tracing show."""

import contextlib
import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from commfabric.collectives.agreement import on_first
from megatron_ssm.checkpoints.disk import in_one_line
from megatron_ssm.model.adapters import adapter_parameters
from megatron_ssm.model.flops import known_peak, training_flops
from megatron_ssm.model.model import Model

from .options import Options


def utilization(options: Options, model: Model, ranks: int) -> float:
    """The share of the peak of all ranks' devices that one token per second is; 0 if the peak is not known."""
    peak: float | None = options.peak_tflops
    if not peak and options.bf16 and model.device.type == "cuda":
        peak = known_peak(torch.cuda.get_device_name(model.device))
    adapters = sum(math.prod(field.shape) for field, _ in adapter_parameters(model))
    return training_flops(model.config, options.seq_length, adapters) / (peak * 1e12 * ranks) if peak else 0.0


class Profiler:
    """Records the steps from --profile-step-start to --profile-step-end on rank 0, and writes the trace to --profile.

    It ends with the run, if that ends earlier; the name of the file says which steps it has. All ranks call it together.
    Failure on every rank if rank 0 cannot write the trace. start: the step after which the run begins.
    """

    def __init__(self, options: Options, rank: int, start: int = 0):
        self._first = max(options.profile_step_start, start + 1)
        self._last = min(options.profile_step_end, options.train_iters)
        self._folder = Path(options.profile) if options.profile else None
        self._records = self._folder is not None and rank == 0 and self._first <= self._last
        self._profile: torch.profiler.profile | None = None
        self._recorded = 0  # the last step in the trace

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run a step in this block."""
        if self._records and step == self._first:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profile.start()
        yield
        self._recorded = step
        if step == self._last:
            self.close()

    def close(self) -> None:
        if self._folder is not None:
            on_first(in_one_line(f"cannot write to --profile {self._folder}")(self._write), dist.group.WORLD)

    def _write(self) -> None:
        """OSError if the disk is full; then nothing of the trace remains, and an earlier file stays."""
        if self._profile is None or self._folder is None:
            return
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-{self._first}-{self._recorded}.json"
        hidden = path.with_name(f".{path.name}")
        try:
            hidden.touch()  # an OSError, where the profiler would only warn
            self._profile.export_chrome_trace(str(hidden))
            if not hidden.read_bytes().rstrip().endswith(b"}"):  # the profiler does not say so
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
            hidden.with_name(f"{hidden.name}.tmp").unlink(missing_ok=True)  # the profiler writes to it, and renames it
        self._profile = None
