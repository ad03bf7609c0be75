"""Directories of quantized models: writing one, and loading it against quantizing at load, at 2.8B parameters (about 4 min).

The claims, on two cores: `convert --weights int4` takes <= 25 s and <= 2 GB beside the mapped source; the directory is
loaded in <= 3 s, with <= 1.15x its size resident beside the interpreter, and gives the tokens of quantizing at load.

Each measurement is a process of its own. The model is mamba-2.8b of examples/configs with random weights in bfloat16, which
takes 5.6 GB of disk. Seconds are those of `load` or `convert`, with the files in the page cache where they fit.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.support.shapes import processor
from benchmarks.support.tables import markdown, print_or_publish
from megatron_ssm import families
from megatron_ssm.spec.fields import hf_shapes

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "configs" / "mamba-2.8b.json"
GB = 10**9


def write_model(directory: Path) -> None:
    """Random weights, of a size for which tokens differ."""
    raw = json.loads(CONFIG.read_text())
    tensors, generator = {}, torch.Generator().manual_seed(0)
    for name, shape in hf_shapes(families.from_dict(raw).fields()).items():
        if name.endswith("A_log"):
            tensor = torch.arange(1, shape[-1] + 1).log().expand(shape)
        elif name.endswith(("norm.weight", "norm_f.weight", ".D")):
            tensor = torch.ones(shape)
        elif name.endswith("dt_proj.bias"):
            tensor = torch.full(shape, -4.0)
        else:
            bound = (3 / shape[-1]) ** 0.5
            tensor = torch.empty(shape, dtype=torch.bfloat16).uniform_(-bound, bound, generator=generator)
        tensors[name] = tensor.to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))


def memory() -> dict[str, int]:
    """Bytes of this process: resident, the part of it that no file holds, and the most of it."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0] in ("VmRSS:", "RssAnon:", "VmHWM:")}


def load(directory: str, weights: str | None) -> dict[str, Any]:
    """Seconds of `load`, resident bytes beside the interpreter's, the most bytes, and tokens."""
    import megatron_ssm

    before, start = memory(), time.perf_counter()
    model = megatron_ssm.load(directory, weights=weights)
    seconds, after = time.perf_counter() - start, memory()
    tokens = megatron_ssm.generate(model, torch.arange(1, 9)[None], max_new_tokens=16)
    most = after["VmHWM"] - before["VmRSS"]
    return dict(seconds=seconds, resident=after["VmRSS"] - before["VmRSS"], most=most, tokens=tokens.tolist())


def convert(source: str, target: str, weights: str) -> dict[str, Any]:
    """Seconds of `convert`, and the most bytes that are not mapped from a file, read every 50 ms."""
    from threading import Event, Thread

    from megatron_ssm.checkpoints.convert import convert as run

    done, most, before = Event(), [0], memory()["RssAnon"]

    def watch() -> None:
        while not done.wait(0.05):
            most[0] = max(most[0], memory()["RssAnon"])

    watcher, start = Thread(target=watch), time.perf_counter()
    watcher.start()
    run(source, target, weights=weights)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return dict(seconds=seconds, most=most[0] - before)


def in_a_process(what: str, *arguments: str | None) -> dict[str, Any]:
    """The result of a function above, in a new process."""
    command = [sys.executable, "-m", "benchmarks.generation.quantized_directories", what, json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout.splitlines()[-1])


def main() -> None:
    """Measure both formats, and publish the table."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "source")
        source.mkdir()
        write_model(source)
        for weights in ("int4", "int8"):
            target = Path(temporary, weights)
            written = in_a_process("convert", str(source), str(target), weights)
            size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
            in_a_process("load", str(target), None)  # not counted: its files come into the page cache
            read, quantized = in_a_process("load", str(target), None), in_a_process("load", str(source), weights)
            same = "the same" if read["tokens"] == quantized["tokens"] else "others"
            rows.append([
                weights, f"{size / GB:.2f}", f"{written['seconds']:.1f} / {written['most'] / GB:.1f}",
                f"{read['seconds']:.1f} / {quantized['seconds']:.1f}",
                f"{read['resident'] / size:.2f}x / {read['most'] / size:.2f}x / {quantized['most'] / size:.2f}x", same,
            ])  # fmt: skip
            for path in target.iterdir():
                path.unlink()
    header = [f"mamba-2.8b, {processor()}", "GB of files", "convert: s / GB in memory", "load, s: directory / quantizing",
              "memory: resident / most / most when quantizing", "tokens"]  # fmt: skip
    print_or_publish("quantized-directories", markdown(header, rows))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(dict(load=load, convert=convert)[sys.argv[1]](*json.loads(sys.argv[2]))))
    else:
        main()
