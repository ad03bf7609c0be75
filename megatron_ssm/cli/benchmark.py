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

from megatron_ssm import Model
from megatron_ssm.advice.host_memory import own_memory
from megatron_ssm.checkpoints.hf import load
from megatron_ssm.checkpoints.quantized_files import format_of
from megatron_ssm.diagnostics.doctor import kernels_line
from megatron_ssm.families import read_for_ranks
from megatron_ssm.sizing.memory import Memory
from sparsefusion.foundation.command_line import Printer

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
logits: largest difference from {logits_reference}; same dtype: from transformers in the row's dtype."""

Read = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Engine:
    """A model in one of the engines, and what was measured with it.

    Attributes:
        name, weights: The names of the engine and of the format of its weights.
        vocabulary: The number of its logits.
        nbytes: Bytes of its weights.
        begin: Begins a sequence; returns a function that appends tokens (1, tokens) and returns the logits (vocabulary,)
            after the last one. The next call may overwrite them.
        dtype: The dtype of its activations; None for llama.cpp.
        prefill, decode: The seconds of each repetition.
        logits: (1 + new tokens, vocabulary), after the prompt and after each new token.
    """

    name: str
    weights: str
    vocabulary: int
    nbytes: int
    begin: Callable[[], Read]
    dtype: torch.dtype | None = None
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def turn(self, tokens: Sequence[torch.Tensor]) -> tuple[float, float]:
        """The seconds of the prompt and of the new tokens. `logits` are those after each of `tokens`."""
        times, logits = [time.perf_counter()], []
        read = self.begin()
        for ids in tokens:
            logits.append(read(ids).to("cpu", torch.float32, copy=True))
            times.append(time.perf_counter())
        self.logits = torch.stack(logits)
        return times[1] - times[0], times[-1] - times[1]

    def difference(self, other: "Engine") -> float:
        """The largest difference between the logits of two engines, in the vocabulary that both have."""
        width = min(self.vocabulary, other.vocabulary)
        return (self.logits[:, :width] - other.logits[:, :width]).abs().max().item()


def ours(model: Model, length: int) -> Engine:
    """A model of this library, for sequences of up to `length` tokens."""

    def begin() -> Read:
        cache = model.new_cache(1, length)
        return lambda ids: model(ids, cache=cache, logits_to_keep=1)[0, -1]

    name = model.weights or short_name(model.dtype)
    return Engine("megatron-ssm", name, model.config.vocab_size, _nbytes(model), begin, model.dtype)


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
            name = next(
                n for n in ("cache", "past_key_values", "cache_params") if n in output
            )  # depends on the version
            state, length = {name: output[name]}, length + ids.shape[1]
            return output.logits[0, -1]

        return read

    vocabulary = model.config.get_text_config().vocab_size
    return Engine("transformers", short_name(dtype), vocabulary, _nbytes(model), begin, dtype)


def check_transformers(raw: dict[str, Any]) -> None:
    """ValueError if transformers cannot read the model of this config.json."""
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if raw["model_type"] not in NAMES:
        raise ValueError(f"--against transformers: version {__version__} has no model of type {raw['model_type']}")
    if stored := format_of(raw):
        raise ValueError(f"--against transformers: it does not read matrices in {stored}")


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
        first = llama.llama_get_logits_ith(context, -1).contents
        return torch.frombuffer(
            (ctypes.c_float * vocabulary).from_address(ctypes.addressof(first)), dtype=torch.float32
        )

    weights = text.value.decode().split(maxsplit=2)[-1].removeprefix("all ").split(" - ")[0]
    return Engine("llama.cpp", weights, vocabulary, llama.llama_model_size(model), begin)


def short_name(dtype: torch.dtype) -> str:
    """The name of a dtype as a format of weights, such as bf16."""
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
    """The report of --json."""
    prompt, new = arguments.prompt_tokens, arguments.new_tokens
    engines = _load(arguments, prompt + new)
    vocabulary = min(each.vocabulary for each in engines)
    ids = torch.randint(vocabulary, (1, prompt + new), generator=torch.Generator().manual_seed(0))
    tokens = ids.to(arguments.device).split([prompt] + [1] * new, dim=1)
    start = time.perf_counter()
    for each in engines:
        log.info(f"first turn: {each.name} {each.weights}")
        each.turn(tokens)
    seconds = time.perf_counter() - start
    base = next((each for each in engines if each.name in arguments.against), engines[0])
    exact = max(engines, key=lambda each: (each.name == "transformers", each.weights == "fp32"))
    repetitions = arguments.repetitions or max(FEWEST, min(MOST, int(SECONDS / seconds)))
    log.info(f"{repetitions} repetitions: about {repetitions * seconds:.0f} s")
    for _ in range(repetitions):
        for each in engines:
            each.begin()(tokens[0][:, :WARM_UP])
            for times, value in zip((each.prefill, each.decode), each.turn(tokens), strict=True):
                times.append(value)
    return {
        "model": arguments.model, "device": arguments.device, "threads": torch.get_num_threads(), "prompt_tokens": prompt,
        "new_tokens": new, "repetitions": repetitions, "ratio_to": f"{base.name} {base.weights}",
        "logits_reference": f"{exact.name} {exact.weights}",
        "rows": [_row(each, engines, base, exact, {"prefill": prompt, "decode": new}) for each in engines],
    }  # fmt: skip


def _load(arguments: Namespace, length: int) -> list[Engine]:
    """The engines, ours first. What may be refused comes before what takes long.

    transformers has each dtype of ours, and float32 where the models then fit into half of the memory.
    """
    directory, device = arguments.model, arguments.device
    theirs: dict[str, list[Engine]] = dict.fromkeys(arguments.against, [])
    config = read_for_ranks(directory, 1)
    if "transformers" in theirs:
        check_transformers(config.raw)
    if "llama.cpp" in theirs:
        theirs["llama.cpp"] = [llama_cpp(arguments.against["llama.cpp"], length, device)]
    own = []
    for name in arguments.weights or [None]:
        dtype, weights = (DTYPES[name], None) if name in DTYPES else ("auto", name)
        own.append(ours(load(directory, dtype=dtype, device=device, weights=weights), length))
    log.info(kernels_line(device, own[0].dtype))
    if "transformers" in theirs:
        dtypes = dict.fromkeys(each.dtype for each in own)
        needed = sum(each.nbytes for each in own) + 2 * Memory(config, itemsize=4).weights
        if needed < own_memory(1, torch.device(device)) / 2:
            dtypes[torch.float32] = None
        theirs["transformers"] = [transformers(directory, dtype, device) for dtype in dtypes if dtype]
    return own + sum(theirs.values(), [])


def _row(engine: Engine, engines: list[Engine], base: Engine, exact: Engine, counts: dict[str, int]) -> dict[str, Any]:
    """What was measured with an engine. base, exact: those whose times and logits it is compared with."""
    row: dict[str, Any] = {"engine": engine.name, "weights": engine.weights, "weights_bytes": engine.nbytes}
    for phase, count in counts.items():
        times = getattr(engine, phase)
        row[f"{phase}_tokens_per_s"] = count / median(times)
        row[f"{phase}_ratio"] = median(getattr(base, phase)) / median(times)
        row[f"{phase}_spread"] = (max(times) - min(times)) / median(times)
    peers = [each for each in engines if each.name == "transformers" and each.dtype == engine.dtype]
    row["logits_difference"] = engine.difference(exact)
    row["logits_difference_same_dtype"] = engine.difference(peers[0]) if peers else None
    return row


def _page(report: dict[str, Any]) -> str:
    """A report as text."""
    table = [("", "weights", "GB", "prefill", "", "decode", "", "logits", "same dtype")]
    for row in report["rows"]:
        cells = [row["engine"], row["weights"], f"{row['weights_bytes'] / 1e9:.3f}"]
        for phase in ("prefill", "decode"):
            speed = row[f"{phase}_tokens_per_s"]
            cells.append(f"{speed:,.{1 if speed < 100 else 0}f} ({row[f'{phase}_spread']:.0%})")
            cells.append(f"{row[f'{phase}_ratio']:.2f}x")
        same = row["logits_difference_same_dtype"]
        table.append((*cells, f"{row['logits_difference']:.1e}", "" if same is None else f"{same:.1e}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])]) for row in table]
    return PAGE.format(table="\n".join(map(str.rstrip, lines)), **report)
