"""The language models of multimodal checkpoints. Oracle: transformers' Qwen3_5ForConditionalGeneration, given text."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

import megatron_ssm
from hf import CONFIGS, SMALL, edit_config

IDS = torch.arange(22).view(2, 11) % 61
CLASSES = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
MODELS = [("qwen3_5", False), ("qwen3_5", True), ("qwen3_5_moe", False)]


@torch.no_grad()
def multimodal(directory, family, tied):
    """A small multimodal model, which it also saves."""
    make, model = CLASSES[family]
    text = SMALL | CONFIGS[f"{family}_text"][1]
    text |= dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = make(text_config=text, vision_config=vision, tie_word_embeddings=tied, eos_token_id=[5, 6])
    config.text_config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = model(config).eval()
    theirs.save_pretrained(directory)
    return theirs


def assert_loads(make, directory, expected):
    """transformers finds every tensor of `make` in the directory and none more, and computes these logits."""
    loaded, found = make.from_pretrained(directory, output_loading_info=True, experts_implementation="eager")
    assert not any(found.values()), found
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(input_ids=IDS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family, tied", MODELS)
@torch.no_grad()
def test_qwen(family, tied, tmp_path, caplog):
    """The outer tie_word_embeddings and dtype count, and nulls of the inner fields do not hide outer ones."""
    theirs = multimodal(tmp_path / "multimodal", family, tied)
    inner = json.loads((tmp_path / "multimodal/config.json").read_text())["text_config"]
    edit_config(tmp_path / "multimodal", text_config=inner | dict(dtype="bfloat16", eos_token_id=None))
    with caplog.at_level(logging.WARNING):
        model = megatron_ssm.load(tmp_path / "multimodal", dtype="auto")
    assert "left out of the checkpoint: the vision tower" in caplog.text
    assert model.config.eos_token_ids == (5, 6) and model.config.tie_embeddings == tied
    expected = theirs(input_ids=IDS).logits
    torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-5)
    megatron_ssm.save(model, tmp_path / "text")
    assert_loads(AutoModelForCausalLM, tmp_path / "text", expected)


@pytest.mark.parametrize("family, tied", MODELS)
@pytest.mark.parametrize("world", (1, 2))
def test_what_was_left_out_can_be_saved_too(ranks, world, family, tied, tmp_path):
    """The files have the same tensors as before, with the same names, and transformers loads them; here in two files."""
    theirs = multimodal(tmp_path / "before", family, tied)
    (tmp_path / "before/preprocessor_config.json").write_text("{}")

    def again(rank):
        model = megatron_ssm.load(tmp_path / "before", torch.distributed.group.WORLD)
        megatron_ssm.save(model, tmp_path / "after", file_bytes=60_000, left_out=True)

    ranks(again, world)
    before, after = ({}, {})
    for tensors, folder in ((before, "before"), (after, "after")):
        for file in (tmp_path / folder).glob("*.safetensors"):
            tensors |= load_file(file)
    assert len(list((tmp_path / "after").glob("*.safetensors"))) > 1 and before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (tmp_path / "after/preprocessor_config.json").exists()
    with torch.no_grad():
        assert_loads(CLASSES[family][1], tmp_path / "after", theirs(input_ids=IDS).logits)
