"""`megatron-ssm bench`: the speed of a model by format of its weights, beside transformers and llama.cpp.

All models are in memory and take turns with the same random tokens: a prompt, then the new tokens one by one. A turn begins
with a short prompt that is not timed. The first turn of each model is not counted.
"""

import ctypes
import inspect
import json
import logging
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from commfabric.foundation.command_line import Printer
from megatron_ssm import Model
from megatron_ssm.checkpoints.hf import load
from megatron_ssm.checkpoints.quantized_files import format_of
from megatron_ssm.kernels.report import kernels_line
from megatron_ssm.layers.families import read_for_ranks
from megatron_ssm.model.memory import Memory
from megatron_ssm.plan.devices import own_memory

log = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SECONDS, FEWEST, MOST = 60, 3, 10  # as many repetitions as fit into these seconds, within these limits
LLAMA_ERROR = 4  # GGML_LOG_LEVEL_ERROR
WARM_UP = 32  # tokens of the prompt that is not timed

PAGE = """\
{model} on {device}, {threads} threads: a prompt of {prompt_tokens:,} tokens, {new_tokens:,} new tokens

{table}

GB: size of the weights. prefill, decode: tokens per second, median of {repetitions} repetitions,
in brackets (largest - smallest) / median; {ratio_to} is 1.00x.
logits: largest difference from {logits_reference}."""

Read = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Engine:
    """A model in one of the engines, and what was measured with it."""

    name: str
    weights: str  # their format
    vocabulary: int
    nbytes: int  # of the weights
    # Begins a sequence; returns a function that appends tokens (1, tokens) and returns the logits (vocabulary,) after the
    # last one, which the next call may overwrite.
    begin: Callable[[], Read]
    seconds: list[tuple[float, float]] = field(default_factory=list)  # of the prompt and the new tokens, in each turn
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (1 + new tokens, vocabulary)

    def turn(self, tokens: Sequence[torch.Tensor]) -> None:
        """Read a prompt and new tokens."""
        self.begin()(tokens[0][:, :WARM_UP])
        times, logits, read = [time.perf_counter()], [], self.begin()
        for ids in tokens:
            logits.append(read(ids).to("cpu", torch.float32, copy=True))
            times.append(time.perf_counter())
        self.logits = torch.stack(logits)
        self.seconds.append((times[1] - times[0], times[-1] - times[1]))


def ours(model: Model, length: int) -> Engine:
    """A model of this library, for sequences of up to `length` tokens."""

    def begin() -> Read:
        cache = model.new_cache(1, length)
        return lambda ids: model(ids, cache=cache, logits_to_keep=1)[0, -1]

    weights = model.weights or _name(model.dtype)
    return Engine("megatron-ssm", weights, model.config.vocab_size, _nbytes(model), begin)


def transformers(directory: str, dtype: torch.dtype, device: str) -> Engine:
    """The model of a Hugging Face directory in transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model = model.to(device).eval()
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters  # Bamba's does not count them

    def begin() -> Read:
        state: dict[str, Any] = {}
        length = 0

        def read(ids: torch.Tensor) -> torch.Tensor:
            nonlocal state, length
            if takes_positions:
                state["position_ids"] = torch.arange(length, length + ids.shape[1], device=device)[None]
            output = model(ids, use_cache=True, logits_to_keep=1, **state)
            names = {"cache", "past_key_values", "cache_params"}  # depends on the version
            state, length = {n: output[n] for n in names & output.keys()}, length + ids.shape[1]
            return output.logits[0, -1]

        return read

    return Engine("transformers", _name(dtype), model.config.get_text_config().vocab_size, _nbytes(model), begin)


def llama_cpp(path: str, length: int, device: str) -> Engine:
    """A GGUF file in llama.cpp, for sequences of up to `length` tokens; ValueError if llama.cpp cannot read it."""
    import llama_cpp as llama

    errors: list[str] = []

    @llama.llama_log_callback
    def keep(level: int, text: bytes, _: Any) -> None:
        errors.extend([text.decode("utf-8", "replace")] * (level == LLAMA_ERROR))

    llama.llama_log_set(keep, None)
    options, sizes = llama.llama_model_default_params(), llama.llama_context_default_params()
    options.n_gpu_layers = 0 if device == "cpu" else 999
    sizes.n_ctx, sizes.n_batch, sizes.no_perf = length, length, True
    model = llama.llama_model_load_from_file(path.encode(), options)
    context = model and llama.llama_init_from_model(model, sizes)
    if not context:
        raise ValueError(f"llama.cpp cannot read {path}: {' '.join(errors)}")
    vocabulary, text = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)), ctypes.create_string_buffer(256)
    llama.llama_model_desc(model, text, len(text))  # such as "mamba 130M Q4_K - Medium", or "... all F32"

    def begin() -> Read:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        return read

    def read(ids: torch.Tensor, _log: Any = keep) -> torch.Tensor:  # llama.cpp calls `keep` as long as it is used
        llama.llama_set_n_threads(context, torch.get_num_threads(), torch.get_num_threads())
        tokens = (llama.llama_token * ids.numel())(*ids.flatten().tolist())
        if llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(tokens))):
            raise RuntimeError(f"llama.cpp could not decode: {' '.join(errors)}")
        first = ctypes.addressof(llama.llama_get_logits_ith(context, -1).contents)
        return torch.frombuffer((ctypes.c_float * vocabulary).from_address(first), dtype=torch.float32)

    weights = text.value.decode().split(maxsplit=2)[-1].removeprefix("all ").split(" - ")[0]
    return Engine("llama.cpp", weights, vocabulary, llama.llama_model_size(model), begin)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def _nbytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def bench(arguments: Namespace) -> None:
    """Run `bench`: print a table, or one JSON object."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with redirect_stdout(sys.stderr):  # packages that transformers imports print to stdout
        report = _measure(arguments)
    Printer(True).print((json.dumps(report) if arguments.json else _page(report)) + "\n")


def _measure(arguments: Namespace) -> dict[str, Any]:
    prompt, new = arguments.prompt_tokens, arguments.new_tokens
    engines = _load(arguments, prompt + new)
    vocabulary = min(each.vocabulary for each in engines)  # that all of them have
    ids = torch.randint(vocabulary, (1, prompt + new), generator=torch.Generator().manual_seed(0))
    tokens = ids.to(arguments.device).split([prompt] + [1] * new, dim=1)
    start = time.perf_counter()
    for each in engines:
        log.info(f"first turn: {each.name} {each.weights}")
        each.turn(tokens)
    seconds = time.perf_counter() - start
    repetitions = arguments.repetitions or max(FEWEST, min(MOST, int(SECONDS / seconds)))
    log.info(f"{repetitions} repetitions: about {repetitions * seconds:.0f} s")
    for each in engines * repetitions:
        each.turn(tokens)
    base = next((each for each in engines if each.name in arguments.against), engines[0])
    exact = max(engines, key=lambda each: (each.name == "transformers", each.weights == "fp32"))
    rows = []
    for each in engines:
        row: dict[str, Any] = {"engine": each.name, "weights": each.weights, "weights_bytes": each.nbytes}
        for index, (phase, count) in enumerate((("prefill", prompt), ("decode", new))):
            times, others = ([pair[index] for pair in engine.seconds[1:]] for engine in (each, base))
            row[f"{phase}_tokens_per_s"] = count / median(times)
            row[f"{phase}_ratio"] = median(others) / median(times)
            row[f"{phase}_spread"] = (max(times) - min(times)) / median(times)
        difference = each.logits[:, :vocabulary] - exact.logits[:, :vocabulary]
        rows.append(row | {"logits_difference": difference.abs().max().item()})
    return {
        "model": arguments.model, "device": arguments.device, "threads": torch.get_num_threads(), "prompt_tokens": prompt,
        "new_tokens": new, "repetitions": repetitions, "ratio_to": f"{base.name} {base.weights}",
        "logits_reference": f"{exact.name} {exact.weights}", "rows": rows,
    }  # fmt: skip


def _load(arguments: Namespace, length: int) -> list[Engine]:
    """The engines, ours first. What may be refused comes before what takes long.

    transformers has each dtype of ours, and float32 where the models then fit into half of the memory.
    """
    directory, device = arguments.model, arguments.device
    theirs: dict[str, list[Engine]] = dict.fromkeys(arguments.against, [])
    config = read_for_ranks(directory, 1)
    if "transformers" in theirs:
        from transformers import __version__
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

        if (kind := config.raw["model_type"]) not in NAMES:
            raise ValueError(f"--against transformers: version {__version__} has no model of type {kind}")
        if stored := format_of(config.raw):
            raise ValueError(f"--against transformers: it does not read matrices in {stored}")
    if "llama.cpp" in theirs:
        theirs["llama.cpp"] = [llama_cpp(arguments.against["llama.cpp"], length, device)]
    models = []
    for name in arguments.weights or ["auto"]:
        weights = name if name.startswith("int") else None
        models.append(load(directory, dtype=DTYPES.get(name, "auto"), device=device, weights=weights))
    log.info(kernels_line(device, models[0].dtype))
    if "transformers" in theirs:
        dtypes = dict.fromkeys(model.dtype for model in models)
        if sum(map(_nbytes, models)) + 2 * Memory(config, itemsize=4).weights < own_memory(1, torch.device(device)) / 2:
            dtypes[torch.float32] = None
        theirs["transformers"] = [transformers(directory, dtype, device) for dtype in dtypes]
    return [ours(model, length) for model in models] + sum(theirs.values(), [])


def _page(report: dict[str, Any]) -> str:
    table = [("", "weights", "GB", "prefill", "", "decode", "", "logits")]
    for row in report["rows"]:
        cells = [row["engine"], row["weights"], f"{row['weights_bytes'] / 1e9:.3f}"]
        for phase in ("prefill", "decode"):
            speed = row[f"{phase}_tokens_per_s"]
            cells.append(f"{speed:,.{1 if speed < 100 else 0}f} ({row[f'{phase}_spread']:.0%})")
            cells.append(f"{row[f'{phase}_ratio']:.2f}x")
        table.append((*cells, f"{row['logits_difference']:.1e}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])]) for row in table]
    return PAGE.format(table="\n".join(map(str.rstrip, lines)), **report)
