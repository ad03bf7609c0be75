"""The activations of a training step. Oracle: what torch's allocator recorded."""

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

import megatron_ssm
from attention2d import Ring
from benchmarks.support.live_memory import peak_allocated
from hf import hf_model
from megatron_ssm.native import kernels
from megatron_ssm.sizing.activations import TrainingMemory

HYBRID = dict(num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"])
SSD = dict(mamba_num_heads=8, mamba_head_dim=64, ssm_state_size=64)
WIDE = dict(mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64)
DELTA = dict(
    linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=64, head_dim=64
)
CASES = {
    "mamba": ("mamba", dict(state_size=16)),
    "falcon": ("falcon_mamba", dict(intermediate_size=512)),
    "mamba2-1-group": ("mamba2", dict(num_heads=8, head_dim=64, n_groups=1, state_size=64)),
    "mamba2-4-groups": ("mamba2", dict(num_heads=8, head_dim=64, n_groups=4, state_size=32)),
    "zamba": ("zamba", dict(HYBRID, intermediate_size=1024)),
    "zamba2": ("zamba2", dict(HYBRID, intermediate_size=512, mamba_ngroups=1)),
    "nemotron": ("nemotron_h", dict(num_hidden_layers=3, head_dim=64, intermediate_size=512, **SSD, n_groups=4)),
    "granite": ("granitemoehybrid", dict(shared_intermediate_size=512, **WIDE, mamba_n_groups=4)),
    "falcon-h1": ("falcon_h1", dict(intermediate_size=512, **WIDE, mamba_d_ssm=512)),
    "falcon-h1-norm": ("falcon_h1", dict(intermediate_size=512, **WIDE, mamba_d_ssm=512, mamba_rms_norm=True)),
    "jamba": ("jamba", dict(intermediate_size=512, mamba_d_state=16, mamba_dt_rank=16)),
    "qwen3.5": ("qwen3_5_text", dict(intermediate_size=512, **DELTA)),
    "qwen3.5-experts": (
        "qwen3_5_moe_text",
        dict(moe_intermediate_size=128, shared_expert_intermediate_size=256, num_experts_per_tok=2, **DELTA),
    ),
    "nemotron-experts": (
        "nemotron_h",
        dict(layers_block_type=["moe", "full_attention"], n_routed_experts=8, num_experts_per_tok=2, head_dim=64, **SSD)
        | dict(moe_intermediate_size=256, moe_shared_expert_intermediate_size=128, moe_latent_size=128, n_groups=4),
    ),
    "olmo": ("olmo_hybrid", dict(intermediate_size=512, **DELTA)),
}
TOKENS = 2048
SMALL = dict(hidden_size=256, num_hidden_layers=2, vocab_size=64)
needs_kernels = pytest.mark.skipif(kernels.LIBRARY.functions is None, reason="the formula is that of the C kernels")


def peak(model, ids):
    """The most bytes that a step allocates, beside parameters and their gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return peak_allocated(lambda: model.loss(ids, ids).backward())


@needs_kernels
@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("world, sequence_parallel", ((1, False), (2, False), (2, True)))
@pytest.mark.parametrize("vocab_size", (64, 4096))
@pytest.mark.parametrize("name", by_default({"mamba", "mamba2-1-group", "zamba2"}, CASES))
def test_the_peak_of_a_step(ranks, name, vocab_size, world, sequence_parallel, recompute, tmp_path):
    """With a vocabulary so small that a layer needs most, and with one whose logits do."""
    family, changes = CASES[name]
    hf_model(family, **SMALL | changes | dict(vocab_size=vocab_size)).save_pretrained(tmp_path)
    options = dict(sequence_parallel=sequence_parallel, recompute=recompute)

    def run(rank):
        model = megatron_ssm.load(tmp_path, dist.group.WORLD if world > 1 else None, **options)
        measured = peak(model, torch.zeros(1, TOKENS, dtype=torch.int64))
        return measured, TrainingMemory(model.config, world, **options).peak(1, TOKENS)

    for measured, formula in ranks(run, world):
        assert formula == pytest.approx(measured, rel=0.06)


@needs_kernels
@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize(
    "name, all_experts",
    (
        ("qwen3.5-experts", dict(num_experts=4, num_experts_per_tok=4)),
        ("nemotron-experts", dict(n_routed_experts=4, num_experts_per_tok=4)),
    ),
)
def test_ranks_divide_the_experts(ranks, name, all_experts, recompute, tmp_path):
    """Every token goes to all experts, and so to both ranks."""
    family, changes = CASES[name]
    hf_model(family, **SMALL | changes | all_experts).save_pretrained(tmp_path)

    def run(rank):
        world = dist.group.WORLD
        model = megatron_ssm.load(tmp_path, data_group=world, expert_group=world, recompute=recompute)
        measured = peak(model, torch.zeros(1, TOKENS, dtype=torch.int64))
        return measured, TrainingMemory(model.config, recompute=recompute, expert_ranks=2).peak(1, TOKENS)

    for measured, formula in ranks(run, 2):
        assert formula == pytest.approx(measured, rel=0.1)


@needs_kernels
@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("name", by_default({"mamba", "zamba2"}, [*CASES][::-1]))  # the largest first: on two ranks
def test_context_ranks_divide_the_tokens(ranks, name, world, tmp_path):
    family, changes = CASES[name]
    hf_model(family, **SMALL | changes).save_pretrained(tmp_path)

    def run(rank):
        schedule = Ring(dist.group.WORLD)
        model = megatron_ssm.load(tmp_path, context=schedule)
        measured = peak(model, torch.zeros(1, TOKENS // 2, dtype=torch.int64))
        return measured, TrainingMemory(model.config).peak(1, TOKENS // 2)

    for measured, formula in ranks(run, world):
        assert formula == pytest.approx(measured, rel=0.1)
