"""Every family against transformers, on 1, 2 and 4 ranks: logits, greedy tokens, all-reduces, cache (about 2 min).

The claims are the rows of the table of families. The models are those of the tests (tests/helpers/hf.py): small, in fp32,
with weights rescaled so that logits are of the order of 1 to 10. The counts of all-reduces hold for models of every size.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

import torch
import torch.distributed as dist
from transformers.utils import logging

import megatron_ssm
from benchmarks.support.tables import markdown, publish
from hf import cache_name, hf_model
from megatron_ssm import families
from ranks import run_ranks

SEQ, DECODED, NEW, BATCH = 64, 4, 16, 2
FAMILIES = {
    "Mamba": ("mamba", {}),
    "Falcon-Mamba": ("falcon_mamba", {}),
    "Mamba-2, 1 group": ("mamba2", dict(n_groups=1)),
    "Mamba-2, 2 groups": ("mamba2", dict(n_groups=2)),
    "Zamba, 2 heads": ("zamba", dict(num_hidden_layers=4)),
    "Zamba2, 2 blocks": ("zamba2", dict(num_hidden_layers=4, use_shared_attention_adapter=True, use_mem_rope=True)),
    "Nemotron-H, 2 groups": ("nemotron_h", {}),
    "Granite 4.0 H, 2 groups": ("granitemoehybrid", {}),
    "Bamba, 2 groups": ("bamba", {}),
    "Falcon-H1": ("falcon_h1", {}),
    "Jamba": ("jamba", {}),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Qwen3-Next": ("qwen3_next", {}),
    "OLMo Hybrid": ("olmo_hybrid", {}),
}


@torch.no_grad()
def theirs(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """transformers' logits of one forward pass, those of the last DECODED tokens with its cache, and NEW greedy tokens."""
    output, decoded = model(ids[:, :-DECODED], use_cache=True), []
    name = cache_name(output)
    for i in range(SEQ - DECODED, SEQ):
        where = {"position_ids": torch.full((BATCH, 1), i)} if model.config.model_type == "bamba" else {}
        output = model(ids[:, i : i + 1], use_cache=True, **{name: output[name]}, **where)
        decoded.append(output.logits)
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, eos_token_id=None)
    return model(ids, use_cache=False).logits, torch.cat(decoded, 1), tokens


@torch.no_grad()
def ours(rank: int, directory: str, ids: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], float, int]:
    """(results, all-reduces per decoded token, bytes of one sequence's cache on this rank) of megatron_ssm.

    results: logits of one forward pass, of a prompt in chunks and of the last DECODED tokens, and NEW greedy tokens.
    """
    model = megatron_ssm.load(directory, dist.group.WORLD)
    cache, cuts = model.new_cache(BATCH, SEQ), (0, 7, 9, 40, SEQ - DECODED)
    pieces = [model(ids[:, i:j], cache=cache) for i, j in zip(cuts, cuts[1:], strict=False)]
    model.counter.reset()
    decoded = [model(ids[:, i : i + 1], cache=cache) for i in range(SEQ - DECODED, SEQ)]
    calls = model.counter.calls["all_reduce"] / DECODED
    tokens = model.generate(ids, max_new_tokens=NEW, eos_token_id=None, pad_token_id=None)
    return (model(ids), torch.cat(pieces, 1), torch.cat(decoded, 1), tokens), calls, cache.nbytes // BATCH


def measure(family: str, changes: dict[str, Any]) -> list[str]:
    """The cells of one row: the largest differences over 1, 2 and 4 ranks, and the counts on each number of ranks."""
    ids = torch.randint(61, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    model = hf_model(family, **changes)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        whole, decoded, tokens = theirs(model, ids)
        with torch.no_grad():
            exact = megatron_ssm.load(directory, dtype=torch.float64)(ids)
        errors, calls, cache, same, ratio = [0.0, 0.0, 0.0], [], [], True, 0.0
        for world in (1, 2, 4):
            results, count, nbytes = run_ranks(ours, world, directory, ids)[0]
            expected = whole, whole[:, : SEQ - DECODED], decoded
            differences = [(a - b).abs().max().item() for a, b in zip(results, expected, strict=False)]
            errors = [max(pair) for pair in zip(errors, differences, strict=True)]
            ratio = max(ratio, ((results[0] - exact).square().mean() / (whole - exact).square().mean()).sqrt().item())
            same &= torch.equal(results[3], tokens)
            calls.append(f"{count:g}")
            cache.append(str(nbytes))
    layers, hybrid = model.config.num_hidden_layers, len(families.from_dict(model.config.to_dict()).attentions)
    size = f"{layers}" + (f" ({hybrid} hybrid)" if hybrid else "")
    return [size, *(f"{e:.0e}" for e in errors), f"{ratio:.2f}", "same" if same else "differ", " / ".join(calls[1:]),
            " / ".join(cache)]  # fmt: skip


def main() -> None:
    """Measure every family and publish the table."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    header = ["model", "layers", "prefill", "chunks", "decode", "error / theirs", "greedy tokens",
              "all-reduces per token, TP 2 / 4", "cache bytes per rank, TP 1 / 2 / 4"]  # fmt: skip
    publish("families", markdown(header, [[name, *measure(*family)] for name, family in FAMILIES.items()]))


if __name__ == "__main__":
    main()
