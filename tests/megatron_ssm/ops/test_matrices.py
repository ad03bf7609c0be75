"""Models with int8 weights. Oracle: the same model in float64, with each matrix replaced by its rounded values."""

import copy
import math
import platform
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megatron_ssm
from hf import save_hf
from megatron_ssm.native import kernels
from megatron_ssm.ops import matrices
from megatron_ssm.ops.matrices import Int8Weight, linear, rows_at

FAMILIES = {  # wide enough that the rows of every matrix, split over two ranks, are whole blocks
    "mamba": dict(num_hidden_layers=2),
    "mamba2": dict(num_hidden_layers=2, n_groups=1, head_dim=32, tie_word_embeddings=False),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        num_hidden_layers=3,
        mamba_ngroups=2,
        intermediate_size=256,
    ),
}
HIDDEN, VOCAB = 128, 61
IDS = torch.arange(22).view(2, 11) % VOCAB
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """directory_of(family): the directory of a model, which is saved once."""

    @cache
    def of(family):
        folder = tmp_path_factory.mktemp(family)
        save_hf(folder, family, hidden_size=HIDDEN, vocab_size=VOCAB, **FAMILIES[family])
        return folder

    return of


def rounded_to_int8(weight):
    """A matrix rounded to int8, in float64. Each block of 64 has the scale max(abs(w)) / 127; halves round to even."""
    blocks = weight.float().view(len(weight), -1, 64)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    integers = (blocks / scale).round().nan_to_num().double()  # a block of zeros gives NaN
    return (integers * scale.double()).view_as(weight)


def round_matrices(model, int8):
    """Round the matrices of a float64 model that the model `int8` holds in 8 bits; returns their number."""
    count = 0
    for name, module in int8.named_modules():
        if isinstance(getattr(module, "weight", None), Int8Weight):
            count += 1
            weight = model.get_submodule(name).weight
            for part in weight.parameters() if isinstance(weight, torch.nn.Module) else [weight]:
                part.data.copy_(rounded_to_int8(part.data))
    return count


def logits_of(model):
    """The logits of a prompt and of the tokens after it, which are decoded one by one."""
    with torch.no_grad():
        cache = model.new_cache(2, 30)
        parts = [model(IDS[:, :8], cache=cache)] + [model(IDS[:, t : t + 1], cache=cache) for t in range(8, 11)]
        return torch.cat(parts, dim=1)


@families
def test_an_int8_model_is_the_model_of_its_rounded_weights(family, directory_of):
    int8 = megatron_ssm.load(directory_of(family), weights="int8")
    exact = megatron_ssm.load(directory_of(family), dtype=torch.float64)
    before = logits_of(exact)
    assert round_matrices(exact, int8) >= 2 * 2 + 1  # each layer's in_proj and out_proj, and the head
    expected = logits_of(exact)
    assert (expected - before).abs().max() > 1e-4  # rounding has an effect
    torch.testing.assert_close(logits_of(int8).double(), expected, rtol=0, atol=1e-3 if family == "zamba2" else 1e-4)


@pytest.mark.parametrize("tp", (1, 2))
@families
def test_ranks_round_as_one_rank_does(ranks, tp, family, directory_of):
    """Also covers bfloat16, and deep copies, which compute the same."""
    directory = directory_of(family)
    alone = logits_of(megatron_ssm.load(directory, weights="int8"))

    def on(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD, weights="int8")
        logits = logits_of(model)
        assert torch.equal(logits_of(copy.deepcopy(model)), logits)
        narrow = logits_of(megatron_ssm.load(directory, dist.group.WORLD, dtype=torch.bfloat16, weights="int8"))
        assert (narrow - logits).norm() <= 0.1 * logits.norm()
        return logits

    for logits in ranks(on, tp):
        torch.testing.assert_close(logits, alone, rtol=0, atol=3e-4)


def test_rounded_weights_cannot_be_saved_or_trained(directory_of, tmp_path):
    model = megatron_ssm.load(directory_of("mamba"), weights="int8")
    with pytest.raises(ValueError, match="weights='int8' cannot be saved"):
        megatron_ssm.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="weights='int8' cannot be trained"):
        model.loss(IDS, IDS)
    with torch.no_grad():
        loss = model.loss(IDS, IDS)
        torch.testing.assert_close(loss, megatron_ssm.load(directory_of("mamba")).loss(IDS, IDS), rtol=0, atol=0.05)
    for wrong in ("int4", 8, torch.int8):
        with pytest.raises(ValueError, match="is neither None nor 'int8'"):
            megatron_ssm.load(directory_of("mamba"), weights=wrong)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float16, 0.05), (torch.float64, 1e-5)])
def test_an_int8_model_of_another_dtype(directory_of, dtype, tolerance):
    """Its scales stay float32, because the C kernels read them as float32."""
    model = megatron_ssm.load(directory_of("mamba2"), weights="int8")
    expected = logits_of(model)
    assert (logits_of(model.to(dtype)).double() - expected).norm() <= tolerance * expected.norm()
    assert all(m.scales.dtype == torch.float32 for m in model.modules() if isinstance(m, Int8Weight))


def test_matrices_without_whole_blocks_are_not_rounded(tmp_path, caplog):
    """A model with no other matrix is an error; else a warning counts them. They require no gradient either."""
    save_hf(tmp_path / "none", "mamba", hidden_size=48, num_hidden_layers=1)
    with pytest.raises(
        ValueError,
        match="quantizes nothing of .*none: all 3 matrices have rows, on 1 ranks, whose length is not a multiple",
    ):
        megatron_ssm.load(tmp_path / "none", weights="int8")
    save_hf(tmp_path / "some", "mamba", hidden_size=32, num_hidden_layers=1)  # out_proj's rows are 64 long
    with caplog.at_level("WARNING", "megatron_ssm"):
        model = megatron_ssm.load(tmp_path / "some", weights="int8")
    assert "2 of 3 matrices have rows, on 1 ranks, whose length is not a multiple of 64" in caplog.text
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(IDS).sum().backward()


def test_int8_takes_a_quarter_of_the_bytes(directory_of):
    def nbytes(model):
        return sum(t.nbytes for t in model.state_dict().values())

    whole, int8 = (nbytes(megatron_ssm.load(directory_of("mamba2"), weights=matrices)) for matrices in (None, "int8"))
    assert 0.25 * whole < int8 < 0.32 * whole


@pytest.mark.parametrize("rows", (1, 3, 40), ids=str)
@torch.no_grad()
def test_int8_matrices(rows):
    """C multiplies few rows, torch many; rows and blocks of zeros stay zero."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(5, 192, generator=generator)
    weight[1] = 0
    weight[2, 64:128] = 0
    matrix, x = Int8Weight.of(weight), torch.randn(rows, 192, generator=generator)
    assert kernels.should_multiply(x, matrix.values) == (rows <= kernels.ROWS[torch.int8] and bool(kernels.LIBRARY))
    torch.testing.assert_close(linear(x, matrix).double(), x.double() @ rounded_to_int8(weight).T, rtol=0, atol=1e-4)
    index = torch.tensor([[2, 0], [1, 1]])
    torch.testing.assert_close(rows_at(matrix, index).double(), rounded_to_int8(weight)[index], rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", (1024, 20))
@pytest.mark.parametrize("widens", (False, True), ids=("native", "widened"))
@pytest.mark.parametrize("dtype", (torch.float32, *kernels.HALVES), ids=str)
@torch.no_grad()
def test_products_of_more_rows(monkeypatch, dtype, widens, tokens):
    """Covers processors with and without 16-bit products, and matrices and x that are multiplied in several pieces."""
    monkeypatch.setattr(matrices, "TOKENS", tokens)
    multiplied, product_of = [], F.linear
    monkeypatch.setattr(kernels, "is_faster_in_float32", lambda dtype: widens and dtype in kernels.HALVES)
    monkeypatch.setattr(matrices, "NUMBERS", 3 * 128 + 1)
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: multiplied.append((w.dtype, len(w))) or product_of(x, w, b))
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(11, 128, generator=generator), torch.randn(11, generator=generator).to(dtype)
    x = torch.randn(2, 25, 128, generator=generator).to(dtype)
    wide = torch.float32 if widens else dtype
    pieces, whole = [(wide, 3), (wide, 3), (wide, 3), (wide, 2)] * math.ceil(50 / tokens), [(dtype, 11)]
    cases = [
        (weight.to(dtype), weight.to(dtype).double(), whole if wide is dtype else pieces),
        (Int8Weight.of(weight), rounded_to_int8(weight), pieces),
    ]
    for (matrix, exact, expected), added in product(cases, (None, bias)):
        multiplied.clear()
        y, sum_of_products = linear(x, matrix, added), x.double() @ exact.T + (0 if added is None else added.double())
        assert y.dtype == dtype and y.shape == sum_of_products.shape and multiplied == expected
        assert (y.double() - sum_of_products).norm() <= 4 * torch.finfo(dtype).eps * sum_of_products.norm()


@torch.no_grad()
def test_products_that_are_not_widened(monkeypatch):
    """Few rows, autocast, and empty inputs."""
    monkeypatch.setattr(kernels, "is_faster_in_float32", lambda dtype: dtype in kernels.HALVES)
    weight = torch.randn(70, 128)
    few, many = torch.randn(8, 128).half(), torch.randn(50, 128)
    assert torch.equal(linear(few, weight.half()), F.linear(few, weight.half()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for matrix in (Int8Weight.of(weight), weight.bfloat16()):
            y = linear(many, matrix)
            assert y.dtype == torch.bfloat16
            assert (y.double() - many.double() @ weight.double().T).norm() <= 0.02 * y.double().norm()
    for rows in (0, 50):
        assert linear(torch.randn(2, rows, 128), Int8Weight.of(weight)).shape == (2, rows, 70)


def test_which_processors_multiply_16_bit_numbers():
    """Our answer agrees with the processor flags that Linux reports."""
    cpuinfo = Path("/proc/cpuinfo")
    if not kernels.LIBRARY or platform.machine() != "x86_64" or not cpuinfo.is_file():
        pytest.skip("no C library, or not Linux on x86")
    flags = set(cpuinfo.read_text().partition("flags")[2].partition("\n")[0].split())
    assert kernels.is_faster_in_float32(torch.bfloat16) == ("avx512_bf16" not in flags)
    assert kernels.is_faster_in_float32(torch.float16) == ("avx512_fp16" not in flags)
    assert not kernels.is_faster_in_float32(torch.float32)


@torch.no_grad()
def test_a_model_turned_into_bfloat16(directory_of):
    """Its A_log, D and dt biases are bfloat16 too, and the C kernels must not read them as float32."""
    model = megatron_ssm.load(directory_of("mamba2")).bfloat16()
    expected = logits_of(megatron_ssm.load(directory_of("mamba2")))
    assert (logits_of(model) - expected).norm() <= 0.05 * expected.norm()
    half = partial(megatron_ssm.load, directory_of("mamba"), dtype=torch.float16)
    assert (logits_of(half()) - logits_of(megatron_ssm.load(directory_of("mamba")))).norm() <= 0.01 * expected.norm()
