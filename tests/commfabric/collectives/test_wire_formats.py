"""Wire formats; oracles: numpy's float16, bfloat16 rounded bit by bit, and int8 in blocks computed by numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commfabric.collectives.wire_formats import BLOCK, LOSSY, Cast, padded, rows_of, view_bytes, wire_format

LARGEST = float(np.finfo(np.float32).max)
TINY = np.finfo(np.float32).tiny
DENORMAL = float(np.finfo(np.float32).smallest_subnormal)
numbers = st.floats(-(2.0**127), 2.0**127, width=32)
few_examples = settings(max_examples=60, deadline=None, derandomize=True)


def heavy_tailed(n, seed=0):
    """n float32 values from a heavy-tailed distribution."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator))


def round_trip(form, x, ranks=2, multiple=None):
    """x (n,) after encoding it as one row and decoding it."""
    row = rows_of(x, 1, multiple or form.block)
    message = form.encode(row, ranks)
    assert message.dtype == torch.uint8 and message.shape == (1, form.nbytes(row.shape[1]))
    return decoded(form, message, x.dtype, ranks)[0, : x.numel()]


def decoded(form, message, dtype=torch.float32, ranks=2):
    """The values of an encoded message."""
    return form.undo_scaling(form.decode(message, dtype), ranks)


# Oracles


def bfloat16(x):
    """float32 numpy -> the nearest bfloat16, ties to even, as float32."""
    bits = x.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32)


def float16(x, ranks):
    """float32 numpy divided by ranks, rounded to float16, and multiplied again."""
    with np.errstate(over="ignore"):
        return (x / np.float32(ranks)).astype(np.float16).astype(np.float32) * np.float32(ranks)


def int8(x):
    """(scales, integers) of float32 numpy whose length is a multiple of 128."""
    blocks = x.reshape(-1, 128)
    scales = np.maximum(np.abs(blocks).max(1) / np.float32(127), TINY)
    return scales, np.clip(np.rint(blocks / scales[:, None]), -127, 127).astype(np.int8)


# Casts


@pytest.mark.parametrize("count", (1, 2, 3, 4))
@pytest.mark.parametrize("scale", (1e-10, 1e-6, 1.0, 1e4, 1e30))
def test_casts_round_as_numpy_does(count, scale):
    x = heavy_tailed(10_000) * scale
    assert np.array_equal(round_trip(LOSSY["fp16"], x, count).numpy(), float16(x.numpy(), count))
    assert np.array_equal(round_trip(LOSSY["bf16"], x, count).numpy(), bfloat16(x.numpy()))


@few_examples
@given(st.lists(numbers, min_size=1, max_size=300), st.integers(1, 8))
def test_any_numbers_round_as_numpy_does(values, count):
    x = torch.tensor(values, dtype=torch.float32)
    assert np.array_equal(round_trip(LOSSY["fp16"], x, count).numpy(), float16(x.numpy(), count))
    assert np.array_equal(round_trip(LOSSY["bf16"], x, count).numpy(), bfloat16(x.numpy()))


def test_the_bytes_of_a_cast_are_the_values_in_its_dtype():
    x = torch.tensor([1.0, -2.5, 65504.0])
    assert LOSSY["fp16"].encode(x[None], 1).numpy().tobytes() == x.numpy().astype("<f2").tobytes()
    assert LOSSY["fp16"].encode(x[None] * 2, 2).numpy().tobytes() == x.numpy().astype("<f2").tobytes()
    high = bfloat16(x.numpy()).view(np.uint32) >> 16
    assert LOSSY["bf16"].encode(x[None], 2).numpy().tobytes() == high.astype("<u2").tobytes()


@pytest.mark.parametrize("count", (1, 2, 3, 4))
def test_range_of_fp16(count):
    """Values up to 65504 times the number of ranks stay finite; those that round to more become inf or -inf."""
    edge = 65504.0 * count
    inside = torch.tensor([edge, -edge, edge * 0.999])
    assert round_trip(LOSSY["fp16"], inside, count).isfinite().all()
    assert torch.equal(round_trip(LOSSY["fp16"], inside[:2], count), inside[:2])
    beyond = torch.tensor([65520.0 * count, -65520.0 * count, 1e38])
    assert round_trip(LOSSY["fp16"], beyond, count).tolist() == [float("inf"), float("-inf"), float("inf")]
    assert round_trip(LOSSY["bf16"], beyond, count).isfinite().all()


@pytest.mark.parametrize("count", (1, 2, 3, 4))
def test_a_sum_just_beyond_the_range_of_fp16_is_clamped(count):
    """Rounding can add half an ulp to each summand, so a sum that far beyond is clamped; a larger one becomes infinite."""
    form, inf = LOSSY["fp16"], float("inf")
    halves = 16.0 * count
    sums = torch.tensor([[65504 + halves, -65504 - halves, 65504, 1.0, 65504 * 1.01, -65504 * 1.01]])
    given = sums.clone()
    rounded = form.round_to_wire(sums, count)
    assert torch.equal(sums, given)
    assert rounded[0].tolist() == [65504, -65504, 65504, 1, inf, -inf]
    assert torch.equal(form.decode(form.encode_sum(sums, count), torch.float32), rounded)
    assert form.undo_scaling(rounded, count)[0, :4].tolist() == [65504 * count, -65504 * count, 65504 * count, count]
    for bad in (inf, -inf, float("nan")):
        for others in (1.0, 65504 + halves):
            assert not form.round_to_wire(torch.tensor([[others, bad]]), count)[0, 1].isfinite()


@pytest.mark.parametrize("count", (1, 2, 4))
@pytest.mark.parametrize("name", ("fp16", "bf16"))
def test_zeros_inf_and_nan_keep_their_value(name, count):
    values = [0.0, -0.0, float("inf"), float("-inf")]
    back = round_trip(LOSSY[name], torch.tensor(values), count)
    assert back.tolist() == values and torch.signbit(back).tolist() == [False, True, False, True]
    assert round_trip(LOSSY[name], torch.tensor([float("nan")]), count).isnan().all()


def test_fp32_is_exact():
    for dtype in (torch.float32, torch.float64):
        x = heavy_tailed(100).to(dtype) / 3
        form = wire_format("fp32", dtype)
        assert form.nbytes(100) == 100 * dtype.itemsize
        assert torch.equal(round_trip(form, x), x) and torch.equal(form.round_to_wire(x[None], 2)[0], x)


# int8


@pytest.mark.parametrize("n", (1, 127, 128, 129, 1000, 12_800))
def test_int8_is_scales_then_integers(n):
    x = heavy_tailed(n)
    whole = rows_of(x, 1, BLOCK)
    scales, integers = int8(whole[0].numpy())
    message = LOSSY["int8"].encode(whole, 3)[0].numpy().tobytes()
    assert message == scales.astype("<f4").tobytes() + integers.tobytes()
    expected = (integers * scales[:, None]).astype(np.float32).ravel()[:n]
    assert np.array_equal(round_trip(LOSSY["int8"], x).numpy(), expected)


def test_int8_rounds_halves_to_even():
    x = torch.zeros(128)
    x[:8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.49])
    assert round_trip(LOSSY["int8"], x)[:8].tolist() == [127, 0, 2, 2, 0, -2, -2, 3]


@few_examples
@given(st.lists(numbers, min_size=1, max_size=300))
def test_int8_of_any_numbers_is_within_half_a_step(values):
    """A step is the scale of the block, here computed in float64."""
    x = torch.tensor(values, dtype=torch.float32)
    back = round_trip(LOSSY["int8"], x)
    blocks = rows_of(x, 1, BLOCK).double().view(-1, BLOCK)
    step = (blocks.abs().amax(1, keepdim=True) / 127).clamp_min(float(TINY))
    error = rows_of((back.double() - x.double()), 1, BLOCK).view(-1, BLOCK).abs()
    assert back.isfinite().all()
    assert (error <= 0.5001 * step).all()
    assert torch.equal(round_trip(LOSSY["int8"], -x), -back)


def test_int8_blocks_are_independent():
    x = heavy_tailed(3 * BLOCK)
    alone = torch.cat([round_trip(LOSSY["int8"], block) for block in x.split(BLOCK)])
    assert torch.equal(round_trip(LOSSY["int8"], x), alone)
    for bad in (float("inf"), float("-inf"), float("nan")):
        broken = x.clone()
        broken[BLOCK + 7] = bad
        back = round_trip(LOSSY["int8"], broken)
        assert not back[BLOCK : 2 * BLOCK].isfinite().any()
        assert torch.equal(back[:BLOCK], alone[:BLOCK]) and torch.equal(back[2 * BLOCK :], alone[2 * BLOCK :])


@pytest.mark.parametrize("value", (0.0, DENORMAL, -3 * DENORMAL, float(TINY), 1e-36, LARGEST, -LARGEST, LARGEST / 127))
def test_int8_of_one_number_and_zeros(value):
    """Zeros stay zeros; a value far below the smallest normal float32 may become zero."""
    x = torch.zeros(200)
    x[3] = value
    back = round_trip(LOSSY["int8"], x)
    assert back.isfinite().all() and torch.equal(back[:3], x[:3]) and torch.equal(back[4:], x[4:])
    assert abs(back[3].item() - value) <= max(1e-6 * abs(value), 0.5001 * float(TINY))


def test_int8_of_zeros_is_zeros():
    message = LOSSY["int8"].encode(torch.zeros(2, 256), 2)
    assert not message[:, 8:].any()
    assert torch.equal(decoded(LOSSY["int8"], message), torch.zeros(2, 256))


def test_int8_of_float64():
    x = heavy_tailed(256).double()
    back = round_trip(LOSSY["int8"], x)
    assert back.dtype == torch.float64
    assert torch.equal(back, round_trip(LOSSY["int8"], x.float()).double())


def test_a_sum_in_int8_is_not_rounded_again():
    total = heavy_tailed(256)[None]
    assert torch.equal(LOSSY["int8"].round_to_wire(total, 2), total)


# Sizes and rows


@pytest.mark.parametrize("form,numel,nbytes", [
    (LOSSY["fp16"], 0, 0), (LOSSY["fp16"], 7, 14), (LOSSY["bf16"], 129, 258), (Cast("fp32", torch.float32), 3, 12),
    (Cast("fp32", torch.float64), 3, 24), (LOSSY["int8"], 0, 0), (LOSSY["int8"], 128, 132), (LOSSY["int8"], 1280, 1320),
])  # fmt: skip
def test_nbytes(form, numel, nbytes):
    assert form.nbytes(numel) == nbytes


@given(st.integers(0, 1000), st.integers(1, 5), st.sampled_from((1, 7, 128)))
@few_examples
def test_rows_of(numel, rows, multiple):
    """Rows have the same length, the smallest multiple of `multiple` that suffices; zeros fill the rest."""
    x = torch.arange(1, numel + 1)
    cut = rows_of(x, rows, multiple)
    assert len(cut) == rows and cut.shape[1] % multiple == 0
    assert cut.flatten()[:numel].equal(x) and not cut.flatten()[numel:].any()
    assert rows * multiple > cut.numel() - numel >= 0
    assert padded(numel, rows * multiple) == cut.numel()


@pytest.mark.parametrize("skipped", range(9))
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32, torch.float64))
def test_view_bytes_at_any_offset(dtype, skipped):
    """Values may begin at any byte of a message, because others may precede them, and rows may have any length."""
    x = heavy_tailed(12).to(dtype).view(2, 6)
    width = 6 * dtype.itemsize
    for length in (skipped + width, skipped + width + 1):
        message = torch.full((2, length), 255, dtype=torch.uint8)
        message[:, skipped : skipped + width] = x.view(torch.uint8)
        assert torch.equal(view_bytes(message[:, skipped : skipped + width], dtype), x)


@pytest.mark.parametrize("name", LOSSY)
def test_rows_are_encoded_independently(name):
    form, x = LOSSY[name], heavy_tailed(4 * 256).view(4, 256)
    message = form.encode(x, 4)
    for row in range(4):
        assert torch.equal(message[row : row + 1], form.encode(x[row : row + 1], 4))
    whole = decoded(form, message)
    assert torch.equal(whole[2:3], decoded(form, message[2:3]))
    spread = torch.zeros(4, message.shape[1] + 3, dtype=torch.uint8)  # after three other bytes
    spread[:, 3:] = message
    assert torch.equal(decoded(form, spread[:, 3:]), whole)
