"""What the commands of `python -m megatron_ssm` do, once torch may be imported."""

import json
import logging
import time
from pathlib import Path

import torch

from megatron_ssm.checkpoints.convert import convert
from megatron_ssm.checkpoints.hf import load
from megatron_ssm.configs.config import Config, read_for_ranks, token_ids
from megatron_ssm.diagnostics.doctor import kernels_line
from megatron_ssm.inference.generation import stream
from megatron_ssm.inference.text import TextStream, load_tokenizer
from megatron_ssm.parallel.groups import check_world, device_of_rank, launched_ranks, replicas, shut_down
from sparsefusion.foundation.command_line import Printer

log = logging.getLogger(__name__)


def generate(arguments) -> None:
    """`generate`: on every rank; rank 0 prints. Everything that can be wrong is found before ranks communicate."""
    directory = Path(arguments.model)
    tensor = arguments.tp or launched_ranks()
    config = read_for_ranks(arguments.model, tensor)
    tokenizer = load_tokenizer(directory)
    prompt = _prompt_ids(arguments, tokenizer, config)
    eos = () if arguments.ignore_eos else _stop_tokens(directory, config)
    check_world(tensor, launched_ranks())
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device")
    try:
        groups = replicas(tensor, device, init_method=arguments.rendezvous)
        dtype = getattr(torch, arguments.dtype)
        model = load(directory, groups.tensor, None, dtype, device_of_rank(device), arguments.reduce,
                     weights=arguments.weights)  # fmt: skip
        with model:  # and without its graphs before its groups go
            _continue(model, tokenizer, prompt, eos, arguments, speaks=groups.rank == 0)
    finally:
        shut_down()


def _prompt_ids(arguments, tokenizer, config: Config) -> list[int]:
    """The prompt as ids that the model knows."""
    if arguments.prompt_file is not None:
        name, data = arguments.prompt_file, Path(arguments.prompt_file).read_bytes()
    else:
        name, data = "--prompt", arguments.prompt.encode("utf-8", "surrogateescape")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start})") from None
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= config.vocab_size:
        raise ValueError(f"the tokenizer is larger than the model: id {largest}, vocab_size {config.vocab_size}")
    ids = tokenizer.encode(text).ids
    if not ids:
        raise ValueError("the prompt is empty")
    return ids


def _stop_tokens(directory: Path, config: Config) -> tuple[int, ...]:
    """The checkpoint's eos_token_id: generation_config.json's, else config.json's."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return config.eos_token_ids
    try:
        return token_ids(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")) or config.eos_token_ids
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{path} is not a generation configuration") from None


def _continue(model, tokenizer, prompt, eos, arguments, speaks) -> None:
    """Generate, printing text as it becomes certain, or one JSON object at the end."""
    text = TextStream(tokenizer, arguments.stop, eos)
    out = Printer(speaks and not arguments.json)
    tokens, pieces, times, sent = [], [], [], []
    start = time.perf_counter()
    columns = stream(
        model, torch.tensor([prompt], device=model.device), None, arguments.max_new_tokens, arguments.temperature,
        arguments.top_k, arguments.top_p, arguments.repetition_penalty, eos, arguments.stop, arguments.seed,
    )  # fmt: skip
    log.info(kernels_line(model.device, model.dtype, model.ranks.transport))  # now that nothing can be wrong any more
    for column in columns:
        times.append(time.perf_counter())
        sent.append(model.counter.nbytes)
        tokens.append(int(column[0]))
        pieces.append(text.push(tokens[-1]))
        out.print(pieces[-1])
    pieces.append(text.finish())
    out.print(pieces[-1] + "\n")
    steps = len(tokens) - 1
    sent_per_token = (sent[-1] - sent[0]) // steps if steps else _bytes_of_a_step(model, arguments)
    if speaks and arguments.json:
        report = {
            "text": "".join(pieces),
            "tokens": tokens,
            "prompt_tokens": len(prompt),
            "ttft_s": times[0] - start,
            "tpot_s": (times[-1] - times[0]) / steps if steps else None,
            "tokens_per_s": len(tokens) / (times[-1] - start),
            "tp": model.ranks.size,
            "reduce": arguments.reduce,
            "bytes_sent_per_token": sent_per_token,
            "cache_bytes": model.new_cache(1, len(prompt) + arguments.max_new_tokens - 1).nbytes,
        }
        Printer(True).print(json.dumps(report) + "\n")


def _bytes_of_a_step(model, arguments) -> int:
    """What one decoded token sends, when none was decoded: a prompt of one token sends the same. On every rank."""
    steps = stream(model, torch.zeros(1, 1, dtype=torch.int64, device=model.device), None, 1, arguments.temperature,
                   arguments.top_k, seed=0)  # fmt: skip
    before = model.counter.nbytes
    next(steps)
    return model.counter.nbytes - before


def convert_checkpoint(arguments) -> None:
    """Run `megatron_ssm convert`: a table with one line per tensor, and what was written."""
    rows = convert(arguments.model, None if arguments.dry_run else arguments.out)
    table = [("tensor", "becomes", "shape", "dtype")]
    table += [(r.source or "(tied)", r.target or "(tied)", " x ".join(map(str, r.shape)), r.dtype) for r in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    out = Printer(True)
    for line in table:
        out.print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")
    done = "nothing written (--dry-run)" if arguments.dry_run else f"written to {arguments.out}"
    out.print(f"{len(rows)} tensors, {done}\n")
