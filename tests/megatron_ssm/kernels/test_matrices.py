"""Models with 8-bit and 4-bit weights. Oracle: the same model in float64, each matrix replaced by its quantized values."""

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
from megatron_ssm.kernels import kernels, matrices, products, quantized_matrices
from megatron_ssm.kernels.matrices import linear, rows_at
from megatron_ssm.kernels.quantized_matrices import QUANTIZED_FORMATS, Int4Weight, Int8Weight, QuantizedMatrix, narrowed

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
formats = pytest.mark.parametrize("format", QUANTIZED_FORMATS)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """directory_of(family): the directory of a model, which is saved once."""

    @cache
    def of(family):
        folder = tmp_path_factory.mktemp(family)
        save_hf(folder, family, hidden_size=HIDDEN, vocab_size=VOCAB, **FAMILIES[family])
        return folder

    return of


def quantized_to_int8(weight):
    """A matrix quantized to int8, in float64. Each block of 64 has the scale max(abs(w)) / 127; halves round to even."""
    blocks = weight.float().view(len(weight), -1, 64)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    integers = (blocks / scale).round().nan_to_num().double()  # a block of zeros gives NaN
    return (integers * scale.double()).view_as(weight)


def quantized_to_int4(weight):
    """A matrix quantized to int4, in float64: column by column. The extreme of a block is -8, -7.5, -6.9 or -6.3 steps."""
    rounded = torch.zeros_like(weight, dtype=torch.float64)
    for row, first in product(range(len(weight)), range(0, weight.shape[1], 64)):
        block = weight[row, first : first + 64].float()
        scales = [block[block.abs().argmax()] / -divisor for divisor in (8.0, 7.5, 6.9, 6.3)]
        tried = [(block / scale).round().clamp(-8, 7).nan_to_num() * scale for scale in scales]
        rounded[row, first : first + 64] = min(
            tried, key=lambda values: float((values - block).square().sum())
        ).double()
    return rounded


QUANTIZING = {Int8Weight: quantized_to_int8, Int4Weight: quantized_to_int4}


def quantize_matrices(model, quantized):
    """Quantize the matrices of a float64 model as `quantized` holds them; returns how many have 8 or 4 bits."""
    count = 0
    for name, parameter in quantized.named_parameters():
        if parameter.dtype is torch.bfloat16:
            exact = model.get_parameter(name)
            exact.data.copy_(exact.data.bfloat16())
    for name, module in quantized.named_modules():
        if isinstance(getattr(module, "weight", None), QuantizedMatrix):
            count += 1
            weight, quantizing = model.get_submodule(name).weight, QUANTIZING[type(module.weight)]
            for part in weight.parameters() if isinstance(weight, torch.nn.Module) else [weight]:
                part.data.copy_(quantizing(part.data))
    return count


def logits_of(model):
    """The logits of a prompt in chunks of few rows, and of the tokens after it, which are decoded one by one."""
    with torch.no_grad():
        cache = model.new_cache(2, 30)
        return torch.cat([model(ids, cache=cache) for ids in IDS.split([2, 2, 2, 2, 1, 1, 1], dim=1)], dim=1)


@formats
@families
def test_a_quantized_model_is_the_model_of_its_quantized_weights(family, format, directory_of):
    """Up to the rounding of the activations to 16 bits, in C."""
    quantized = megatron_ssm.load(directory_of(family), weights=format)
    exact = megatron_ssm.load(directory_of(family), dtype=torch.float64)
    before = logits_of(exact)
    assert quantize_matrices(exact, quantized) >= 2 * 2 + 1  # each layer's in_proj and out_proj, and the head
    expected = logits_of(exact)
    assert (expected - before).norm() > 5e-3 * before.norm()  # rounding has an effect
    assert (logits_of(quantized).double() - expected).norm() <= 5e-4 * expected.norm()


@pytest.mark.parametrize("tp", (1, 2))
@formats
@families
def test_ranks_quantize_as_one_rank_does(ranks, tp, family, format, directory_of):
    """Also covers bfloat16, and deep copies, which compute the same."""
    directory = directory_of(family)
    alone = logits_of(megatron_ssm.load(directory, weights=format))

    def on(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD, weights=format)
        logits = logits_of(model)
        assert torch.equal(logits_of(copy.deepcopy(model)), logits)
        narrow = logits_of(megatron_ssm.load(directory, dist.group.WORLD, dtype=torch.bfloat16, weights=format))
        assert (narrow - logits).norm() <= (0.1 if format == "int8" else 0.3) * logits.norm()
        return logits

    for logits in ranks(on, tp):
        assert (logits - alone).norm() <= 5e-4 * alone.norm()


@formats
def test_quantized_weights_cannot_be_saved_or_trained(directory_of, tmp_path, format):
    model = megatron_ssm.load(directory_of("mamba"), weights=format)
    with pytest.raises(ValueError, match=f"weights='{format}' cannot be saved"):
        megatron_ssm.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=f"weights='{format}' cannot be trained"):
        model.loss(IDS, IDS)
    with torch.no_grad():
        loss, tolerance = model.loss(IDS, IDS), 0.05 if format == "int8" else 0.5
        torch.testing.assert_close(
            loss, megatron_ssm.load(directory_of("mamba")).loss(IDS, IDS), rtol=0, atol=tolerance
        )


def test_formats_that_do_not_exist(directory_of):
    for wrong in ("int2", 8, torch.int8):
        with pytest.raises(ValueError, match="is neither None nor one of int8, int4"):
            megatron_ssm.load(directory_of("mamba"), weights=wrong)


@formats
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float16, 0.05), (torch.float64, 5e-4)])
def test_a_quantized_model_of_another_dtype(directory_of, dtype, tolerance, format):
    """Its scales stay float32, because the C kernels read them as float32."""
    model = megatron_ssm.load(directory_of("mamba2"), weights=format)
    expected = logits_of(model)
    assert (logits_of(model.to(dtype)).double() - expected).norm() <= tolerance * expected.norm()
    assert all(m.scales.dtype == torch.float32 for m in model.modules() if isinstance(m, QuantizedMatrix))


def test_matrices_without_whole_blocks_are_not_quantized(tmp_path, caplog):
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


@pytest.mark.parametrize("format, least, most", [("int8", 0.25, 0.32), ("int4", 0.13, 0.2)])
def test_the_bytes_of_quantized_weights(directory_of, format, least, most):
    """Relative to float32: with its scales a matrix takes 8.5 or 4.5 bits per element."""

    def nbytes(model):
        return sum(t.nbytes for t in model.state_dict().values())

    whole, quantized = (
        nbytes(megatron_ssm.load(directory_of("mamba2"), weights=matrices)) for matrices in (None, format)
    )
    assert least * whole < quantized < most * whole


@pytest.mark.parametrize("rows", (1, 3, 40), ids=str)
@pytest.mark.parametrize("kind", QUANTIZING)
@torch.no_grad()
def test_quantized_matrices(kind, rows):
    """Rows and blocks of zeros stay zero. Many rows of x are rounded to 8 bits or bfloat16 on some processors."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(5, 192, generator=generator)
    weight[1] = 0
    weight[2, 64:128] = 0
    matrix, x, exact = kind.of(weight), torch.randn(rows, 192, generator=generator), QUANTIZING[kind](weight)
    assert matrix.shape == weight.shape
    assert products.should_multiply(x, matrix.values) or rows == 40 or not kernels.LIBRARY
    y, expected = linear(x, matrix).double(), x.double() @ exact.T
    torch.testing.assert_close(y, expected, rtol=0, atol=0.3 if rows == 40 else 2e-3)
    index = torch.tensor([[2, 0], [1, 1]])
    torch.testing.assert_close(rows_at(matrix, index).double(), exact[index], rtol=0, atol=1e-6)
    assert rows_at(matrix, index[:, :0]).shape == (2, 0, 192)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.testing.assert_close(matrix.rows(slice(1, 4), dtype).double(), exact[1:4], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("rows", (1, 8, 24, 30, 60), ids=str)
@pytest.mark.parametrize("columns", (48, 1536))
def test_narrowed_matrices(rows, columns):
    """Only where C multiplies more than 16 rows, x may be rounded too. Under autocast, autocast's dtype counts."""
    generator = torch.Generator().manual_seed(rows)
    weight, x = narrowed(torch.randn(6, columns, generator=generator)), torch.randn(rows, columns, generator=generator)
    exact = x.double() @ weight.double().T
    with torch.no_grad():
        y = linear(x, weight)
        with torch.autocast("cpu"):
            assert linear(x, weight).dtype is torch.bfloat16
    is_rounded = rows > 16 and products.should_multiply(x, weight)
    assert y.dtype is torch.float32 and (y - exact).norm() <= (2**-8 if is_rounded else 1e-6) * exact.norm()
    with pytest.raises(RuntimeError, match="dtype"):  # a matrix that is trained has x's dtype
        linear(x, weight.requires_grad_())
    weight.requires_grad_(False)
    x.requires_grad_()
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.float().sum(0).expand_as(x))


@formats
def test_which_matrices_are_narrowed(directory_of, tmp_path, format):
    """Those of Mamba-1 in float32 with an even number of columns."""
    for dtype in (torch.float32, torch.float16, torch.float64):
        mixer = megatron_ssm.load(directory_of("mamba"), dtype=dtype, weights=format).layers[0].mixer
        kept = torch.bfloat16 if dtype is torch.float32 else dtype
        assert mixer.x_proj.dtype is mixer.dt_proj.dtype is kept
        assert mixer.conv.weight().dtype is mixer.new_state(1)["conv"].dtype is dtype
    save_hf(tmp_path, "mamba", hidden_size=64, time_step_rank=3)
    odd = megatron_ssm.load(tmp_path, weights=format)
    mixer = odd.layers[0].mixer
    assert mixer.dt_proj.dtype is torch.float32 and mixer.x_proj.dtype is torch.bfloat16
    assert logits_of(odd).isfinite().all()
    other = megatron_ssm.load(directory_of("mamba2"), weights=format)
    assert not any(parameter.dtype is torch.bfloat16 for parameter in other.parameters())


def test_values_that_are_not_finite():
    """In x they give NaN or Inf, in every product of their row."""
    x = torch.ones(3, 128)
    x[0, 70], x[1, 3] = float("nan"), float("-inf")
    for kind in QUANTIZING:
        with torch.no_grad():
            y = linear(x, kind.of(torch.linspace(1, 2, 6 * 128).view(6, 128)))
        assert not y[:2].isfinite().any() and y[2].isfinite().all()


@pytest.mark.parametrize("kind", QUANTIZING)
@torch.no_grad()
def test_weights_that_are_not_finite_or_large(kind):
    """NaN and Inf give NaN or Inf in every product of their row. In 4 bits, squares of large errors are infinite."""
    for bad in (float("nan"), float("inf"), float("-inf")):
        weight = torch.linspace(1, 2, 6 * 128).view(6, 128)
        weight[0, 70] = bad
        for rows in (1, 40):
            y = linear(torch.ones(rows, 128), kind.of(weight))
            assert not y[:, 0].isfinite().any() and y[:, 1:].isfinite().all()
    weight = 3e38 * torch.linspace(-1, 1, 6 * 128).view(6, 128)
    errors = kind.of(weight).rows(slice(None), torch.float64) - weight.double()
    assert errors.abs().max() <= 3e38 / 8  # one step in 4 bits


@pytest.mark.parametrize("tokens", (1024, 20))
@pytest.mark.parametrize("has_instructions", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, *matrices.HALVES), ids=str)
@torch.no_grad()
def test_products_by_torch(monkeypatch, dtype, has_instructions, tokens):
    """In x's own dtype; in float32 if that has 16 bits and the processor no instructions. In pieces of both factors."""
    monkeypatch.setattr(matrices, "TOKENS", tokens)
    multiplied, product_of = [], F.linear
    monkeypatch.setattr(products, "should_multiply", lambda *_: False)
    monkeypatch.setattr(products, "has_products_of", lambda _: has_instructions)
    chosen = dtype if has_instructions else torch.float32
    monkeypatch.setattr(matrices, "NUMBERS", 3 * 128 + 1)
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: multiplied.append((w.dtype, len(w))) or product_of(x, w, b))
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(11, 128, generator=generator), torch.randn(11, generator=generator).to(dtype)
    x = torch.randn(2, 25, 128, generator=generator).to(dtype)
    pieces = [(chosen, 3), (chosen, 3), (chosen, 3), (chosen, 2)] * math.ceil(50 / tokens)
    whole = [(dtype, 11)] if chosen is dtype else pieces
    cases = [(weight.to(dtype), weight.to(dtype).double(), whole)]
    cases += [(kind.of(weight), quantizing(weight), pieces) for kind, quantizing in QUANTIZING.items()]
    for (matrix, exact, expected), added in product(cases, (None, bias)):
        multiplied.clear()
        y, sum_of_products = linear(x, matrix, added), x.double() @ exact.T + (0 if added is None else added.double())
        assert y.dtype == dtype and y.shape == sum_of_products.shape and multiplied == expected
        error = 4 * max(torch.finfo(dtype).eps, torch.finfo(expected[0][0]).eps)
        assert (y.double() - sum_of_products).norm() <= error * sum_of_products.norm()


@torch.no_grad()
def test_products_that_are_not_converted(monkeypatch):
    """Few rows, autocast, and empty inputs."""
    monkeypatch.setattr(products, "has_products_of", lambda _: False)
    weight = torch.randn(70, 128)
    few, many = torch.randn(8, 128).half(), torch.randn(50, 128)
    assert torch.equal(linear(few, weight.half()), F.linear(few, weight.half()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for matrix in (Int8Weight.of(weight), weight.bfloat16()):
            y = linear(many, matrix)
            assert y.dtype == torch.bfloat16
            assert (y.double() - many.double() @ weight.double().T).norm() <= 0.02 * y.double().norm()
    for rows, kind in product((0, 50), QUANTIZING):
        assert linear(torch.randn(2, rows, 128), kind.of(weight)).shape == (2, rows, 70)


def test_the_instructions_of_this_processor():
    """Our answer agrees with the processor flags that Linux reports."""
    cpuinfo = Path("/proc/cpuinfo")
    if not kernels.LIBRARY or platform.machine() != "x86_64" or not cpuinfo.is_file():
        pytest.skip("no C library, or not Linux on x86")
    flags = set(cpuinfo.read_text().partition("flags")[2].partition("\n")[0].split())
    needed = (set(), {"avx2", "fma"}, {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, {"avx512_vnni"}, {"avx512_bf16"})
    needed += ({"amx_tile", "amx_bf16", "amx_int8"},)
    best = next((i for i, each in enumerate(needed) if not each <= flags), len(needed)) - 1
    assert products.instructions() == products.INSTRUCTIONS[best]
    assert products.has_products_of(torch.bfloat16) == ("avx512_bf16" in flags)


@torch.no_grad()
def test_a_model_turned_into_bfloat16(directory_of):
    """Its A_log, D and dt biases are bfloat16 too, and the C kernels must not read them as float32."""
    model = megatron_ssm.load(directory_of("mamba2")).bfloat16()
    expected = logits_of(megatron_ssm.load(directory_of("mamba2")))
    assert (logits_of(model) - expected).norm() <= 0.05 * expected.norm()
    half = partial(megatron_ssm.load, directory_of("mamba"), dtype=torch.float16)
    assert (logits_of(half()) - logits_of(megatron_ssm.load(directory_of("mamba")))).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", QUANTIZING)
def test_the_kernel_quantizes_as_torch(kind, dtype, monkeypatch):
    """Bit for bit, also blocks of zeros and rows with gaps between them."""
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)).to(dtype)[:, 64:]
    weight[3, 64:] = 0
    found = kind.of(weight)
    monkeypatch.setattr(quantized_matrices, "usable", lambda *_: False)
    expected = kind.of(weight)
    assert torch.equal(found.values, expected.values) and torch.equal(found.scales, expected.scales)
