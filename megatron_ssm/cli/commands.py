"""The commands of `python -m megatron_ssm` that need torch."""

import json
import logging
import re
import shlex
import time
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commfabric.collectives.agreement import together
from commfabric.foundation.command_line import Failure, Printer
from commfabric.foundation.launcher import launched_ranks
from megatron_ssm.checkpoints.convert import STATE_SPACES_EMBEDDING, convert
from megatron_ssm.checkpoints.hf import dtype_of, load
from megatron_ssm.checkpoints.hf_directory import FLOATS, open_tensors, stored_bytes, weight_files
from megatron_ssm.checkpoints.peft import check_lora, load_lora
from megatron_ssm.checkpoints.quantized_files import SCALES
from megatron_ssm.engine.generation import stream
from megatron_ssm.engine.generation_config import sampling_defaults
from megatron_ssm.engine.text import TextStream, check_fits, load_tokenizer, read_chat_template, stop_tokens
from megatron_ssm.kernels.report import size_text
from megatron_ssm.layers.families import read_for_ranks
from megatron_ssm.model.context import schedule_of
from megatron_ssm.parallel.groups import (
    check_device,
    check_world,
    device_of_rank,
    join,
    replicas,
    shut_down,
)
from megatron_ssm.spec.stack import Stack

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from megatron_ssm import Model

log = logging.getLogger(__name__)


# generate


def generate(arguments: Namespace) -> None:
    """Run `generate` on every rank of the launcher, or alone; rank 0 prints.

    The ranks join before they read and compare their inputs, so that an input that some rank cannot read is one error on all
    ranks.
    """
    context, expert = arguments.cp, arguments.ep
    tensor = arguments.tp or max(1, launched_ranks() // (context * expert))
    check_world(tensor, launched_ranks(), context, expert)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        join(tensor, device, init_method=arguments.rendezvous, context=context, check=lambda: check_device(device),
             expert=expert)  # fmt: skip
        place = device_of_rank(device)
        inputs = together(lambda: _Inputs.read(arguments, tensor), [dist.group.WORLD], _Inputs.fingerprint, place)
        groups = replicas(tensor, device, context=context, expert=expert)
        schedule = None
        if groups.context is not None:
            schedule = schedule_of("auto", groups.context, inputs.config, tensor, len(inputs.prompt), 1, training=False)
        dtype = dtype_of(arguments.dtype)
        model = load(arguments.model, groups.tensor, schedule, dtype, place, arguments.reduce,
                     weights=arguments.weights, expert_group=groups.expert)  # fmt: skip
        with model:  # its CUDA graphs are released before the groups are destroyed
            if arguments.lora is not None:
                load_lora(model, arguments.lora)
            _generate_and_print(model, inputs, arguments, is_printing=groups.rank == 0)
    except FloatingPointError as error:
        raise Failure(str(error)) from None
    finally:
        shut_down()


@dataclass(frozen=True)
class _Inputs:
    """The inputs of `generate` other than the weights."""

    config: Stack
    tokenizer: "Tokenizer"
    prompt: list[int]
    stop_tokens: tuple[int, ...]
    hints: list[str]

    @classmethod
    def read(cls, arguments: Namespace, tensor_ranks: int) -> "_Inputs":
        """Read the inputs on this rank. ValueError or OSError if one is invalid."""
        directory = Path(arguments.model)
        config = read_for_ranks(arguments.model, tensor_ranks, arguments.ep)
        if arguments.lora is not None:
            check_lora(config, arguments.lora)
        tokenizer = load_tokenizer(directory)
        prompt = _prompt_ids(arguments, tokenizer, config)
        stops = () if arguments.ignore_eos else stop_tokens(directory, config, tokenizer)
        return cls(config, tokenizer, prompt, stops, _hints(arguments))

    def fingerprint(self) -> dict[str, object]:
        """The values that must be equal on all ranks."""
        return {"prompt": self.prompt, "stop tokens": self.stop_tokens, "config": self.config}


def _prompt_ids(arguments: Namespace, tokenizer: "Tokenizer", config: Stack) -> list[int]:
    if arguments.prompt_file is not None:
        name, data = arguments.prompt_file, Path(arguments.prompt_file).read_bytes()
    else:
        name, data = "--prompt", arguments.prompt.encode("utf-8", "surrogateescape")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start})") from None
    check_fits(tokenizer, config)
    if arguments.chat:
        text = _chat_text(arguments.model, text)
    ids = tokenizer.encode(text, add_special_tokens=not arguments.chat).ids
    if not ids:
        raise ValueError("the prompt is empty")
    return ids


def _chat_text(directory: str, message: str) -> str:
    """The text that the chat template makes of one message. ValueError if there is no template, or if it refuses."""
    from megatron_ssm.server.chat_template import ChatTemplate  # these need the extra serve
    from megatron_ssm.server.errors import ApiError

    template = ChatTemplate(directory)
    if template.path is None:
        raise ValueError(f"--chat: {directory} has no chat template; without --chat, the text is continued")
    try:
        return template.render([{"role": "user", "content": message}])
    except ApiError as error:
        raise ValueError(str(error)) from None


def _hints(arguments: Namespace) -> list[str]:
    """What the directory offers and the command line does not use: its chat template, and its settings of sampling."""
    hints = []
    try:
        sampling = sampling_defaults(arguments.model)
    except ValueError:  # of a value that is not used here
        sampling = {}
    if read_chat_template(arguments.model)[0] is not None and not arguments.chat:
        hints.append(
            "the model has a chat template: --chat applies it to the prompt; megatron-ssm chat DIR is a conversation"
        )
    if sampling.get("temperature") and all(getattr(arguments, name) is None for name in sampling):
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in sampling.items())
        hints.append(f"generation_config.json suggests {options}; without options, generate is greedy")
    return hints


@dataclass
class _Progress:
    """The tokens generated so far, with their pieces of the text, times in seconds, and the bytes sent until then."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of decoding steps; the first token comes from the prompt."""
        return len(self.tokens) - 1


def _generate_and_print(model: "Model", inputs: _Inputs, arguments: Namespace, is_printing: bool) -> None:
    """Generate, and print the text as it becomes certain, or one JSON object at the end."""
    text = TextStream(inputs.tokenizer, arguments.stop, inputs.stop_tokens, inputs.prompt)
    out = Printer(is_printing and not arguments.json)
    progress = _Progress()
    start = time.perf_counter()
    columns = stream(
        model, torch.tensor([inputs.prompt], device=model.device), None, arguments.max_new_tokens,
        arguments.temperature or 0.0, top_k=arguments.top_k, top_p=arguments.top_p, min_p=arguments.min_p,
        repetition_penalty=1.0 if arguments.repetition_penalty is None else arguments.repetition_penalty,
        stop_tokens=inputs.stop_tokens, stop_strings=arguments.stop, seed=arguments.seed,
    )  # fmt: skip
    log.info("\n".join([model.start_line, *inputs.hints]))  # after the last possible error
    for column in columns:
        progress.times.append(time.perf_counter())
        progress.sent.append(model.counter.nbytes)
        progress.tokens.append(int(column[0]))
        progress.pieces.append(text.push(progress.tokens[-1]))
        out.print(progress.pieces[-1])
    progress.pieces.append(text.finish())
    out.print(progress.pieces[-1] + "\n")
    if arguments.json:
        report = _report(model, inputs, arguments, progress, start)
        Printer(is_printing).print(json.dumps(report) + "\n")


def _report(model: "Model", inputs: _Inputs, arguments: Namespace, progress: _Progress, start: float) -> dict[str, Any]:
    """The output of --json. Every rank calls it, because it may run the model to count the bytes of a decoded token."""
    steps, times, sent = progress.steps, progress.times, progress.sent
    sent_per_token = (sent[-1] - sent[0]) // steps if steps else _bytes_of_a_step(model, arguments)
    return {
        "text": "".join(progress.pieces),
        "tokens": progress.tokens,
        "prompt_tokens": len(inputs.prompt),
        "ttft_s": times[0] - start,
        "tpot_s": (times[-1] - times[0]) / steps if steps else None,
        "tokens_per_s": len(progress.tokens) / (times[-1] - start),
        "tp": model.ranks.size,
        **{name: value for name, value in dict(cp=arguments.cp, ep=arguments.ep).items() if value > 1},
        "reduce": arguments.reduce,
        "bytes_sent_per_token": sent_per_token,
        "cache_bytes": model.new_cache(1, len(inputs.prompt) + arguments.max_new_tokens - 1).nbytes,
    }


def _bytes_of_a_step(model: "Model", arguments: Namespace) -> int:
    """The bytes of one decoded token, measured with the second token after a prompt of one token."""
    steps = stream(model, torch.zeros(1, 1, dtype=torch.int64, device=model.device), None, 2,
                   arguments.temperature or 0.0, top_k=arguments.top_k, seed=0)  # fmt: skip
    next(steps)
    before = model.counter.nbytes
    next(steps)
    return model.counter.nbytes - before


# convert

TOKENIZER = "EleutherAI/gpt-neox-20b"  # the tokenizer of state-spaces' published models
TOKENIZER_FILES = "tokenizer.json tokenizer_config.json special_tokens_map.json"


def convert_checkpoint(arguments: Namespace) -> None:
    """Run `convert`: print the table of tensors if asked to, a summary, and the next command."""
    start, out = time.perf_counter(), Printer(True)
    out_directory = None if arguments.dry_run else arguments.out
    rows = convert(arguments.model, out_directory, weights=arguments.weights, lora=arguments.lora)
    if arguments.dry_run or arguments.verbose:
        names = [(r.source or "(tied)", r.target or "(tied)", " x ".join(map(str, r.shape)), r.dtype) for r in rows]
        out.print(_table([("tensor", "becomes", "shape", "dtype"), *names]))
    if arguments.dry_run:
        return out.print(f"{len(rows)} tensors, nothing written (--dry-run)\n")
    target, seconds = Path(arguments.out), time.perf_counter() - start
    sizes = [sum(path.stat().st_size for path in weight_files(Path(each))) for each in (arguments.model, target)]
    change = " -> ".join(size_text(size) for size in sizes if size)  # 0: a checkpoint of DeepSpeed's
    out.print(f"{len(rows)} tensors, {change}, in {seconds:.1f} s, written to {target}\n")
    if arguments.weights is not None:
        kept = [("tensors", "not in " + arguments.weights, "dtype", "size"), *_kept(target, arguments.weights)]
        out.print(f"\n{_table(kept)}")
    has_tokenizer, place = (target / "tokenizer.json").exists(), shlex.quote(arguments.out)
    if any(row.source == STATE_SPACES_EMBEDDING for row in rows) and not has_tokenizer:
        out.print(
            f"there is no tokenizer; state-spaces' own models use that of {TOKENIZER}, which this command fetches:\n"
            f"hf download {TOKENIZER} {TOKENIZER_FILES} --local-dir {place}\n"
        )
    elif has_tokenizer and not any(row.target == STATE_SPACES_EMBEDDING for row in rows):
        can_chat = read_chat_template(target)[0] is not None
        command = f"chat {place}" if can_chat else f'generate --model {place} --prompt "Once upon a time"'
        out.print(f"\nnext: megatron-ssm {command}\n")


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def _kept(directory: Path, weights: str) -> list[tuple[str, ...]]:
    """(count, name, dtype, size) of the tensors in a directory that are not in the format `weights`, by name, largest first.

    Layers and experts, whose names differ in a number, are one row.
    """
    totals: dict[tuple[str, str], list[int]] = {}
    with ExitStack() as files:
        for name, tensor in open_tensors(directory, files).items():
            dtype = str(FLOATS.get(tensor.get_dtype())).removeprefix("torch.")
            if dtype not in (weights, "None") and not name.endswith(SCALES):
                sizes = totals.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "N", name), dtype), [])
                sizes.append(stored_bytes(tensor))
    largest = sorted(totals.items(), key=lambda each: -sum(each[1]))
    return [(str(len(sizes)), name, dtype, size_text(sum(sizes))) for (name, dtype), sizes in largest]
