"""One GPU: parity with the CPU, prefill and decoding against transformers, CUDA graphs (about 4 min; needs CUDA).

The claims: in fp32, logits differ from the CPU's by no more than 4 times as much as the CPU's from those in float64, and
greedy tokens are the same; decoding is >= 1.0x as fast as transformers at batch 1 and 64, both with mamba-ssm's kernels
where these are installed (the table's last row says whether); CUDA graphs make decoding >= 2x as fast at batch 1. In
"decode" the host never reads a token; "generate" reads a prompt, and the host reads each token. The memory of a prefill is
the growth of the bytes that torch has allocated, beside the formula's. The 130m shapes and a Mamba of 2.8b, with random
weights, in fp32 for the comparison with the CPU and otherwise in bf16. Without a GPU the table stays unchanged.
"""

import logging
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

import megatron_ssm
from benchmarks.generation.speed import NEW, theirs
from benchmarks.support.shapes import FAMILIES, PROMPT, PUBLISHED, SHAPES, random_model
from benchmarks.support.tables import interleaved, markdown, publish
from megatron_ssm.kernels.report import kernels_line
from megatron_ssm.model.memory import Memory

BATCHES, STREAM = (1, 64), 2**28  # STREAM: floats that are read to measure the memory's bandwidth
LARGE = {"Mamba 2.8b": PUBLISHED["mamba-2.8b"]}
WARNINGS = logging.getLogger("transformers.integrations.hub_kernels")


class Missing(logging.Handler):
    """Collects the names of functions for which transformers logs that it falls back to torch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.names: list[str] = []
        WARNINGS.setLevel(logging.WARNING)
        WARNINGS.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take the name out of "`NAME` is falling back ..."."""
        if "falling back" in record.getMessage():
            self.names.append(record.getMessage().split("`")[1])


def synchronized(function: Callable[[], Any]) -> Callable[[], None]:
    """A function that calls `function` and waits until the GPU is done."""

    def run() -> None:
        function()
        torch.cuda.synchronize()

    return run


def parity(directory: str) -> str:
    """The largest difference of logits between the GPU and the CPU, and between the CPU and float64; the same tokens?"""
    ids = torch.randint(0, 50280, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    cpu, gpu = megatron_ssm.load(directory), megatron_ssm.load(directory, device="cuda")
    exact, logits = megatron_ssm.load(directory, dtype=torch.float64)(ids), cpu(ids)
    of_gpu, of_cpu = (f"{(each - logits).abs().max().item():.0e}" for each in (gpu(ids.cuda()).cpu(), exact))
    tokens = [megatron_ssm.generate(model, ids.to(model.device), max_new_tokens=NEW).cpu() for model in (cpu, gpu)]
    return f"{of_gpu} / {of_cpu}, {'same' if torch.equal(*tokens) else 'other'} tokens"


def ours(model: megatron_ssm.Model, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """{phase: function that runs it once}."""
    cache = model.new_cache(len(ids), 2**20)
    model.local_logits(ids, cache=cache, logits_to_keep=1)

    def decode() -> None:
        for _ in range(NEW):
            model.local_logits(ids[:, :1], cache=cache)

    return {
        "prefill": lambda: model.local_logits(ids, None, model.new_cache(len(ids)), 1),
        "decode": decode,
        "generate": lambda: megatron_ssm.generate(model, ids, max_new_tokens=NEW),
    }


def memory_of(prefill: Callable[[], Any], memory: Memory, batch: int) -> str:
    """The most bytes that torch has allocated during a prefill, beside those of the formula."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefill()
    return f"{(torch.cuda.max_memory_allocated() - before) / 1e9:.2f} / {memory.prefill(batch, PROMPT) / 1e9:.2f} GB"


def rows(shape: str, directory: str, agreement: str) -> list[list[str]]:
    """The table's rows for one shape. agreement: the result of `parity`."""
    where = dict(dtype=torch.bfloat16, device="cuda")
    eager, graph = (megatron_ssm.load(directory, graphs=on, **where) for on in (False, True))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).cuda().eval()
    weights, stream = sum(p.nbytes for p in graph.parameters()), torch.ones(STREAM, device="cuda")
    memory = STREAM * 4 / interleaved({"read": synchronized(stream.sum)})["read"]
    lines = []
    for batch in BATCHES:
        ids = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device="cuda")
        options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        whole = {"generate": lambda ids=ids, options=options: model.generate(ids, **options)}
        engines = {"theirs": theirs(model, ids) | whole, "eager": ours(eager, ids), "graph": ours(graph, ids)}
        formula = Memory(graph.config, on_cuda=True)
        for phase in ("prefill", "decode", "generate"):
            seconds = interleaved({name: synchronized(phases[phase]) for name, phases in engines.items()})
            steps = NEW if phase == "decode" else 1
            each = [f"{seconds[name] / steps * 1e3:.2f} ms" for name in engines]
            moved = weights + 2 * formula.state_per_sequence * batch
            share = f"{moved * steps / seconds['graph'] / memory:.0%}" if phase == "decode" else ""
            if phase == "prefill":
                share = memory_of(engines["eager"]["prefill"], formula, batch)
            gains = [f"{seconds[other] / seconds['graph']:.2f}x" for other in ("theirs", "eager")]
            lines.append([shape, agreement, str(batch), phase, *each, *gains, share])
            print(" | ".join(lines[-1]), flush=True)
    return lines


@torch.no_grad()
def main() -> None:
    """Measure every shape and publish the table."""
    if not torch.cuda.is_available():
        print("there is no GPU: the table stays unchanged")
        return
    missing, table = Missing(), []
    FAMILIES.update(LARGE)
    for shape in (*SHAPES, *LARGE):
        with tempfile.TemporaryDirectory() as directory:
            random_model(shape, directory)
            table += rows(shape, directory, parity(directory) if shape in SHAPES else "")
    header = [torch.cuda.get_device_name(), f"fp32 logits: GPU - CPU / CPU - float64; {NEW} tokens"]
    header += ["batch", f"prompt {PROMPT}", "transformers", "ours, eager", "ours, graphs", "over transformers", "over eager",
               "of the memory's speed; prefill: GB, measured / formula"]  # fmt: skip
    theirs_are = f"torch's {', '.join(missing.names)}" if missing.names else "mamba-ssm's and causal-conv1d's"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, whose kernels are {theirs_are}"
    table.append([f"{kernels_line('cuda', torch.bfloat16)}; {versions}", *[""] * (len(header) - 1)])
    publish("cuda", markdown(header, table))


if __name__ == "__main__":
    main()
