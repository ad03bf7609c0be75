"""The memory of a rank. Oracle: the bytes of a model and its cache, and what torch's allocator recorded."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

import megatron_ssm
from benchmarks.support.live_memory import peak_allocated
from cases import MARKED, SEQ, WIDE_CASES, groups_of, oracle, wide_model
from megatron_ssm import families
from megatron_ssm.kernels import kernels, matrices
from megatron_ssm.model.memory import Memory
from megatron_ssm.parallel import operators

__all__ = ["oracle"]
BATCH, PROMPT = 32, 256


def weights_and_cache(rank, directory, dtype):
    """(bytes of the parameters, of a cache), measured and by the formula."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    model = megatron_ssm.load(directory, group, dtype=dtype)
    memory = Memory(model.config, dist.get_world_size(), dtype.itemsize)
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    return (weights, model.new_cache(3, SEQ).nbytes), (memory.weights, memory.cache(3, SEQ))


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_weights_and_cache(name, world_size, oracle, ranks):
    for dtype in (torch.float32, torch.bfloat16):
        measured, formula = ranks(weights_and_cache, world_size, oracle(name).directory, dtype)[0]
        assert measured == formula


@pytest.mark.parametrize("weights, bits", (("int8", 8), ("int4", 4)))
@pytest.mark.parametrize("name", ("mamba", "zamba2", "nemotron-experts", "qwen3.5-experts", "granite"))
def test_quantized_weights(name, weights, bits, tmp_path):
    wide_model(name).save_pretrained(tmp_path)
    model = megatron_ssm.load(tmp_path, weights=weights)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    assert Memory(model.config, 1, 4, quantized_bits=bits).weights == sum(held.values())


@pytest.mark.parametrize("weights, bits", (("int8", 8), ("int4", 4)))
def test_quantized_experts_that_ranks_have_in_whole_blocks(ranks, weights, bits, tmp_path):
    """Three blocks of 64 channels on two ranks: the first one has two."""
    wide_model("nemotron-experts", moe_intermediate_size=192).save_pretrained(tmp_path)

    def held(rank):
        model = megatron_ssm.load(tmp_path, dist.group.WORLD, weights=weights)
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        return sum(tensors.values()), Memory(families.read(tmp_path), 2, 4, quantized_bits=bits).weights

    measured, formula = ranks(held, 2)[0]
    assert measured == formula


@pytest.mark.parametrize("tp, ep", ((1, 2), (2, 2)))
@pytest.mark.parametrize("name", ("nemotron-experts", "qwen3.5-experts"))
@pytest.mark.parametrize("options", ({}, dict(dtype=torch.bfloat16), dict(weights="int8")), ids=str)
def test_weights_of_ranks_that_divide_the_experts(ranks, tp, ep, name, options, tmp_path):
    wide_model(name).save_pretrained(tmp_path)

    def held(rank):
        tensor, others = groups_of(rank, tp, ep)
        model = megatron_ssm.load(tmp_path, tensor, expert_group=others, **options)
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        shape = Memory(model.config, tp, model.dtype.itemsize, quantized_bits=8 if "weights" in options else 0)
        assert model.new_cache(3, SEQ).nbytes == shape.cache(3, SEQ)
        return sum(tensors.values()), replace(shape, expert_ranks=ep).weights

    for measured, formula in ranks(held, tp * ep):
        assert measured == formula


@torch.no_grad()
def peaks(rank, directory, dtype, experts=1):
    """The peaks of torch's allocator while a batch of prompts is read by modules only, and as usual; and the formula.

    The ranks use shared memory, because gloo's thread frees buffers at unpredictable times. The cache is added, because on
    Linux it is allocated in huge pages, which torch's allocator does not record. experts: ranks that divide the experts.
    """
    tensor, others = groups_of(rank, dist.get_world_size() // experts, experts)
    model = megatron_ssm.load(directory, tensor, dtype=dtype, expert_group=others)
    ids = torch.zeros(BATCH, PROMPT, dtype=torch.int64)
    caches = [model.new_cache(BATCH, PROMPT) for _ in range(2)]
    hooks = [layer.norm.register_forward_hook(lambda *_: None) for layer in model.layers]  # C would not call them
    by_modules = peak_allocated(lambda: model(ids, cache=caches[0], logits_to_keep=1))
    for hook in hooks:
        hook.remove()
    usual = peak_allocated(lambda: model(ids, cache=caches[1], logits_to_keep=1))
    options = dict(amx=torch.cpu._is_amx_tile_supported(), expert_ranks=experts)
    memory = Memory(model.config, dist.get_world_size() // experts, dtype.itemsize, **options)
    return by_modules + caches[0].nbytes, usual + caches[1].nbytes, memory.prefill(BATCH, PROMPT)


MULTIPLIES_BF16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="torch copies 16-bit tensors if the CPU cannot multiply them"
)


@pytest.fixture
def small_pieces(monkeypatch):
    """Many more tokens than are summed, or converted to another dtype, at once."""
    for module, constant in ((operators, "PIECE_NUMEL"), (matrices, "NUMBERS")):
        monkeypatch.setattr(module, constant, 2**14)
    monkeypatch.setattr(matrices, "TOKENS", 256)


@pytest.mark.skipif(kernels.LIBRARY.functions is None, reason="the formula is that of the C kernels")
@pytest.mark.parametrize("dtype", (torch.float32, pytest.param(torch.bfloat16, marks=MULTIPLIES_BF16)), ids=str)
@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize("name", by_default({"mamba", "mamba2-1-group", "zamba2"}, WIDE_CASES))
def test_prefill(name, world_size, dtype, ranks, tmp_path, small_pieces):
    wide_model(name).save_pretrained(tmp_path)
    for by_modules, usual, formula in ranks(peaks, world_size, tmp_path, dtype):
        assert formula == pytest.approx(by_modules, rel=0.03)
        assert usual < 1.05 * formula  # with the temporaries of a piece, which C keeps


@pytest.mark.skipif(kernels.LIBRARY.functions is None, reason="the formula is that of the C kernels")
@pytest.mark.parametrize("tp, ep", ((1, 2), pytest.param(2, 2, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", by_default(("nemotron-experts",), ("nemotron-experts", "qwen3.5-experts")))
def test_prefill_of_ranks_that_divide_the_experts(name, tp, ep, ranks, tmp_path, small_pieces):
    wide_model(name).save_pretrained(tmp_path)
    for by_modules, usual, formula in ranks(peaks, tp * ep, tmp_path, torch.float32, ep):
        assert formula == pytest.approx(by_modules, rel=0.03)
        assert usual < 1.05 * formula


@pytest.mark.parametrize("on_cuda", (False, True))
@pytest.mark.parametrize("degree", (1, 2, 4))
@pytest.mark.parametrize("name", WIDE_CASES)
def test_the_longest_prompt_and_the_largest_batch(name, degree, on_cuda, tmp_path):
    """They fit, and one more does not; nothing fits if the weights do not."""
    wide_model(name).config.save_pretrained(tmp_path)
    memory = Memory(families.read(tmp_path), degree, on_cuda=on_cuda)
    for spare in (0, 10**8, 10**9 + 1):
        budget = memory.weights + spare
        longest = memory.longest_prompt(budget, BATCH)
        assert memory.prefill(BATCH, longest) * bool(longest) <= spare < memory.prefill(BATCH, longest + 1)
        batch = memory.largest_batch(budget, PROMPT, 64)
        last = PROMPT - 64
        assert memory.prefill(batch, 64, last) <= spare < memory.prefill(batch + 1, 64, last)
    assert memory.longest_prompt(memory.weights - 1, 1) == memory.largest_batch(memory.weights - 1, 1, 1) == 0


@pytest.mark.parametrize(
    "name, added",
    (
        ("mamba", 2 * (5 * 512 + 2 * 16)),  # 16-bit copies and outputs with channels first; B and C
        (
            "mamba2-4-groups",
            4 * (2 * 512 * 32 // 256 + 4 * 256),
        ),  # two states for every 256 tokens; C B^T of each group
    ),
)
def test_cuda_kernels_need_more(name, added, tmp_path):
    """Bytes of a token at the scan, by the kernels' source."""
    wide_model(name).config.save_pretrained(tmp_path)
    config = families.read(tmp_path)
    ours, theirs = (Memory(config, on_cuda=on_cuda).stages()["scan"] for on_cuda in (False, True))
    assert theirs - ours == added
