"""A model for an evaluator, on one rank or several: log-likelihoods of texts, and generated texts.

An evaluator is a separate program that runs in one process. With several tensor-parallel ranks, this process is rank 0. It
starts the other ranks, and writes its requests as lines of JSON to their standard input.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commfabric.foundation.launcher import launched_ranks
from megatron_ssm.checkpoints.hf import dtype_of, load
from megatron_ssm.engine.engine import Engine
from megatron_ssm.engine.sampling import log_probabilities
from megatron_ssm.model.model import Model
from megatron_ssm.parallel.groups import TIMEOUT, device_of_rank, replicas, shut_down
from megatron_ssm.parallel.local_launch import GRACE_S, environment_of_rank, start_rank

MODULE = "megatron_ssm.integrations.evaluation_ranks"  # this module; its __name__ as a program is __main__
DEFAULT_BATCH = 8
SCORED = 256  # the number of positions whose log-probabilities are computed at once, to limit memory


@torch.no_grad()
def log_likelihoods(
    model: Model, sequences: Sequence[Sequence[int]], counts: Sequence[int], batch_size: int
) -> list[tuple[float, bool]]:
    """(log-likelihood in nats, True if greedy search gives the same tokens) of the last counts[i] tokens of each sequence.

    The results are the same on every rank. Sends the messages of the model and of `log_probabilities`. A call of the model
    reads `batch_size` sequences, the longest ones first.
    """
    results = {i: (0.0, True) for i, count in enumerate(counts) if not count}  # an empty text is certain
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: -len(sequences[i]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        lengths = torch.tensor([len(sequences[i]) - 1 for i in rows])
        longest = int(lengths.max())
        mask = (torch.arange(longest) >= longest - lengths.unsqueeze(1)).long()  # (batch, longest), padded on the left
        ids = torch.zeros_like(mask)
        ids[mask.bool()] = torch.tensor([token for i in rows for token in sequences[i][:-1]])
        keep = max(counts[i] for i in rows)
        local = model.local_logits(ids.to(model.device), mask.to(model.device), None, logits_to_keep=keep)
        for i, logits in zip(rows, local, strict=True):
            results[i] = _log_likelihood(
                model, logits[keep - counts[i] :], sequences[i][len(sequences[i]) - counts[i] :]
            )
    return [results[i] for i in range(len(sequences))]


def _log_likelihood(model: Model, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[float, bool]:
    """(log-likelihood, is greedy) of tokens, from this rank's logits (tokens, width) at their positions."""
    targets, total, is_greedy = torch.tensor(tokens), 0.0, True
    for part, ids in zip(logits.split(SCORED), targets.split(SCORED), strict=True):
        for token, (value, best) in zip(ids.tolist(), log_probabilities(part, ids, 1, model.ranks), strict=True):
            total, is_greedy = total + value, is_greedy and best[0][0] == token
    return total, is_greedy


def continuations(model: Model, requests: Sequence[dict[str, Any]], batch_size: int) -> list[list[int]]:
    """The new tokens of each request (the arguments of `Engine.add`); `batch_size` requests are decoded together."""
    engine = Engine(model, slots=batch_size)
    running = [engine.add(**arguments) for arguments in requests]
    while engine.is_busy:
        engine.step()
    return [request.tokens for request in running]


JOBS: dict[str, Callable[..., Any]] = {"log_likelihoods": log_likelihoods, "continuations": continuations}


class EvaluatedModel:
    """A checkpoint on `tp` ranks: the ranks of a launcher, or this process and others that it starts.

    Args:
        directory: The directory of the checkpoint.
        tp: The number of tensor-parallel ranks.
        options: JSON-serializable options of `load`: dtype (a name), device ("cpu" or "cuda"), reduce, weights.

    Raises:
        ValueError, OSError: The checkpoint cannot be loaded. The other ranks exit.
    """

    def __init__(self, directory: str | Path, tp: int = 1, **options: Any):
        self._others: list[subprocess.Popen] = []
        atexit.register(self.close)
        if tp > 1 and launched_ranks() == 1 and not dist.is_initialized():
            self._folder = tempfile.TemporaryDirectory(prefix="megatron-ssm-")  # accessible to this user only
            arguments = [f"file://{self._folder.name}/store", str(directory), json.dumps(options)]
            for rank in range(1, tp):
                self._others.append(start_rank(MODULE, arguments, rank, tp, stdin=subprocess.PIPE, text=True))
            os.environ.update({k: v for k, v in environment_of_rank(0, tp).items() if k.startswith("GLOO")})
            _join(arguments[0], 0, tp, options)
        self.model = _load(directory, tp, options)

    def run(self, job: str, **arguments: Any) -> Any:
        """The result of a function in JOBS, which all ranks call together. arguments: its JSON-serializable arguments."""
        for process in self._others:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
            process.stdin.flush()
        return JOBS[job](self.model, **arguments)

    def close(self) -> None:
        """Stop the other ranks, and release shared resources."""
        atexit.unregister(self.close)
        if hasattr(self, "model"):
            self.model.close()
        for process in self._others:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._others:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._others:
            self._others = []
            shut_down(wait=False)


# Arguments of an evaluator


def batch_size_of(value: Any) -> int:
    """The batch size for an integer or its text; DEFAULT_BATCH for None, "auto" and lm-eval's "auto:N".

    Raises ValueError for other values.
    """
    text = str(value)
    if value is None or text.partition(":")[0] == "auto":
        return DEFAULT_BATCH
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"batch_size={value} must be auto or an integer of at least 1")
    return int(text)


def check_integer(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value} must be an integer of at least 1")


def check_switch(name: str, value: Any) -> None:
    if value is not None and type(value) is not bool:
        raise ValueError(f"{name}={value} must be True or False")


# The ranks


def _join(store: str, rank: int, world: int, options: dict[str, Any]) -> None:
    backend = "nccl" if options["device"] == "cuda" else "gloo"
    dist.init_process_group(backend, store, TIMEOUT, rank=rank, world_size=world)


def _load(directory: str | Path, tp: int, options: dict[str, Any]) -> Model:
    groups = replicas(tp, options["device"])
    return load(
        directory, groups.tensor, None, dtype_of(options["dtype"]), device_of_rank(options["device"]),
        options["reduce"], weights=options["weights"],
    )  # fmt: skip


def _serve(store: str, directory: str, options: str) -> None:
    """Run the jobs that rank 0 sends, until it exits. This is the main program of the other ranks."""
    settings, world = json.loads(options), launched_ranks()
    _join(store, int(os.environ["RANK"]), world, settings)
    with _load(directory, world, settings) as model:
        for line in sys.stdin:
            arguments = json.loads(line)
            try:
                JOBS[arguments.pop("job")](model, **arguments)
            except ValueError:
                continue  # rank 0 reports the same error
    shut_down(wait=False)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
