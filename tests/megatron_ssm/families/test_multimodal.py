"""The language models of multimodal checkpoints. Oracle: transformers' Qwen3_5ForConditionalGeneration, given text."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

import megatron_ssm
from hf import CONFIGS, SMALL

IDS = torch.arange(22).view(2, 11) % 61


@pytest.mark.parametrize("tied", (False, True))
@torch.no_grad()
def test_qwen(tied, tmp_path, caplog):
    """The outer tie_word_embeddings counts, and nulls of the inner fields do not hide outer ones."""
    text = (
        SMALL
        | CONFIGS["qwen3_5_text"][1]
        | dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    )
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied, eos_token_id=[5, 6])
    torch.manual_seed(0)
    theirs = Qwen3_5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "multimodal")
    with caplog.at_level(logging.WARNING):
        model = megatron_ssm.load(tmp_path / "multimodal")
    assert "left out of the checkpoint: the vision tower" in caplog.text
    assert model.config.eos_token_ids == (5, 6) and model.config.tie_embeddings == tied
    expected = theirs(input_ids=IDS).logits
    torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-5)
    megatron_ssm.save(model, tmp_path / "text")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    torch.testing.assert_close(saved(IDS).logits, expected, rtol=0, atol=1e-5)
