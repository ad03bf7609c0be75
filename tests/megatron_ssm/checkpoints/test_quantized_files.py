"""Directories of quantized models. Oracle: the same model quantized at load, and the arithmetic of the format."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import megatron_ssm
from hf import hf_model
from megatron_ssm.checkpoints.convert import convert
from megatron_ssm.cli.main import main
from serving import attempt

# Of a size whose matrices have whole blocks on two ranks
WIDE = dict(hidden_size=128, num_hidden_layers=2, vocab_size=67)
MODELS = {
    "mamba": dict(),
    "mamba2": dict(num_heads=8, head_dim=32, n_groups=1),
    "zamba": dict(num_hidden_layers=3, intermediate_size=256, n_mamba_heads=2),
    "zamba2": dict(num_hidden_layers=3, intermediate_size=256, add_bias_linear=True),
    "nemotron_h": dict(num_hidden_layers=3, intermediate_size=256, mamba_num_heads=8, mamba_head_dim=32, head_dim=32),
    "falcon_h1": dict(mamba_d_ssm=256, mamba_d_head=32, intermediate_size=256, head_dim=32, num_key_value_heads=1),
    # Experts of three blocks, of which one of two ranks has two. Files have them one by one, or all in one tensor.
    "qwen3_5_moe_text": dict(moe_intermediate_size=192, shared_expert_intermediate_size=128),
    "granitemoehybrid": dict(
        intermediate_size=192, num_local_experts=4, num_experts_per_tok=2, mamba_n_heads=8, mamba_d_head=32,
        shared_intermediate_size=128,
    ),
}  # fmt: skip
IDS = torch.randint(67, (2, 21), generator=torch.Generator().manual_seed(0))


def saved(directory, family, dtype=torch.bfloat16):
    hf_model(family, **WIDE | MODELS[family]).to(dtype).save_pretrained(directory)
    return directory


def results(directory, **options):
    """Logits of a prompt and of decoding, and the sequences that are generated."""
    model = megatron_ssm.load(directory, dist.group.WORLD, dtype=torch.float32, **options)
    with torch.no_grad():
        cache = model.new_cache(2)
        logits = [model(IDS[:, :-1], cache=cache), model(IDS[:, -1:], cache=cache)]
    return model.weights, *logits, megatron_ssm.generate(model, IDS[:, :5], max_new_tokens=6)


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("weights", ("int8", "int4"))
@pytest.mark.parametrize("family", MODELS)
def test_it_is_the_model_that_is_quantized_at_load(ranks, tp, weights, family, tmp_path):
    source, target = saved(tmp_path / "source", family), tmp_path / "quantized"
    rows = convert(source, target, weights=weights)
    assert any(row.dtype == weights for row in rows)
    wanted = ranks(lambda rank: results(source, weights=weights), tp)
    for found, expected in zip(ranks(lambda rank: results(target), tp), wanted, strict=True):
        assert found[0] == expected[0] == weights
        assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


@pytest.mark.parametrize("weights, bits", (("int8", 8), ("int4", 4)))
def test_the_format_is_that_of_the_page(weights, bits, tmp_path):
    source, target = saved(tmp_path / "source", "mamba2", torch.float32), tmp_path / "quantized"
    assert main(["convert", "--model", str(source), "--weights", weights, "--out", str(target)]) in (0, None)
    tensors, original = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    name = "backbone.layers.0.mixer.in_proj.weight"
    values, scales, whole = tensors[name], tensors[name + ".scales"], original[name]
    assert values.dtype == (torch.int8 if bits == 8 else torch.uint8) and scales.dtype == torch.float32
    if bits == 4:  # 16 words of 16 bits in each block; the p-th 4 bits of word j are column 16 p + j
        words = values.view(torch.int16).to(torch.int32).unflatten(1, (-1, 16))
        numbers = torch.stack([(words >> 4 * p) & 15 for p in range(4)], 2).flatten(1)
        values = numbers - 16 * (numbers > 7)
    read = values.float() * scales.repeat_interleave(64, 1)
    steps = scales.repeat_interleave(64, 1).abs()
    assert ((read - whole).abs() <= (0.501 if bits == 8 else 1.75) * steps).all()
    assert tensors["backbone.layers.0.mixer.D"].equal(original["backbone.layers.0.mixer.D"])
    raw = json.loads((target / "config.json").read_text())
    assert raw["quantization_config"] == {"quant_method": "megatron_ssm", "weights": weights, "block_size": 64}


def test_ranks_that_have_parts_of_blocks_keep_floating_point(ranks, tmp_path):
    """Four ranks have 32 of the 128 columns of down_proj: they read the quantized numbers."""
    source, target = saved(tmp_path / "source", "nemotron_h"), tmp_path / "quantized"
    convert(source, target, weights="int8")
    alone = results_alone(target)
    for found in ranks(lambda rank: results(target)[1], 4):
        torch.testing.assert_close(found, alone, rtol=0, atol=0.2)  # products of quantized rows round x as well


def results_alone(directory):
    with torch.no_grad():
        return megatron_ssm.load(directory)(IDS[:, :-1])


@pytest.mark.parametrize("family", MODELS)
def test_in_bfloat16_it_is_the_model_that_is_loaded_in_bfloat16(family, tmp_path):
    """Also what such a model keeps in float32; transformers loads the directory, too."""
    source, target = saved(tmp_path / "source", family, torch.float32), tmp_path / "bfloat16"
    assert main(["convert", "--model", str(source), "--weights", "bfloat16", "--out", str(target)]) in (0, None)
    found, expected = megatron_ssm.load(target), megatron_ssm.load(source, dtype=torch.bfloat16)
    for (name, one), (_, other) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert one.dtype == other.dtype and one.equal(other), name
    size, whole = ((d / "model.safetensors").stat().st_size for d in (target, source))
    assert size < 0.6 * whole
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(IDS).logits, megatron_ssm.load(target, dtype=torch.float32)(IDS), rtol=1e-4, atol=1e-4
        )


def test_what_is_refused(tmp_path):
    source, target = saved(tmp_path / "source", "mamba2"), tmp_path / "int4"
    convert(source, target, weights="int4")
    assert attempt(megatron_ssm.load, target, weights="int8") == (
        "ValueError",
        f"weights='int8': {target} holds matrices in int4",
    )
    model = megatron_ssm.load(target)
    assert attempt(megatron_ssm.save, model, tmp_path / "out")[0] == "ValueError"
    assert attempt(convert, target, tmp_path / "again", weights="int8")[0] == "ValueError"
    assert not (tmp_path / "again").exists()
    tensors = load_file(target / "model.safetensors")
    del tensors["backbone.embeddings.weight.scales"]
    save_file(tensors, target / "model.safetensors")
    assert "backbone.embeddings.weight.scales (67, 2)" in attempt(megatron_ssm.load, target)[1]
