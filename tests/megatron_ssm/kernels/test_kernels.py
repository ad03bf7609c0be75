"""The C kernels of each processor variant. Oracles: token-by-token references, matrix products and norms in float64.

New memory is filled with NaN here, and so are the gaps between the rows of the inputs: a kernel that reads what it should
not returns NaN.
"""

import random
import re
import subprocess
import sys
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from cases import oracle
from commfabric.native.library import Library
from megatron_ssm import generate, load
from megatron_ssm.kernels import kernels, products
from megatron_ssm.kernels.matrices import linear
from megatron_ssm.kernels.quantized_matrices import QUANTIZED_FORMATS, Int8Weight
from megatron_ssm.parallel.layers import RMSNorm
from native_variants import MARKED, ROOT, library_path
from scans import KINDS, PREVIOUS, SEQUENCES, error, everything, in_pieces, inputs_of

__all__ = ["library_path", "oracle"]

# Relative to the norm. float32: some tens of rounding errors of 6e-8 (measured: at most 5e-7); bfloat16: one rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
float32_inputs = partial(inputs_of, dtype=torch.float32)
dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
kinds = pytest.mark.parametrize("kind", KINDS)

CHANNELS, STATES, SEQ = (1, 3, 63, 64, 65, 130), (1, 4, 16, 64, 100, 128, 256), (1, 15, 16, 17, 33)
WIDTHS, TAPS = (1, 3, 16, 32, 48, 64, 100), range(1, 9)


def diagonal(**sizes):
    """The shortest list of {name: size} in which each value of each size appears."""
    count = max(map(len, sizes.values()))
    return [{name: values[i % len(values)] for name, values in sizes.items()} for i in range(count)]


def sample(**sizes):
    """Sixty random combinations of the sizes, the same in every run."""
    combinations = random.Random(0).sample(list(product(*sizes.values())), 60)
    return [dict(zip(sizes, values, strict=True)) for values in combinations]


def shapes(combined, *marks):
    """The parameters (kind, sizes) of tests; `combined`, which is `diagonal` or `sample`, combines the sizes."""
    heads = combined(channels=WIDTHS, size=STATES, seq=SEQ, batch=(1, 2), groups=(2, 1, 3), heads=(2, 3))
    by_kind = {
        "conv": combined(channels=CHANNELS, kernel=TAPS, seq=SEQ, batch=(1, 3)),
        "selective": combined(channels=CHANNELS, size=STATES, seq=SEQ, batch=(1, 3)),
        "ssd": [{**sizes, "heads": sizes["groups"] * sizes["heads"]} for sizes in heads],
    }
    for kind, all_sizes in by_kind.items():
        for sizes in all_sizes:
            name = "-".join([combined.__name__, kind, *(f"{name}{value}" for name, value in sizes.items())])
            yield pytest.param(kind, sizes, id=name, marks=marks)


LONG = [pytest.param(kind, dict(seq=273, size=1, kernel=3), id=f"long-{kind}") for kind in KINDS]
SHAPES = [*LONG, *shapes(diagonal), *shapes(sample, pytest.mark.full)]


@pytest.fixture(autouse=True)
def poisoned():
    """Fill what torch.empty returns with NaN, as torch's deterministic mode does."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=MARKED)
def variant(request, library_path, monkeypatch):
    """Use the kernels of one variant of the library."""
    library = Library("megatron_ssm", kernels.SIGNATURES, library_path("megatron_ssm", request.param))
    if not library:
        pytest.skip(f"no C library: {library.why}")
    monkeypatch.setattr(kernels, "LIBRARY", library)


def has_amx():
    return products.instructions() == "AMX"


def kernel_for(stored, x, rows):
    """The kernel for so many rows, with an even number of columns; None: torch multiplies them."""
    return next((name for name, most in products.kernels_for(stored, x).items() if rows <= most), None)


def view_between_nan(tensor):
    """The tensor (batch, seq, ...) as a view of wider rows, with NaN on both sides, like a slice of in_proj's output."""
    rows = F.pad(tensor.flatten(2), (3, 4), value=float("nan"))[..., 3:-4]
    return rows.unflatten(-1, tensor.shape[2:]) if tensor.ndim > 3 else rows


def fast_on_views(kind):
    """The fast implementation, called with views of wider tensors, as the mixers call it."""

    def call(overwrite=False, **inputs):
        wide = set(SEQUENCES[kind]) - ({"dt"} if kind == "ssd" else set())
        views = {name: view_between_nan(t) if name in wide and t is not None else t for name, t in inputs.items()}
        return KINDS[kind][0](**views, overwrite=overwrite)

    return call


def reference_results(kind, inputs):
    """The outputs and gradients of the reference implementation in float64."""
    inputs = {n: t if t is None else t.detach().double().requires_grad_() for n, t in inputs.items()}
    with torch.enable_grad():
        return everything(KINDS[kind][1], inputs)


def check(ours, exact, y_tolerance=TOLERANCE[torch.float32], **tolerances):
    """Assert that each output and gradient is close to the exact one; tolerances: of others than y."""
    __tracebackhide__ = True
    errors = {name: error(tensor.double(), exact[name]) for name, tensor in ours.items()}
    limits = {"A_log": 5e-5, "D": 5e-5, "z": 5e-6}  # sums of few numbers, in which large ones cancel
    limits |= {"y": y_tolerance, **tolerances}
    too_large = {name: e for name, e in errors.items() if not e <= limits.get(name, TOLERANCE[torch.float32])}
    assert not too_large, too_large


# The recurrences and the convolution


@pytest.mark.parametrize("kind, sizes", SHAPES)
def test_outputs_and_gradients(variant, kind, sizes):
    inputs = float32_inputs(kind, **sizes)
    check(everything(fast_on_views(kind), inputs), reference_results(kind, inputs))


@dtypes
@pytest.mark.parametrize("kind, sizes", SHAPES)
@torch.no_grad()
def test_overwriting_rows_of_a_cache(variant, kind, sizes, dtype):
    """Every second row is overwritten and no other; the results are bitwise those of a call that overwrites nothing."""
    inputs = {name: t.detach() for name, t in float32_inputs(kind, dtype=dtype, **sizes).items()}
    cache = torch.stack([torch.full_like(inputs[PREVIOUS[kind]], float("nan")), inputs[PREVIOUS[kind]]], 1)
    exact, call, rows = reference_results(kind, inputs), fast_on_views(kind), cache.flatten(0, 1)[1::2]
    inputs[PREVIOUS[kind]] = rows
    contiguous = {name: t.clone(memory_format=torch.contiguous_format) for name, t in inputs.items()}
    y, carried = call(**inputs)
    again, overwritten = call(**inputs, overwrite=True)
    assert torch.equal(again, y) and torch.equal(overwritten, carried)
    assert torch.equal(rows, carried) and overwritten.data_ptr() == rows.data_ptr()
    assert cache[:, 0].isnan().all()
    # The states of bfloat16 inputs are not rounded, but AMX multiplies numbers of 16 bits.
    by_tiles = kind == "ssd" and dtype is torch.bfloat16 and has_amx() and inputs["x"].shape[1] >= 16
    carried_tolerance = 2e-5 if by_tiles else TOLERANCE[torch.float32]
    check(dict(y=y, carried=carried), exact, y_tolerance=TOLERANCE[dtype], carried=carried_tolerance)
    if kind == "selective":
        in_place, _ = KINDS[kind][0](**contiguous, overwrite_x=True)
        assert in_place.data_ptr() == contiguous["x"].data_ptr() and torch.equal(in_place, y)


ABSENT = [("conv", {"bias"}), ("conv", {"history"}), ("conv", {"bias", "history"}), ("ssd", {"state"})]
ABSENT += [("selective", {n for n, gone in zip(("z", "dt_bias", "state"), g, strict=True) if gone})
           for g in product((0, 1), repeat=3) if any(g)]  # fmt: skip


@pytest.mark.parametrize("kind, absent", [pytest.param(k, a, id="-".join([k, *sorted(a)])) for k, a in ABSENT])
def test_optional_inputs_may_be_absent(variant, kind, absent):
    inputs = float32_inputs(kind, channels=65, size=16, seq=18) | dict.fromkeys(absent)
    if "dt_bias" in absent:
        inputs["dt"] = inputs["dt"].detach().abs().requires_grad_()
    check(everything(fast_on_views(kind), inputs), reference_results(kind, inputs))


@dtypes
@kinds
@torch.no_grad()
def test_pieces_are_bitwise_equal_to_one_call(variant, kind, dtype):
    """SSD computes four tokens at a time, so other cuts change the order of its sums."""
    inputs = {name: t.detach() for name, t in float32_inputs(kind, channels=67, seq=37, dtype=dtype).items()}
    for cuts in ([1], [16], [4, 20, 36], [2, 3, 20, 36], range(1, 37)):
        y, carried = in_pieces(kind, inputs, cuts)
        expected = KINDS[kind][0](**inputs)
        if kind != "ssd" or all(cut % 4 == 0 for cut in cuts):
            assert torch.equal(y, expected[0]) and torch.equal(carried, expected[1])
        assert is_close(y, expected[0].double(), 4 * TOLERANCE[dtype])
        assert is_close(carried, expected[1].double(), 4 * TOLERANCE[torch.float32])


@kinds
def test_gradients_through_pieces(variant, kind):
    """Backward must not overwrite the gradients that it receives."""
    inputs = float32_inputs(kind, channels=67, seq=37)
    ours = everything(lambda **inputs: in_pieces(kind, inputs, (2, 3, 20, 36)), inputs)
    check(ours, reference_results(kind, inputs))
    results = KINDS[kind][0](**inputs)
    assert "Native" in results[0].grad_fn.name()
    given = [torch.ones_like(result) for result in results]
    torch.autograd.grad(results, inputs["x"], given)
    assert all(tensor.eq(1).all() for tensor in given)


# Extreme numbers


EXTREMES = {
    "dt": dict(dt=50.0), "-dt": dict(dt=-50.0), "A_log": dict(A_log=5.0), "-A_log": dict(A_log=-50.0), "x": dict(x=1e4),
    "z": dict(z=1e4), "-z": dict(z=-1e4), "bias": dict(bias=1e4), "-bias": dict(bias=-1e4), "B": dict(B=1e4, C=1e4),
    "fast": dict(dt=50.0, A_log=5.0, x=1e4), "slow": dict(dt=-50.0, A_log=-50.0, x=1e4), "0": dict(dt=0.0, x=0.0),
}  # fmt: skip
EXTREME_CASES = [(k, e) for k in KINDS for e in EXTREMES if EXTREMES[e].keys() <= inputs_of(k).keys()]


@pytest.mark.parametrize(
    "kind, extreme", [case for case in EXTREME_CASES if case not in [("ssd", "-dt"), ("ssd", "slow")]]
)
def test_extreme_numbers(variant, kind, extreme):
    """Extreme numbers in every second channel of an input give finite results, close to those in float64."""
    inputs = float32_inputs(kind, channels=66, size=16, seq=20)
    with torch.no_grad():
        for name, value in EXTREMES[extreme].items():
            inputs[name][..., ::2] = value
    ours, exact = everything(fast_on_views(kind), inputs), reference_results(kind, inputs)
    assert all(t.isfinite().all() for t in exact.values())
    check(ours, exact)


@kinds
def test_nan_stays_in_its_channel(variant, kind):
    inputs = float32_inputs(kind, channels=66, seq=20, batch=3)
    with torch.no_grad():
        inputs["x"][1, 7, ..., 40] = float("nan")
    ours, exact = (everything(f, i) for f, i in ((fast_on_views(kind), inputs), (KINDS[kind][1], inputs)))
    for name in ("y", "carried"):
        assert torch.equal(ours[name].isnan(), exact[name].isnan())
    assert ours["y"].isnan().any()


# Inputs that the kernels leave to torch or copy

grads = pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
TOO_LARGE = [("selective", dict(size=257)), ("ssd", dict(size=257)), ("conv", dict(kernel=9))]


@pytest.mark.parametrize("kind, sizes", TOO_LARGE)
def test_too_large_for_c(variant, kind, sizes):
    inputs = float32_inputs(kind, channels=5, **sizes)
    check(everything(fast_on_views(kind), inputs), reference_results(kind, inputs))


@grads
@kinds
def test_parameters_in_bfloat16(variant, kind, grad):
    """After model.bfloat16() all parameters are bfloat16, so the kernels must not read them as float32."""
    inputs = {name: t.detach().bfloat16() for name, t in float32_inputs(kind, channels=5, seq=18).items()}
    with torch.set_grad_enabled(grad):
        y, carried = KINDS[kind][0](**inputs)
    exact = reference_results(kind, inputs)
    assert max(error(y.double(), exact["y"]), error(carried.double(), exact["carried"])) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kind", ("selective", "ssd"))
@torch.no_grad()
def test_inputs_of_two_types(variant, kind):
    inputs = {name: t.detach() for name, t in float32_inputs(kind, channels=5, seq=18).items()}
    inputs["x"] = inputs["x"].bfloat16()
    y, carried = KINDS[kind][0](**inputs)
    check(dict(y=y, carried=carried), reference_results(kind, inputs), y_tolerance=TOLERANCE[torch.bfloat16])


@grads
@kinds
def test_parameters_and_states_with_gaps(variant, kind, grad):
    """They may be columns of other tensors, as the state of one of Zamba's heads is; such states are not overwritten."""
    inputs = {name: t.detach() for name, t in float32_inputs(kind, channels=5, seq=18).items()}
    exact = reference_results(kind, inputs)
    for name in inputs.keys() - set(SEQUENCES[kind]):
        inputs[name] = F.pad(inputs[name].unsqueeze(-1), (1, 1), value=float("nan"))[..., 1]
    given = inputs[PREVIOUS[kind]].clone()
    with torch.set_grad_enabled(grad):
        y, carried = KINDS[kind][0](**inputs, overwrite=not grad)
    check(dict(y=y, carried=carried), exact)
    assert torch.equal(inputs[PREVIOUS[kind]], given)


# Shapes: the kernels compute addresses from them and do not broadcast


WRONG_SHAPES = [  # kind, the input of which one element in dimension 0 is left
    *(("conv", name) for name in ("weight", "bias", "history")),
    *(("selective", name) for name in ("dt", "A_log", "B", "C", "D", "z", "dt_bias", "state")),
    *(("ssd", name) for name in ("dt", "A_log", "B", "C", "D", "state")),
]


@grads
@pytest.mark.parametrize("kind, name", WRONG_SHAPES)
def test_a_wrong_shape_is_an_error(variant, kind, name, grad):
    """The kernel would read beyond the end of the tensor, where torch's equivalent broadcasts or raises."""
    inputs = float32_inputs(kind, channels=5, seq=4)
    inputs[name] = inputs[name][:1]
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=f"{name} has shape .*: expected"):
        KINDS[kind][0](**inputs)


@torch.no_grad()
def test_products_of_wrong_shapes_are_errors(variant):
    weight, x = torch.ones(5, 128), torch.ones(2, 128)
    int8 = Int8Weight.of(weight)
    for arguments in ((weight, None, torch.ones(4)), (int8.values, int8.scales[:, :1]), (int8.values[:4], int8.scales)):
        with pytest.raises(ValueError, match="has shape .*: expected"):
            products.linear(x, *arguments)


@torch.no_grad()
def test_matrices_that_a_product_does_not_take(variant):
    x, weight = torch.ones(2, 128), torch.ones(5, 128)
    for inputs, matrix in ((x, weight.half()), (x[:, :0], weight[:, :0]), (x.bfloat16(), weight)):
        with pytest.raises(ValueError, match="C has no kernel for 2 rows|C has no kernel for 0 rows"):
            products.linear(inputs, matrix)
    others = (
        products.kernels_for(torch.int8, torch.float32).keys()
        - products.kernels_for(torch.float32, torch.float32).keys()
    )
    for kernel in ("gemm_float_loops", *others):
        with pytest.raises(ValueError, match=f"C has no kernel {kernel} for 2 rows of torch.float32"):
            products.linear(x, weight, kernel=kernel)


def test_constants_of_c_and_python():
    """Oracle: the enums in the C sources."""
    shared = {
        ("conv.c", "TAPS"): kernels.LONGEST_KERNEL,
        ("selective_scan.c", "STATES"): kernels.LARGEST_STATE,
        ("ssd_loops.c", "STATES"): kernels.LARGEST_STATE,
        ("ssd_loops.c", "CHUNK"): kernels.CHUNK,
        ("ssd_loops.c", "PART"): kernels.CHANNEL_BLOCK,
        ("quantized.h", "BLOCK"): products.BLOCK,
        ("product.h", "NO_KERNEL"): products.NO_KERNEL,
    }
    for (file, name), value in shared.items():
        text = (ROOT / "megatron_ssm/native" / file).read_text()
        assert re.findall(rf"\b{name} = (\d+)", text) == [str(value)], (file, name)


@kinds
@torch.no_grad()
def test_a_batch_without_rows(variant, kind):
    """The shapes and dtypes are those that the reference returns."""
    for sizes in (dict(), dict(dtype=torch.bfloat16, seq=20, channels=32, size=32)):  # AMX could compute the second
        results = [function(**float32_inputs(kind, batch=0, **sizes)) for function in KINDS[kind]]
        for ours, theirs in zip(*results, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@torch.no_grad()
def test_norms_without_rows(variant):
    empty, weight = torch.empty(2, 0, 64), torch.ones(64)
    assert kernels.rms_norm(empty, weight, 1e-5).shape == empty.shape
    for eps, squares in ((1e-5, None), (None, (2, 0, 4))):
        out, found = kernels.gated_norm(empty, empty, weight, 4, eps)
        assert out.shape == empty.shape and (found is None if squares is None else found.shape == squares)


# The products and the norm


def is_close(ours, exact, tolerance):
    """Whether the error is at most `tolerance` times the norm of `exact`; asserts that the shapes are equal."""
    assert ours.shape == exact.shape
    return (ours.double() - exact).norm() <= tolerance * exact.norm()


COLUMNS = (1, 2, 47, 48, 63, 64, 65, 254, 255, 256, 768, 1536, 4096)
BLOCK_COLUMNS = tuple(columns for columns in COLUMNS if columns % products.BLOCK == 0)
EVEN_COLUMNS = tuple(columns for columns in COLUMNS if columns % 2 == 0)
LINEAR = {"float32": COLUMNS, "bfloat16": COLUMNS, "narrowed in float32": EVEN_COLUMNS} | {
    f"{format} in {dtype}": BLOCK_COLUMNS for format in QUANTIZED_FORMATS for dtype in ("float32", "bfloat16")
}


def rounded_rows(x, largest):
    """x (..., in) rounded to integers of -largest to largest times a scale for each block of 64, in float64."""
    blocks = x.float().unflatten(-1, (-1, 64))
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(most, largest) / most  # torch would compute largest / most with two roundings
    return ((blocks * inverse).round().nan_to_num().double() * (most / largest).double()).flatten(-2)


def multiplied(x, weight, kernel, is_quantized):
    """(x, weight) in float64, as a kernel rounds them."""
    if kernel == "gemm_bf16_amx" and weight.dtype is not torch.float32:
        return x.bfloat16().double(), weight.float().bfloat16().double()
    if kernel == "gemm_int8_panels":
        return rounded_rows(x, 127), weight.double()
    if is_quantized and kernel:
        return rounded_rows(x, 32639), weight.double()
    if kernel == "gemm_int16_panels":
        return in_block_floating_point(x, 13), in_block_floating_point(weight, 12)
    return x.double(), weight.double()


@pytest.mark.parametrize("kind, columns", [(kind, columns) for kind in LINEAR for columns in LINEAR[kind]])
@torch.no_grad()
def test_linear(variant, kind, columns):
    """By the table; the weight is a slice of a larger tensor. Oracle: float64, of numbers rounded as the kernel does."""
    dtype, format = torch.bfloat16 if "bfloat16" in kind else torch.float32, QUANTIZED_FORMATS.get(kind.split()[0])
    generator = torch.Generator().manual_seed(columns)
    for out in (1, 5, 100) if format else (0, 1, 5, 100):
        kept = torch.bfloat16 if "narrowed" in kind else dtype
        padded = F.pad(torch.randn(out, columns, generator=generator).to(kept), (0, 0, 1, 1), value=float("nan"))
        stored = given = weight = padded[1 : out + 1]
        if format:
            given = format.of(stored)
            stored, weight = given.values, given.rows(slice(None), torch.float64)
        for batch in (*range(1, 26), 36, 50):
            x = torch.randn(batch, 1, columns + 1, generator=generator).to(dtype)[..., 1:]
            bias = torch.randn(out, generator=generator).to(dtype) if batch % 2 else None
            is_in_c = products.has_kernel(stored.dtype, dtype, batch, columns)
            assert products.should_multiply(x, stored, bias) == is_in_c
            assert is_in_c or batch > 16 or columns % 2
            kernel = kernel_for(stored.dtype, dtype, batch if columns % 2 == 0 else 2**62) if is_in_c else None
            exact_x, exact_w = multiplied(x, weight, kernel, bool(format))
            y, exact = linear(x, given, bias), exact_x @ exact_w.T + (0 if bias is None else bias.double())
            assert y.dtype == dtype
            tolerance = TOLERANCE[dtype] * (1 if is_in_c else 2)  # torch rounds more than once
            usual = exact_x.norm() * exact_w.norm() / columns**0.5  # a single result may be near 0 by chance
            assert (y - exact).norm() <= tolerance * max(exact.norm(), usual), (batch, out)


@pytest.mark.parametrize("kind", LINEAR)
@torch.no_grad()
def test_a_row_does_not_depend_on_the_others(variant, kind):
    """Bit for bit, beside up to 15 others, also if its columns do not fill vectors."""
    dtype, format = torch.bfloat16 if "bfloat16" in kind else torch.float32, QUANTIZED_FORMATS.get(kind.split()[0])
    generator = torch.Generator().manual_seed(0)
    most = 16
    for out, columns in product((1, 7, 18, 33), (64, 192, 1088) if format else (30, 31, 140, 254, 390, 1002, 3074)):
        weight = torch.randn(out, columns, generator=generator)
        matrix = format.of(weight) if format else weight.to(torch.bfloat16 if "narrowed" in kind else dtype)
        stored = matrix.values.dtype if format else matrix.dtype
        if columns % 2 and not products.has_kernel(stored, dtype, 1, columns):
            continue  # torch multiplies
        x = torch.randn(most, columns, generator=generator).to(dtype)
        alone = torch.cat([linear(row, matrix) for row in x.split(1)])
        for rows in range(2, most + 1):
            assert torch.equal(linear(x[:rows], matrix), alone[:rows]), (out, columns, rows)


@pytest.mark.parametrize("kind", [kind for kind in LINEAR if kind.split()[0] in QUANTIZED_FORMATS])
@torch.no_grad()
def test_many_rows_and_a_quantized_matrix(variant, kind):
    """More rows of x than gemm_quantized_vnni.c takes in a pass. Oracle: pieces of few rows."""
    dtype, format = torch.bfloat16 if "in bfloat16" in kind else torch.float32, QUANTIZED_FORMATS[kind.split()[0]]
    generator = torch.Generator().manual_seed(0)
    matrix = format.of(torch.randn(33, 192, generator=generator))
    x = torch.randn(133, 192, generator=generator).to(dtype)
    kernel = kernel_for(matrix.values.dtype, dtype, 7)
    pieces = torch.cat([products.linear(rows, matrix.values, matrix.scales) for rows in x.split(7)])
    assert torch.equal(products.linear(x, matrix.values, matrix.scales, kernel=kernel), pieces)


@pytest.mark.parametrize("kind", [kind for kind in LINEAR if "in bfloat16" in kind])
@torch.no_grad()
def test_results_too_small_for_bfloat16(variant, kind):
    """A row of x has the same bits alone and beside others, also where results are below 2^-126."""
    generator = torch.Generator().manual_seed(0)
    matrix = QUANTIZED_FORMATS[kind.split()[0]].of(torch.randn(40, 64, generator=generator) * 1e-20)
    x = (torch.randn(5, 64, generator=generator) * 1e-19).bfloat16()
    together = products.linear(x, matrix.values, matrix.scales)
    assert together.abs().max() < 1e-37
    for rows in (1, 2):
        assert torch.equal(products.linear(x[:rows], matrix.values, matrix.scales), together[:rows])


@dtypes
@pytest.mark.parametrize("format", QUANTIZED_FORMATS.values())
@torch.no_grad()
def test_products_in_8_bits(variant, format, dtype):
    """By AVX512_VNNI. Oracle: the same rounding of x to 8 bits in float64, where the integer sums are exact."""
    if "gemm_int8_panels" not in products.kernels_for(torch.int8, dtype):
        pytest.skip("no AVX512_VNNI")
    generator = torch.Generator().manual_seed(0)
    for batch, out, columns, has_bias in (
        (1, 1, 64, True),
        (3, 33, 128, False),
        (30, 64, 832, True),
        (0, 5, 64, False),
    ):
        matrix = format.of(torch.randn(out, columns, generator=generator))
        x = (10 * torch.randn(batch, columns + 3, generator=generator)).to(dtype)[:, :columns]
        x[:1, :64] = 0
        bias = torch.randn(out, generator=generator).to(dtype) if has_bias else None
        exact = rounded_rows(x, 127) @ matrix.rows(slice(None), torch.float64).T + (
            0 if bias is None else bias.double()
        )
        y = products.linear(x, matrix.values, matrix.scales, bias, "gemm_int8_panels")
        assert y.dtype == dtype and is_close(y, exact, 10 * TOLERANCE[dtype])
        assert is_close(y, x.double() @ matrix.rows(slice(None), torch.float64).T + (0 if bias is None else bias), 0.02)


@dtypes
@pytest.mark.parametrize("kind", (torch.bfloat16, torch.float32, *QUANTIZED_FORMATS.values()))
@torch.no_grad()
def test_products_by_amx(kind, dtype):
    """Only by the installed library, on processors with AMX. Oracle: float64, from x and W rounded to bfloat16.

    Products of float32 matrices are not rounded, and as exact as torch's.
    """
    if kind is torch.float32 and dtype is torch.bfloat16:
        pytest.skip("x is of the matrix's dtype")
    if not has_amx():
        pytest.skip("no AMX")
    generator = torch.Generator().manual_seed(0)
    used = torch.float32 if kind is torch.float32 else torch.bfloat16
    shapes = [(1, 1, 64), (3, 33, 128), (17, 64, 320), (33, 31, 1536), (70, 100, 832), (700, 40, 1536)]
    shapes += [(0, 5, 64), (5, 0, 64)]
    if isinstance(kind, torch.dtype):  # rows that are not whole tiles
        shapes += [(40, 33, 48), (3, 5, 7), (17, 40, 1)]
    for (batch, out, columns), has_bias in product(shapes, (True, False)):
        weight = torch.randn(out, columns, generator=generator)
        values = matrix = weight.to(kind) if isinstance(kind, torch.dtype) else kind.of(weight)
        scales, wide = None, weight.to(used).double()
        if not isinstance(kind, torch.dtype):
            values, scales, wide = matrix.values, matrix.scales, matrix.rows(slice(None), used).double()
        x = torch.randn(batch, columns + 3, generator=generator).to(dtype)[:, :columns]
        bias = torch.randn(out, generator=generator).to(dtype) if has_bias else None
        y = products.linear(x, values, scales, bias, "gemm_bf16_amx")
        exact = x.to(used).double() @ wide.T + (0 if bias is None else bias.double())
        assert y.dtype == dtype and is_close(y, exact, 2 * TOLERANCE[dtype]), (batch, out, columns)
        if used is torch.float32 and batch:
            assert (y - exact).norm() <= (F.linear(x, values, bias) - exact).norm() + 1e-7 * exact.norm()


@torch.no_grad()
def test_products_by_amx_of_extreme_numbers():
    """Large and small float32 numbers are exact to 1e-6; what is not finite gives what is not finite in its row only."""
    if not has_amx():
        pytest.skip("no AMX")
    by_amx = partial(products.linear, kernel="gemm_bf16_amx")
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(40, 64, generator=generator), torch.randn(40, 64, generator=generator)
    for scale in (1e-30, 1e30):
        exact = (scale * x).double() @ weight.double().T
        assert (by_amx(scale * x, weight) - exact).norm() <= 1e-6 * exact.norm()
    largest = torch.full((1, 64), 3.4e38)
    assert by_amx(largest, torch.full((1, 64), 1e-8)).sub(3.4e30 * 64).abs() < 1e26
    x[3, 5], x[4, 6] = float("inf"), float("nan")
    y = by_amx(x, weight)
    assert not y[3:5].isfinite().any() and y[:3].isfinite().all() and y[5:].isfinite().all()


def in_block_floating_point(x, bits):
    """x (..., in) as integers of so many bits and sign times a power of two for each block of 64, in float64."""
    blocks = F.pad(x.double(), (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
    scale = torch.exp2(torch.frexp(blocks.abs().amax(-1, keepdim=True)).exponent.double() - bits)
    return ((blocks / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]


PANELS = (  # kernel, and the matrix that it multiplies
    ("gemm_float_panels", "float32"),
    ("gemm_bf16_panels", "bfloat16"),
    ("gemm_int16_panels", "bfloat16"),
    *(("gemm_int16_panels", format) for format in QUANTIZED_FORMATS),
)


def by_panels(kernel, kind, weight, dtype):
    """(matrix as stored, its scales or None, a function of x and a bias); skips if the processor does not run the kernel."""
    matrix = QUANTIZED_FORMATS[kind].of(weight) if kind in QUANTIZED_FORMATS else weight.to(getattr(torch, kind))
    values, scales = (matrix, None) if isinstance(matrix, torch.Tensor) else (matrix.values, matrix.scales)
    if kernel not in products.kernels_for(values.dtype, dtype):
        pytest.skip(f"no {kernel}")
    wide = values.double() if scales is None else matrix.rows(slice(None), torch.float64)
    return wide, lambda x, bias=None: products.linear(x, values, scales, bias, kernel)


@dtypes
@pytest.mark.parametrize("kernel, kind", PANELS)
@torch.no_grad()
def test_products_by_panels(variant, kernel, kind, dtype):
    """By AVX2 and AVX-512. Oracle: float64, of numbers rounded as the kernel does."""
    generator, is_quantized = torch.Generator().manual_seed(0), kind in QUANTIZED_FORMATS
    shapes = [(1, 1, 64), (3, 33, 128), (5, 16, 320), (7, 31, 1536), (600, 40, 832), (0, 5, 64), (2, 0, 64)]
    if not is_quantized:  # rows that are not whole registers
        shapes += [(40, 33, 389), (3, 5, 7), (17, 40, 1)]
    for (batch, out, columns), has_bias in product(shapes, (True, False)):
        wide, multiply = by_panels(kernel, kind, torch.randn(out, columns, generator=generator), dtype)
        x = torch.randn(batch, columns + 3, generator=generator).to(dtype)[:, :columns]
        bias = torch.randn(out, generator=generator).to(dtype) if has_bias else None
        y, added = multiply(x, bias), 0 if bias is None else bias.double()
        exact_x, exact_w = multiplied(x, wide, kernel, is_quantized)
        assert y.dtype == dtype and is_close(y, exact_x @ exact_w.T + added, TOLERANCE[dtype]), (batch, out, columns)
        if kernel == "gemm_int16_panels":  # bfloat16 itself has errors up to 2^-9
            assert is_close(y, x.double() @ wide.T + added, 2**-12 + TOLERANCE[dtype])


@pytest.mark.parametrize("kernel, kind", PANELS)
@torch.no_grad()
def test_panel_products_of_extreme_numbers(variant, kernel, kind):
    """What is not finite in x gives what is not finite in its row only; rows of zeros give zeros."""
    weight, x = torch.linspace(1, 2, 40 * 64).view(40, 64), torch.ones(40, 64)
    x[3, 5], x[4, 6], x[7], weight[9] = float("inf"), float("nan"), 0, 0
    dtype = torch.bfloat16 if kernel == "gemm_bf16_panels" else torch.float32
    y = by_panels(kernel, kind, weight, dtype)[1](x.to(dtype))
    assert not y[3:5, :9].isfinite().any() and y[:3].isfinite().all() and y[5:].isfinite().all()
    assert not y[7].any() and not y[5:, 9].any() and y[5:7, :9].all()


@pytest.mark.parametrize("kernel, kind", PANELS[:3])
@pytest.mark.parametrize("columns", (64, 200))
@torch.no_grad()
def test_panel_products_of_extreme_weights(variant, kernel, kind, columns):
    """What is not finite in W gives what is not finite in its column only; large and small blocks keep their sizes."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(40, columns, generator=generator), torch.randn(10, columns, generator=generator).abs()
    weight[3, 5], weight[20, -1], weight[21, 0] = float("inf"), float("nan"), float("-inf")
    for row, size in ((1, 1e36), (2, 1e-30)):
        weight[row] *= size
    dtype = torch.bfloat16 if kernel == "gemm_bf16_panels" else torch.float32
    y = by_panels(kernel, kind, weight, dtype)[1](x.to(dtype))
    exact = x.to(dtype).double() @ weight.bfloat16().double().T
    bad = torch.tensor([3, 20, 21])
    others = torch.tensor([row for row in range(40) if row not in bad])
    assert not y[:, bad].isfinite().any()
    for row in others.tolist():
        assert is_close(y[:, row], exact[:, row], 2**-7), row


@pytest.mark.parametrize("format", QUANTIZED_FORMATS.values())
def test_widened_matrices(variant, format):
    """In float32 and bfloat16; oracle: torch's conversion of the values. Also of rows with gaps between them."""
    for out, columns in ((1, 64), (7, 192), (33, 128)):
        matrix = format.of(torch.randn(out, columns, generator=torch.Generator().manual_seed(out)))
        exact = matrix.rows(torch.arange(out), torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(products.widened(matrix.values, matrix.scales, dtype), exact.to(dtype))
            assert torch.equal(matrix.rows(slice(0, out, 3), dtype), exact[::3].to(dtype))


@dtypes
@pytest.mark.parametrize("wide", (False, True), ids=("of its weight's type", "of float32"))
@torch.no_grad()
def test_rms_norm(variant, wide, dtype):
    generator = torch.Generator().manual_seed(0)
    for size, scale, eps in product((1, 3, 63, 64, 65, 768), (1e-4, 1, 1e4), (0.0, 1e-5, 1e-12)):
        norm = RMSNorm(size, eps, dtype)
        norm.weight.copy_(torch.randn(size, generator=generator))
        x = (scale * torch.randn(3, size + 1, 5, generator=generator)).to(torch.float32 if wide else dtype)
        x = x.transpose(1, 2)[..., 1:]
        y, exact = norm(x), F.rms_norm(x.double(), (size,), norm.weight.double(), eps)
        assert y.dtype == dtype and is_close(y, exact, TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("seq", (1, 3))
@torch.no_grad()
def test_gated_norm(variant, seq, dtype):
    """The gate is contiguous, a slice of wider rows, or a slice of a longer tensor (seq, batch, channels)."""
    generator = torch.Generator().manual_seed(0)
    y, z = torch.randn(2, 3, seq, 48, generator=generator).to(dtype)
    weight = torch.randn(48, generator=generator).to(dtype)
    sequence_first = torch.full((5, 3, 48), float("nan"), dtype=dtype)
    sequence_first[:seq] = z.transpose(0, 1)
    gates = (z, view_between_nan(z), sequence_first.transpose(0, 1)[:, :seq])
    for groups, gate in product((1, 3), gates):
        gated = (y.double() * F.silu(z.double())).unflatten(-1, (groups, -1))
        exact = (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2) * weight.double()
        out, none = kernels.gated_norm(y, gate, weight, groups, 1e-5)
        assert none is None and out.dtype == dtype and is_close(out, exact, 2 * TOLERANCE[dtype])
        out, squares = kernels.gated_norm(y, gate, weight, groups, None)
        assert is_close(out, gated.flatten(-2) * weight.double(), 2 * TOLERANCE[dtype])
        assert squares.dtype == torch.float32 and is_close(squares, gated.square().sum(-1), TOLERANCE[torch.float32])


# Pages that must not be read are tested in a separate process, because reading one kills the process

GUARDED = """
import ctypes, mmap, torch
from megatron_ssm.kernels import products
from megatron_ssm.kernels.quantized_matrices import Int4Weight, Int8Weight

libc, kept = ctypes.CDLL(None, use_errno=True), []

def guarded(tensor):  # a copy, directly before a page that must not be read
    size = tensor.numel() * tensor.element_size()
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, whole + mmap.PAGESIZE)
    kept.append(pages)
    copy = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=whole - size).view(tensor.shape)
    copy.copy_(tensor)
    assert libc.mprotect(ctypes.c_void_p(copy.data_ptr() + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return copy

for out in (1, 17, 33):
    for columns in (64, 192, 1088):
        weight = torch.randn(out, columns)
        for dtype in (torch.float32, torch.bfloat16):
            bias = guarded(torch.randn(out).to(dtype))
            quantized = [(each.values, each.scales) for each in (Int8Weight.of(weight), Int4Weight.of(weight))]
            plain = [
                (weight.to(kind)[:, : columns - less].contiguous(), None)
                for kind in {dtype, torch.bfloat16} for less in (0, 2, 30)
            ]
            for matrix in quantized + plain:
                values, scales = (None if each is None else guarded(each) for each in matrix)
                for rows in (1, 2, 3, 8, 9, 65):
                    x = guarded(torch.randn(rows, products.columns_of(values)).to(dtype))
                    for kernel, most in products.kernels_for(values.dtype, dtype).items():
                        if rows <= most:
                            try:
                                products.linear(x, values, scales, bias, kernel)
                            except ValueError:  # AMX takes whole tiles of a matrix
                                assert products.columns_of(values) % 32
"""


def test_products_read_nothing_beyond_their_operands():
    if not kernels.LIBRARY:
        pytest.skip(f"no C library: {kernels.LIBRARY.why}")
    subprocess.run([sys.executable, "-c", GUARDED], cwd=ROOT, check=True)


# Threads are tested in a separate process, because forks of a process that has used several threads would hang

THREADED = """
import sys, torch
from itertools import product
sys.path.insert(0, "tests/helpers")
from megatron_ssm.kernels import kernels, products
from megatron_ssm.kernels.quantized_matrices import Int4Weight, Int8Weight
from scans import KINDS, error, everything, inputs_of

def small_numbers_are_zeros():  # below 2^-126: the recurrence may count them as zeros, but no thread afterwards
    small = torch.full((2**17,), 2.0**-100) * 2.0**-40
    return not small.view(torch.int32).all()  # as floats they would be equal to zero, if they counted as zeros

def results(threads, kind):
    torch.set_num_threads(threads)
    if kind == "linear":
        torch.manual_seed(0)
        weight, x, bias = torch.randn(101, 192), torch.randn(3, 192), torch.randn(101)
        quantized = {kind.__name__: kind.of(weight) for kind in (Int8Weight, Int4Weight)}
        halves = weight.bfloat16()
        given = {name: (r.values, r.scales) for name, r in quantized.items()}
        given |= dict(float32=(weight, None), bfloat16=(halves, None))
        found = {f"wide {name}": each.rows(slice(None)) for name, each in quantized.items()}
        for (name, w), dtype, rows in product(given.items(), (torch.float32, torch.bfloat16), (1, 2, 3)):
            for kernel, most in products.kernels_for(w[0].dtype, dtype).items():
                if rows <= most:
                    found[name, dtype, rows, kernel] = products.linear(x[:rows].to(dtype), *w, bias.to(dtype), kernel)
        return found
    if kind == "norm":
        y, z = torch.randn(2, 137, 256, generator=torch.Generator().manual_seed(0))
        weight, found = torch.linspace(-1, 1, 256), {}
        for x in (y, y.bfloat16()):
            typed = weight.to(x.dtype), z.to(x.dtype)
            found[f"norm of {x.dtype}"] = kernels.rms_norm(x, typed[0], 1e-5)
            found[f"gated norm of {x.dtype}"] = kernels.gated_norm(x, typed[1], typed[0], 2, 1e-5)[0]
            found[f"squares of {x.dtype}"] = kernels.gated_norm(x, typed[1], typed[0], 2, None)[1]
        return found | {"mixed": kernels.rms_norm(y, weight.bfloat16(), 1e-5)}
    return everything(KINDS[kind][0], inputs_of(kind, seq=40, channels=200, size=20, dtype=torch.float32))

assert kernels.LIBRARY
for kind in (*KINDS, "linear", "norm"):
    one, *others = (results(threads, kind) for threads in (1, 2, 3))
    assert not small_numbers_are_zeros(), kind
    for other in others:
        for name in one:
            same = torch.equal(one[name], other[name])
            assert same or kind in KINDS and name not in ("y", "carried") and error(one[name], other[name]) < 1e-6, name
halves = inputs_of("ssd", dtype=torch.bfloat16, channels=64, size=64, seq=40)
kernels.ssd(**{name: t.detach() for name, t in halves.items()})
assert not small_numbers_are_zeros(), "bfloat16"
"""


def test_several_threads_give_the_same_numbers():
    """Results are bitwise equal, except for gradients that are sums over threads."""
    if not kernels.LIBRARY:
        pytest.skip(f"no C library: {kernels.LIBRARY.why}")
    subprocess.run([sys.executable, "-c", THREADED], cwd=ROOT, check=True)


# Whole models


def results_of(model, ids):
    """(logits of one call and of two chunks followed by two tokens, greedy tokens, {parameter: gradient})."""
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    with torch.no_grad():
        cache = model.new_cache(len(ids))
        pieces = [model(ids[:, a:b], cache=cache) for a, b in ((0, 30), (30, 68), (68, 69), (69, 70))]
        logits = torch.stack([model(ids), torch.cat(pieces, 1)])
    return logits, generate(model, ids[:, :5], max_new_tokens=20), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups"))
def test_models_with_c_and_with_torch(variant, name, oracle, monkeypatch):
    directory, ids = oracle(name).directory, oracle(name).ids
    ours = results_of(load(directory), ids)
    monkeypatch.setattr(kernels, "LIBRARY", Library("megatron_ssm", {}, "/nonexistent"))
    theirs = results_of(load(directory), ids)
    assert not torch.equal(ours[0], theirs[0]), "the C kernels did not run"
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=oracle(name).tolerance)
    assert torch.equal(ours[1], theirs[1])
    assert max(error(ours[2][name], theirs[2][name]) for name in theirs[2]) <= 1e-5
