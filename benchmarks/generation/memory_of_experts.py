"""Memory of loading and generating with experts in 4 bits, against the formula, at Nemotron-3's width (about 4 min).

The claim: the anonymous memory of a process grows by at most 1.05x of what `sizing.Memory` says for the weights, the cache
and the prompt. The model is nemotron-3-nano-30b-a3b of examples/configs with six of its layers (MEMEM*), 3.5B parameters in
bfloat16, of which each expert is read and quantized alone.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.support.anonymous_memory import peak_growth, return_freed_blocks
from benchmarks.support.shapes import processor
from benchmarks.support.tables import markdown, print_or_publish
from megatron_ssm import families, generate, load
from megatron_ssm.model.memory import Memory
from megatron_ssm.spec.fields import Field

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "configs" / "nemotron-3-nano-30b-a3b.json"
PATTERN, PROMPT, NEW, GB = "MEMEM*", 256, 16, 10**9


def write_model(directory: Path) -> None:
    """Random weights, experts one by one, a file for each tensor of a field."""
    raw = json.loads(CONFIG.read_text()) | dict(hybrid_override_pattern=PATTERN, num_hidden_layers=len(PATTERN))
    files: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for field in families.from_dict(raw).fields():
        if field.hf in files:
            continue
        tensors = drawn(field, families.from_dict(raw), generator)
        file = f"model-{len(files):05d}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file) | {field.hf: file}
        del tensors
    names = {name: file for name, file in files.items() if not name.endswith((".up_proj", ".down_proj"))}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (directory / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))


def drawn(field: Field, config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """{name in files: tensor} of one tensor of the model."""
    shape = max(each.hf_shape for each in config.fields() if each.hf == field.hf)
    if field.hf.endswith(("norm.weight", "norm_f.weight", ".D")):
        return {field.hf: torch.ones(shape, dtype=torch.bfloat16)}
    if len(shape) == 1:
        return {field.hf: torch.zeros(shape, dtype=torch.bfloat16)}
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    tensor.uniform_(-((3 / shape[-1]) ** 0.5), (3 / shape[-1]) ** 0.5, generator=generator)
    return field.apart_tensors(tensor) if field.apart else {field.hf: tensor}


@torch.no_grad()
def main() -> None:
    """Measure, and write the table."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        write_model(Path(temporary))
        return_freed_blocks()
        with peak_growth() as grown:
            model = load(temporary, dtype="auto", weights="int4")
            ids = torch.randint(model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(1))
            generate(model, ids, max_new_tokens=NEW)
        memory = Memory(model.config, itemsize=2, quantized_bits=4)
        formula = memory.weights + memory.prefill(1, PROMPT + NEW)
        elements = model.config.elements / 1e9
        rows.append(
            [
                f"{elements:.1f}B",
                "int4",
                f"{grown.bytes / GB:.3f}",
                f"{formula / GB:.3f}",
                f"{grown.bytes / formula:.3f}x",
            ]
        )
    header = [f"parameters, {processor()}", "weights", "measured, GB", "formula, GB", "measured / formula"]
    print_or_publish("memory-of-experts", markdown(header, rows))


if __name__ == "__main__":
    sys.exit(main())
