"""The language models of multimodal checkpoints. Oracle: transformers' Qwen3_5ForConditionalGeneration, given text."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

import megatron_ssm
from hf import CONFIGS, SMALL

IDS = torch.arange(22).view(2, 11) % 61


@torch.no_grad()
def multimodal(directory, tied):
    """A small multimodal model, which it also saves."""
    text = (
        SMALL
        | CONFIGS["qwen3_5_text"][1]
        | dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    )
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied, eos_token_id=[5, 6])
    torch.manual_seed(0)
    theirs = Qwen3_5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(directory)
    return theirs


@pytest.mark.parametrize("tied", (False, True))
@torch.no_grad()
def test_qwen(tied, tmp_path, caplog):
    """The outer tie_word_embeddings counts, and nulls of the inner fields do not hide outer ones."""
    theirs = multimodal(tmp_path / "multimodal", tied)
    with caplog.at_level(logging.WARNING):
        model = megatron_ssm.load(tmp_path / "multimodal")
    assert "left out of the checkpoint: the vision tower" in caplog.text
    assert model.config.eos_token_ids == (5, 6) and model.config.tie_embeddings == tied
    expected = theirs(input_ids=IDS).logits
    torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-5)
    megatron_ssm.save(model, tmp_path / "text")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    torch.testing.assert_close(saved(IDS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("world", (1, 2))
def test_what_was_left_out_can_be_saved_too(ranks, world, tied, tmp_path):
    """The files have the same tensors as before, with the same names, and transformers loads them; here in two files."""
    theirs = multimodal(tmp_path / "before", tied)
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
    loaded = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "after").eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, theirs(input_ids=IDS).logits)
