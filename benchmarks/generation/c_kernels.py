"""The C kernels one by one, at the 130m shapes, one thread, float32 (about 1 min).

The claims: the selective scan is >= 8x as fast as the one of transformers. The head's matrix-vector product, 50280 x 768,
reads its matrix at >= 0.9 of the read bandwidth measured in the same process, and a whole decoding step reads the
parameters at >= 0.7 of it.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.nn.functional as F
from transformers.models.mamba import modeling_mamba

import megatron_ssm
from benchmarks.support.shapes import PROMPT, SHAPES, random_model
from benchmarks.support.tables import interleaved, markdown, publish
from megatron_ssm.kernels import convolution, kernels, scan
from megatron_ssm.kernels.matrices import linear
from megatron_ssm.kernels.quantized_matrices import Int4Weight, Int8Weight

REPETITIONS, STREAM = 15, 256 * 2**20  # bytes read to measure the bandwidth
INNER, STATE, HEADS, HEAD_DIM, STATE_2 = 1536, 16, 24, 64, 128


def operations() -> dict[str, dict[str, Callable[[], Any]]]:
    """{operation: {engine: function}} for one layer and PROMPT tokens; engines: "transformers", "torch" and "C"."""
    wide = torch.randn(1, PROMPT, 2 * INNER)
    x, z = wide.chunk(2, dim=-1)
    B, C = torch.randn(1, PROMPT, STATE), torch.randn(1, PROMPT, STATE)
    dt, A_log, D = torch.rand(1, PROMPT, INNER) / 10, torch.randn(INNER, STATE), torch.randn(INNER)
    theirs = [t.transpose(1, 2).contiguous() for t in (x, dt)] + [
        -torch.exp(A_log),
        B.transpose(1, 2),
        C.transpose(1, 2),
    ]
    theirs_z = z.transpose(1, 2).contiguous()
    weight, bias = torch.randn(INNER, 1, 4), torch.randn(INNER)
    heads = torch.randn(1, PROMPT, HEADS, HEAD_DIM)
    steps, rates = torch.rand(1, PROMPT, HEADS) / 10, torch.randn(HEADS)
    B2, C2 = torch.randn(1, PROMPT, 1, STATE_2), torch.randn(1, PROMPT, 1, STATE_2)
    return {
        "selective scan, gated": {
            "transformers": lambda: modeling_mamba.mamba_selective_scan(*theirs, D, theirs_z),
            "torch": lambda: scan._selective_chunks(x, dt, A_log, B, C, D, z, None, None),
            "C": lambda: scan.selective_scan(x, dt, A_log, B, C, D, z),
        },
        "convolution with SiLU": {
            "transformers": lambda: modeling_mamba.causal_conv1d_fn(theirs[0], weight.squeeze(1), bias, "silu"),
            "torch": lambda: convolution._causal_conv_torch(x, weight, bias, None),
            "C": lambda: convolution.causal_conv(x, weight, bias),
        },
        "Mamba-2's recurrence": {
            "torch": lambda: scan._ssd_torch(heads, steps, rates, B2, C2, rates, None),
            "C": lambda: scan.ssd(heads, steps, rates, B2, C2, rates),
        },
    }


def products() -> dict[str, tuple[int, Callable[[], Any], Callable[[], Any] | None]]:
    """{dtype: (bytes of the matrix, C's function, torch's or None)} for the product of the head with one token."""
    weight, x = torch.randn(50280, 768), torch.randn(1, 768)
    narrow, x_narrow = weight.bfloat16(), x.bfloat16()
    int8, int4 = Int8Weight.of(weight), Int4Weight.of(weight)
    return {
        "fp32": (weight.nbytes, lambda: linear(x, weight), lambda: F.linear(x, weight)),
        "bf16": (narrow.nbytes, lambda: linear(x_narrow, narrow), lambda: F.linear(x_narrow, narrow)),
        "int8": (int8.values.nbytes + int8.scales.nbytes, lambda: linear(x, int8), None),
        "int4": (int4.values.nbytes + int4.scales.nbytes, lambda: linear(x, int4), None),
    }


def decode_step(shape: str) -> tuple[int, Callable[[], Any]]:
    """(bytes of the parameters, a function that decodes one token), in float32."""
    with tempfile.TemporaryDirectory() as directory:
        random_model(shape, directory)
        model = megatron_ssm.load(directory)
    ids = torch.zeros(1, PROMPT, dtype=torch.int64)
    cache = model.new_cache(1)
    model(ids, cache=cache, logits_to_keep=1)
    return sum(p.nbytes for p in model.parameters()), lambda: model(ids[:, :1], cache=cache)


def operation_rows() -> list[list[str]]:
    """The rows of the first table: milliseconds of each operation."""
    rows = []
    for name, functions in operations().items():
        times = interleaved(functions, REPETITIONS)
        cells = [f"{times[engine] * 1e3:.2f}" if engine in times else "" for engine in ("transformers", "torch", "C")]
        ratios = [f"{times[engine] / times['C']:.1f}x" for engine in times if engine != "C"]
        rows.append([name, *cells, ", ".join(ratios)])
    return rows


def bandwidth_rows() -> list[list[str]]:
    """The rows of the second table: GB/s of the head's products and of whole steps, beside those of plain reading."""
    stream = torch.ones(STREAM // 4)
    rows = []
    for name, (nbytes, ours, torchs) in products().items():
        times = interleaved({"read": stream.sum, "C": ours, **({"torch": torchs} if torchs else {})}, REPETITIONS)
        rows.append(bandwidth_row(f"head, 50280 x 768, {name}", nbytes, times))
    for shape in SHAPES:
        nbytes, step = decode_step(shape)
        times = interleaved({"read": stream.sum, "C": step}, REPETITIONS)
        rows.append(bandwidth_row(f"decoding step, {shape}, fp32", nbytes, times))
    return rows


def bandwidth_row(name: str, nbytes: int, times: dict[str, float]) -> list[str]:
    """A row of the second table. times: seconds by contestant ("read", "C", "torch")."""
    read, ours = STREAM / times["read"], nbytes / times["C"]
    torchs = f"{nbytes / times['torch'] / 1e9:.1f}" if "torch" in times else ""
    return [name, f"{read / 1e9:.1f}", torchs, f"{ours / 1e9:.1f}", f"{ours / read:.2f}"]


@torch.no_grad()
def main() -> None:
    """Measure and publish both tables."""
    torch.set_num_threads(1)
    print(f"kernels: {kernels.LIBRARY}")
    header = ["256 tokens, one layer, ms", "transformers", "torch", "C", "C is faster by"]
    publish("kernels", markdown(header, operation_rows()))
    header = ["one token, GB/s", "reading alone", "torch", "C", "C / reading"]
    publish("bandwidth", markdown(header, bandwidth_rows()))


if __name__ == "__main__":
    main()
