"""What AMX computes, on processors that have it: Mamba-2's recurrence in chunks, and rows of products that stay the same.

Oracles: the token-by-token recurrence in float64; the product of one row alone.
"""

import pytest
import torch

from megatron_ssm.kernels import kernels, products
from megatron_ssm.kernels.quantized_matrices import QUANTIZED_FORMATS
from megatron_ssm.kernels.scan import ssd_ref
from scans import in_pieces, inputs_of

pytestmark = pytest.mark.skipif(products.instructions() != "AMX", reason="no AMX")
STATE_TOLERANCE, Y_TOLERANCE = 2e-5, 2**-8  # sums of numbers with errors up to 2^-16; y is rounded to bfloat16


@pytest.fixture(params=(1, 3), ids=("one thread", "three threads"))
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


SIZES = [
    dict(seq=16, channels=32, size=32, heads=1, groups=1),
    dict(seq=17, channels=64, size=128, heads=4, groups=1),
    dict(seq=32, channels=96, size=64, heads=6, groups=3),
    dict(seq=100, channels=64, size=64, heads=4, groups=4),
    dict(seq=129, channels=32, size=256, heads=5, groups=1),
    dict(seq=300, channels=64, size=128, heads=2, groups=2),
]


def bfloat16_inputs(**sizes):
    return {name: t.detach() for name, t in inputs_of("ssd", dtype=torch.bfloat16, **sizes).items()}


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes['seq']} tokens")
@torch.no_grad()
def test_the_recurrence_in_chunks(threads, sizes):
    """With a state or without one, and where the final state replaces the first one."""
    inputs = bfloat16_inputs(**sizes)
    for state in (inputs["state"], None):
        given = inputs | {"state": state}
        exact = ssd_ref(**{name: None if t is None else t.double() for name, t in given.items()})
        y, final = kernels.ssd(**given)[:2]
        assert y.dtype == torch.bfloat16 and final.dtype == torch.float32
        assert relative_error(y, exact[0]) < Y_TOLERANCE and relative_error(final, exact[1]) < STATE_TOLERANCE
        if state is not None:
            again, replaced = kernels.ssd(**given | {"state": state.clone()}, overwrite=True)[:2]
            assert torch.equal(again, y) and torch.equal(replaced, final)


@pytest.mark.parametrize("sizes", SIZES[1:4], ids=lambda sizes: f"{sizes['seq']} tokens")
@torch.no_grad()
def test_the_recurrence_may_round_float32(threads, sizes):
    """x, B and C have errors up to 2^-9 then. Numbers beyond bfloat16 are left to the exact form."""
    inputs = {name: t.detach() for name, t in inputs_of("ssd", dtype=torch.float32, **sizes).items()}
    exact = ssd_ref(**{name: t.double() for name, t in inputs.items()})
    for may_round, tolerance in ((True, 2**-8), (False, 1e-6)):
        y, final = kernels.ssd(**inputs, may_round=may_round)[:2]
        assert y.dtype == torch.float32 and 1e-4 * may_round < relative_error(y, exact[0]) < tolerance
        assert 1e-4 * may_round < relative_error(final, exact[1]) < tolerance
    inputs["x"][0, 3, 0, 0] = 3.4e38
    ours, exact = kernels.ssd(**inputs, may_round=True)[0], kernels.ssd(**inputs)[0]
    torch.testing.assert_close(ours, exact, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_token_by_token_and_in_chunks(threads):
    """Pieces of fewer tokens are computed token by token."""
    inputs = bfloat16_inputs(**SIZES[3])
    y, final = kernels.ssd(**inputs)[:2]
    for cuts in (range(8, 100, 8), (16, 32, 64), (1, 50, 99)):
        pieces, carried = in_pieces("ssd", inputs, cuts)
        assert relative_error(pieces, y.double()) < Y_TOLERANCE
        assert relative_error(carried, final.double()) < 2 * STATE_TOLERANCE


@pytest.mark.parametrize(
    "change", (dict(dt=50.0), dict(dt=0.0), dict(A_log=5.0), dict(A_log=-50.0), dict(x=1e4)), ids=str
)
@torch.no_grad()
def test_large_and_small_numbers(change):
    inputs = bfloat16_inputs(**SIZES[1])
    inputs |= {name: torch.full_like(inputs[name], value) for name, value in change.items()}
    exact = ssd_ref(**{name: t.double() for name, t in inputs.items()})
    y, final = kernels.ssd(**inputs)[:2]
    assert relative_error(y, exact[0]) < Y_TOLERANCE and relative_error(final, exact[1]) < STATE_TOLERANCE


@torch.no_grad()
def test_decays_of_all_sizes_in_a_chunk():
    """Sums of their logarithms have large and small terms, and may be infinite."""
    inputs = bfloat16_inputs(**SIZES[2])
    inputs["dt"] = inputs["dt"].clone()
    inputs["dt"][:, 0] = 50
    inputs["A_log"] = torch.tensor([5.0, -3, 0, 2, 88, 1])
    exact = ssd_ref(**{name: t.double() for name, t in inputs.items()})
    y, final = kernels.ssd(**inputs)[:2]
    assert relative_error(y, exact[0]) < Y_TOLERANCE and relative_error(final, exact[1]) < STATE_TOLERANCE


@pytest.mark.parametrize("sizes", (SIZES[2], SIZES[4]), ids=str)
@torch.no_grad()
def test_rows_with_gaps(sizes):
    """x, B and C are slices of wider rows, as they are of the output of in_proj."""
    inputs = bfloat16_inputs(**sizes)
    y, final = kernels.ssd(**inputs)[:2]
    wide = torch.cat([inputs[name].flatten(2) for name in ("x", "B", "C")], 2)
    nan = torch.full_like(wide[..., :3], float("nan"))
    parts = torch.cat([nan, wide, nan], 2)[..., 3:-3].split(
        [inputs[name].flatten(2).shape[2] for name in ("x", "B", "C")], 2
    )
    views = {name: part.unflatten(2, inputs[name].shape[2:]) for name, part in zip(("x", "B", "C"), parts, strict=True)}
    again, final_again = kernels.ssd(**inputs | views)[:2]
    assert torch.equal(again, y) and torch.equal(final_again, final)


@pytest.mark.parametrize("sequence, token", ((0, 5), (1, 15)))
@torch.no_grad()
def test_nan_stays_in_its_head(threads, sequence, token):
    inputs = bfloat16_inputs(**SIZES[1])
    inputs["x"][sequence, token, 1, 3] = float("nan")
    y, final = kernels.ssd(**inputs)[:2]
    others, own = [0, 2, 3], y[sequence]
    assert own[token:, 1, 3].isnan().all() and final[sequence, 1, :, 3].isnan().all() and own[:token].isfinite().all()
    assert own[:, 1, 4:].isfinite().all()
    assert y[:, :, others].isfinite().all() and y[1 - sequence].isfinite().all() and final[:, others].isfinite().all()


FORMATS = {"bfloat16": None, **QUANTIZED_FORMATS}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_a_row_does_not_depend_on_the_others(threads, name, dtype):
    """Bit for bit, for as many rows as are multiplied in one form: a request gets the same tokens beside others."""
    if name == "bfloat16" and dtype is torch.float32:
        pytest.skip("x is of the matrix's dtype")
    generator, format = torch.Generator().manual_seed(0), FORMATS[name]
    for out, columns in ((1, 64), (17, 128), (50, 192), (96, 1088)):
        weight = torch.randn(out, columns, generator=generator)
        matrix = weight.to(dtype) if format is None else format.of(weight)
        values, scales = (matrix, None) if format is None else (matrix.values, matrix.scales)
        x = torch.randn(24, columns, generator=generator).to(dtype)
        bias = torch.randn(out, generator=generator).to(dtype)
        alone = torch.cat([products.linear(row, values, scales, bias) for row in x.split(1)])
        for rows in range(2, len(x) + 1):
            assert torch.equal(products.linear(x[:rows], values, scales, bias), alone[:rows]), (out, columns, rows)
        if format is None:  # also in a prompt
            assert torch.equal(products.linear(x, values, None, bias, "gemm_bf16_amx"), alone)
