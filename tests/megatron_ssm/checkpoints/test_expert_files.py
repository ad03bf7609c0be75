"""Files of experts, one by one and merged. Oracle: transformers' files."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_ssm
from cases import oracle

__all__ = ["oracle"]


def rewritten(source, target, change):
    """A directory whose tensors change(tensors) has changed."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def merge(tensors):
    """Merge the experts' matrices, as Qwen3.5's published files have them."""
    layers = sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name})
    for layer in layers:
        names = {
            part: [n for n in tensors if n.startswith(f"{layer}.experts.") and part in n]
            for part in ("gate", "up", "down")
        }
        count = len(names["down"])
        matrices = {
            part: [tensors.pop(f"{layer}.experts.{index}.{part}_proj.weight") for index in range(count)]
            for part in names
        }
        gate_up = [torch.cat(pair) for pair in zip(matrices["gate"], matrices["up"], strict=True)]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.experts.down_proj"] = torch.stack(matrices["down"])


@pytest.mark.parametrize("world", (1, 2))
def test_merged_files_are_read_and_written(ranks, world, oracle, tmp_path):
    """The same model as from files one by one, and the same file again."""
    apart = oracle("qwen3.5-experts").directory
    merged = rewritten(apart, tmp_path / "merged", merge)
    ids = oracle("qwen3.5-experts").ids

    def run(rank):
        group = torch.distributed.group.WORLD
        first, second = (megatron_ssm.load(directory, group) for directory in (apart, merged))
        megatron_ssm.save(second, tmp_path / "saved")
        with torch.no_grad():
            return torch.equal(first(ids), second(ids))

    assert all(ranks(run, world))
    before, after = (load_file(directory / "model.safetensors") for directory in (merged, tmp_path / "saved"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("lost", ("model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.0.mlp.gate.weight"))
def test_a_missing_expert_is_named(lost, oracle, tmp_path):
    broken = rewritten(oracle("qwen3.5-experts").directory, tmp_path / "broken", lambda tensors: tensors.pop(lost))
    with pytest.raises(ValueError, match=f"has no tensor {lost}"):
        megatron_ssm.load(broken)
