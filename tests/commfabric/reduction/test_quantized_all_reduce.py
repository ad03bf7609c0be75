"""The quantized all-reduce; oracles: float64 sums, the rounding and adding of each format in numpy, bytes by hand."""

import hashlib
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from sent_bytes import bytes_by_hand

import sparsefusion
from commfabric.collectives import counted as collectives
from commfabric.collectives.counted import Counter
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.curve import Curve
from commfabric.reduction import quantized
from commfabric.reduction.quantized import (
    CANDIDATES,
    FormatChoice,
    all_reduce,
    default_algorithm,
    format_choice,
    operation,
)

worlds = pytest.mark.parametrize("world", by_default((3,), (2, 3, 4)))
fewer = pytest.mark.parametrize("world", by_default((3,), (2, 3)))
FORMATS, ALGORITHMS = ("fp32", "fp16", "bf16", "int8"), ("native", "one_shot", "two_shot")
PAIRS = [pair for pair in product(FORMATS, ALGORITHMS) if pair != ("int8", "native")]
SHOTS = [(format, algorithm) for format, algorithm in PAIRS if algorithm != "native"]
BOUNDS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 5e-3, "int8": 3e-2}  # of ||error|| / ||sum||, for 1,000 elements or more
SIZES = (1, 2, 3, 127, 128, 129, 385, 1000, 1023, 4097, 10_000)
LARGE = (100_003, 1_000_000)
SPECIAL = (float("inf"), float("-inf"), float("nan"))


def heavy_tailed(n, rank):
    """The input of a rank: n float32 values from a heavy-tailed distribution, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * rank + n)
    return torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator))


def relative_error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def same_on_all_ranks(tensor):
    """Whether every rank holds the same bits."""
    digest = hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).digest()
    digests = collectives.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), dist.group.WORLD)
    return bool((digests == digests[0]).all())


# Oracles


def on_the_wire(format, x, world):
    """x, a float32 numpy array, as other ranks receive it. For int8 its length is a multiple of 128."""
    if format == "fp16":
        return (x / np.float32(world)).astype(np.float16).astype(np.float32) * np.float32(world)
    if format == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    if format == "int8":
        blocks = x.reshape(-1, 128)
        scales = np.maximum(np.abs(blocks).max(1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
        return (np.rint(blocks / scales).astype(np.float32) * scales).reshape(-1)
    return x


def by_numpy(format, algorithm, inputs):
    """The sum of `inputs` by one_shot or two_shot: each input is rounded, added in rank order, and the sum rounded again."""
    n, world = len(inputs[0]), len(inputs)
    multiple = 128 * (world if algorithm == "two_shot" else 1) if format == "int8" else 1
    padding = (0, -n % multiple)
    total = None
    for tensor in inputs:
        x = on_the_wire(format, np.pad(tensor.numpy(), padding), world)
        total = x if total is None else total + x
    return (total if (format, algorithm) == ("int8", "one_shot") else on_the_wire(format, total, world))[:n]


# Sums


@pytest.mark.parametrize("world", by_default((2, 3), (2, 3, 4)))
def test_sums_bits_and_bytes(ranks, world):
    """A sum is bitwise equal on all ranks, near the float64 sum, and sends as many bytes as predicted. By one_shot and
    two_shot it is bitwise numpy's. The input is unchanged, and the output does not share its memory."""

    def run(rank):
        for n, (format, algorithm) in product(SIZES, PAIRS):
            inputs = [heavy_tailed(n, r) for r in range(world)]
            x, counter, what = inputs[rank].clone(), Counter(), (n, format, algorithm)
            total = all_reduce(x, dist.group.WORLD, format, algorithm, counter)
            assert torch.equal(x, inputs[rank]), what
            assert total.data_ptr() != x.data_ptr() and total.shape == x.shape and total.dtype == x.dtype
            assert same_on_all_ranks(total), what
            assert counter.sent == bytes_by_hand(format, algorithm, n, world), what
            if algorithm != "native":
                assert np.array_equal(total.numpy(), by_numpy(format, algorithm, inputs)), what
            exact = sum(tensor.double() for tensor in inputs)
            # Relative to the sum of magnitudes: few values may cancel.
            scale = sum(tensor.double().abs() for tensor in inputs).norm()
            assert (total.double() - exact).norm() <= 2 * BOUNDS[format] * scale, what
            assert n < 1000 or relative_error(total, exact) <= BOUNDS[format], what

    ranks(run, world)


@worlds
@pytest.mark.parametrize("n", (LARGE[0], pytest.param(LARGE[1], marks=pytest.mark.full)))
def test_large_sums(ranks, world, n):
    def run(rank):
        inputs = [heavy_tailed(n, r) for r in range(world)]
        exact = sum(tensor.double() for tensor in inputs)
        for format, algorithm in PAIRS:
            counter = Counter()
            total = all_reduce(inputs[rank], dist.group.WORLD, format, algorithm, counter)
            assert same_on_all_ranks(total) and relative_error(total, exact) <= BOUNDS[format], (format, algorithm)
            assert counter.sent == bytes_by_hand(format, algorithm, n, world), (format, algorithm)

    ranks(run, world)


@worlds
def test_a_million_elements_in_int8(ranks, world):
    def run(rank):
        inputs = [heavy_tailed(1_000_000, r) for r in range(world)]
        total = all_reduce(inputs[rank], format="int8", algorithm="two_shot")
        return same_on_all_ranks(total), relative_error(total, sum(tensor.double() for tensor in inputs))

    for same, error in ranks(run, world):
        assert same and error <= BOUNDS["int8"]


@worlds
def test_fp16_and_bf16_give_the_same_bits_by_one_shot_and_two_shot(ranks, world):
    """So results do not depend on the algorithm, which is chosen by size."""

    def run(rank):
        for n, format, scale in product((1, 5, 1001), ("fp16", "bf16"), (1.0, 1e-7, 3e4)):
            x = heavy_tailed(n, rank) * scale
            one, two = (all_reduce(x, None, format, algorithm) for algorithm in ("one_shot", "two_shot"))
            assert one.view(torch.int32).equal(two.view(torch.int32)), (n, format, scale)

    ranks(run, world)


@fewer
def test_zeros(ranks, world):
    def run(rank):
        for n, pair in product((1, 128, 1000), PAIRS):
            assert torch.equal(all_reduce(torch.zeros(n), None, *pair), torch.zeros(n)), pair
            cancelling = heavy_tailed(n, 0) * {0: 1, 1: -1}.get(rank, 0)
            assert torch.equal(all_reduce(cancelling, None, *pair), torch.zeros(n)), pair

    ranks(run, world)


@fewer
@pytest.mark.parametrize("dtype,eps", [(torch.float64, 1e-15), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_dtypes(ranks, world, dtype, eps):
    """The sum has the tensor's dtype and is computed in at least fp32. Format "fp32" sends float64 without rounding."""
    n, itemsize = 1500, max(4, dtype.itemsize)

    def run(rank):
        inputs = [heavy_tailed(n, r).to(dtype) for r in range(world)]
        exact = sum(tensor.double() for tensor in inputs)
        for format, algorithm in PAIRS:
            counter, what = Counter(), (format, algorithm)
            total = all_reduce(inputs[rank], dist.group.WORLD, format, algorithm, counter)
            assert total.dtype == dtype and same_on_all_ranks(total), what
            own = eps if format == "fp32" else BOUNDS[format] + eps
            assert relative_error(total, exact) <= own, what
            scale = itemsize // 4 if format == "fp32" else 1
            assert counter.sent == pytest.approx(scale * bytes_by_hand(*what, n, world), abs=1), what
        if dtype != torch.float64:  # one rounding, of the fp32 sum
            wide = all_reduce(inputs[rank].float(), None, "fp32", "one_shot")
            assert torch.equal(all_reduce(inputs[rank], None, "fp32", "one_shot"), wide.to(dtype))

    ranks(run, world)


@fewer
def test_shapes(ranks, world):
    """Tensors may have any shape, also that of a scalar, and the strides may differ between ranks."""

    def run(rank):
        inputs = [heavy_tailed(60, r).view(3, 4, 5) for r in range(world)]
        forms = {
            "scalar": lambda x: x[0, 1, 2],
            "transposed": lambda x: x.mT if rank % 2 else x.mT.contiguous(),
            "part": lambda x: x[:, 1:3, ::2],
        }
        for (name, form), (format, algorithm) in product(forms.items(), PAIRS):
            total = all_reduce(form(inputs[rank]), None, format, algorithm)
            assert total.shape == form(inputs[0]).shape and total.is_contiguous(), name
            assert torch.equal(total, all_reduce(form(inputs[rank]).clone(), None, format, algorithm)), name
            exact = sum(form(tensor).double() for tensor in inputs)
            scale = max(form(tensor).abs().max() for tensor in inputs)
            assert (total.double() - exact).abs().max() <= 4 * BOUNDS[format] * scale, (name, format, algorithm)

    ranks(run, world)


@fewer
def test_strided_views(ranks, world):
    """The tensor and `exact` may be views of every third element, or of one column."""

    def run(rank):
        x, column = heavy_tailed(600, rank)[::3], heavy_tailed(40, rank).view(8, 5)[:, :1]
        for pair in PAIRS:
            assert torch.equal(all_reduce(x, None, *pair), all_reduce(x.clone(), None, *pair)), pair
            results = [all_reduce(x.clone(), None, *pair, exact=each) for each in (column, column.clone())]
            assert torch.equal(results[0][1], results[1][1]) and torch.equal(results[0][0], results[1][0]), pair

    ranks(run, world)


# The range of fp16


def at_the_edge(world, columns=2000):
    """(world, columns) integers of at most 65504 * world, where each column adds up to exactly plus or minus that limit.

    Partial sums may exceed the limit. The first columns are cases that are hard to get right.
    """
    edge = 65504 * world
    generator = torch.Generator().manual_seed(world)
    drawn = torch.randint(-edge, edge + 1, (world - 1, 20 * columns), generator=generator)
    sums = drawn.sum(0)
    target = torch.where(torch.rand(sums.shape, generator=generator) < 0.5, -edge, edge)
    last = target - sums
    found = torch.cat([drawn, last[None]])[:, last.abs() <= edge][:, :columns]
    signs = torch.tensor([1, 1, -1, 0][:world])  # a partial sum is 2 * edge
    hard = [torch.full((world,), 65504), torch.eye(world, dtype=torch.int64)[0] * edge]
    hard += [signs * edge] * (world > 2) + [torch.tensor([1, 1, -1, -1]) * edge] * (world == 4)
    if world == 2:  # their halves round to 40064 and 25456, whose sum is a tie between 65504 and infinity
        hard.append(torch.tensor([80096, 50912]))
    return torch.cat([torch.stack(hard, 1), found], 1).float()


@worlds
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fp16_is_finite_to_the_edge_of_its_range(ranks, world, algorithm):
    """If every |x| and |sum| <= 65504 * world, the result is finite and near the sum, whatever the partial sums are."""
    inputs = at_the_edge(world)
    exact = inputs.double().sum(0)
    assert inputs.abs().max() <= 65504 * world and exact.abs().max() <= 65504 * world and inputs.shape[1] > 1000

    def run(rank):
        total = all_reduce(inputs[rank], None, "fp16", algorithm)
        assert same_on_all_ranks(total)
        return total, all_reduce(inputs[rank], None, "bf16", algorithm)

    for total, bf16 in ranks(run, world):
        infinite = (~total.isfinite()).nonzero().flatten().tolist()
        assert not infinite, (
            f"{len(infinite)} columns, such as {inputs[:, infinite[0]].tolist()} -> {total[infinite[0]]}"
        )
        assert (total - exact).abs().max() <= 0.005 * 65504 * world
        assert bf16.isfinite().all()


@worlds
def test_fp16_is_infinite_beyond_its_range(ranks, world):
    """The result is inf or -inf on every rank; in bf16 it is finite."""
    edge = 65504.0 * world

    def run(rank):
        for factor, algorithm in product((1.02, 1.5), ALGORITHMS):
            for x in (torch.full((5,), factor * edge / world), torch.tensor([factor * edge * (rank == 0)])):
                for sign in (1, -1):
                    assert (all_reduce(sign * x, None, "fp16", algorithm) == sign * float("inf")).all(), algorithm
                    near = all_reduce(sign * x, None, "bf16", algorithm)
                    assert (near / (sign * factor * edge) - 1).abs().max() < 0.01

    ranks(run, world)


# NaN and infinity


@worlds
def test_nan_and_inf_are_kept(ranks, world):
    """On every rank only that element is not finite; in int8, only its block of 128 elements."""
    n, place = 1000, 500

    def run(rank):
        for (format, algorithm), bad, owner in product(PAIRS, SPECIAL, (0, world - 1)):
            x = heavy_tailed(n, rank)
            if rank == owner:
                x[place] = bad
            total = all_reduce(x, None, format, algorithm)
            finite, what = total.isfinite(), (format, algorithm, bad)
            broken = torch.zeros(n, dtype=torch.bool)
            broken[384:512] = format == "int8"
            broken[place] = True
            assert torch.equal(~finite, broken), what
            if format != "int8" and bad != bad:
                assert total[place].isnan(), what
            elif format != "int8":
                assert total[place] == bad, what
        opposite = torch.full((3,), float("inf") * (-1 if rank else 1))
        for pair in PAIRS:
            assert not all_reduce(opposite, None, *pair).isfinite().any(), pair

    ranks(run, world)


# Exact values


@worlds
def test_sums_with_exact(ranks, world):
    """`exact` is summed as if it were alone, and its bytes are counted. It does not change the other sum."""
    shapes = {(7,): torch.float32, (2, 3, 1): torch.float64, (5, 1): torch.bfloat16, (): torch.float32}

    def run(rank):
        for n, (shape, dtype), (format, algorithm) in product((1, 3, 1000), shapes.items(), PAIRS):
            counter, what = Counter(), (n, shape, format, algorithm)
            columns = [
                (1e6 * heavy_tailed(50, 10 + r)[: int(np.prod(shape))]).view(shape).to(dtype) for r in range(world)
            ]
            x = heavy_tailed(n, rank)
            total, column = all_reduce(x, dist.group.WORLD, format, algorithm, counter, exact=columns[rank])
            assert column.shape == shape and column.dtype == dtype and same_on_all_ranks(column)
            exact = sum(each.double() for each in columns)
            eps = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2**-8}[dtype]
            scale = sum(each.double().abs() for each in columns)
            assert ((column.double() - exact).abs() <= eps * scale).all(), what
            size = max(4, dtype.itemsize)
            if (format, algorithm, dtype) == ("fp32", "native", torch.float64):
                by_hand = -(-2 * (world - 1) * 4 * n // world) + -(-2 * (world - 1) * 8 * column.numel() // world)
            else:
                by_hand = bytes_by_hand(format, algorithm, n, world, column.numel(), size)
            assert counter.sent == by_hand, what
            alone = all_reduce(x, None, format, algorithm)
            if (format, algorithm) == (
                "fp32",
                "native",
            ):  # a ring adds each element in an order that depends on its index
                assert torch.allclose(total, alone, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(total, alone), what

    ranks(run, world)


@fewer
def test_calls(ranks, world):
    """How many collectives an all-reduce calls, and in which cases `exact` needs one more."""

    def calls(format, algorithm, exact):
        counter = Counter()
        all_reduce(torch.ones(5), None, format, algorithm, counter, exact)
        return dict(counter.calls)

    def run(rank):
        for format, algorithm in PAIRS:
            for exact in (None, torch.ones(2)):
                expected = {
                    "native": {"all_reduce": 1 + (exact is not None and format != "fp32")},
                    "one_shot": {"all_gather": 1},
                    "two_shot": {"all_to_all": 1, "all_gather": 1},
                }[algorithm]
                assert calls(format, algorithm, exact) == expected, (format, algorithm)

    ranks(run, world)


@fewer
def test_nothing_to_sum(ranks, world):
    """Without any elements nothing is sent. Either of the two tensors may be empty."""

    def run(rank):
        for format, algorithm in PAIRS:
            counter = Counter()
            empty = all_reduce(torch.empty(2, 0, 3), None, format, algorithm, counter)
            assert empty.shape == (2, 0, 3)
            empty, exact = all_reduce(torch.empty(0), None, format, algorithm, counter, exact=torch.empty(0, 1))
            assert empty.shape == (0,) and exact.shape == (0, 1)
            assert counter == Counter()
            total, exact = all_reduce(torch.ones(3), None, format, algorithm, exact=torch.empty(0, 1))
            assert exact.shape == (0, 1) and (total - world).abs().max() < 0.1

    ranks(run, world)


@fewer
def test_exact_values_with_an_empty_tensor(ranks, world):
    def run(rank):
        for format, algorithm in PAIRS:
            empty, exact = all_reduce(torch.empty(0), None, format, algorithm, exact=torch.full((2,), 0.1))
            assert empty.shape == (0,) and (exact - 0.1 * world).abs().max() < 1e-6, (format, algorithm)

    ranks(run, world)


# Gradients


@fewer
def test_gradients_are_those_of_one_rank(ranks, world):
    """Each rank's input gets the gradient of the sum, without communication; so does `exact`, together or alone."""
    weights = heavy_tailed(300, 90).double(), heavy_tailed(4, 91).double()

    def one_rank():
        summands = [heavy_tailed(300, r).double().requires_grad_() for r in range(world)]
        columns = [heavy_tailed(4, 50 + r).double().requires_grad_() for r in range(world)]
        loss = (sum(summands).sin() * weights[0]).sum() + (sum(columns).square() * weights[1]).sum()
        return torch.autograd.grad(loss, [*summands, *columns])

    expected = one_rank()

    def run(rank):
        for format, algorithm in PAIRS:
            counter = Counter()
            x = heavy_tailed(300, rank).double().requires_grad_()
            column = heavy_tailed(4, 50 + rank).double().requires_grad_()
            total, exact = all_reduce(2 * x / 2, dist.group.WORLD, format, algorithm, counter, exact=column * 1)
            loss = (total.sin() * weights[0]).sum() + (exact.square() * weights[1]).sum()
            before = counter.sent
            loss.backward()
            assert counter.sent == before
            # The sine's derivative is taken at the rounded sum.
            assert relative_error(x.grad, expected[rank]) <= 5 * BOUNDS[format], (format, algorithm)
            assert torch.allclose(column.grad, expected[world + rank], rtol=1e-12, atol=1e-12)
            identity = torch.autograd.grad(all_reduce(x, None, format, algorithm), x, weights[0])
            assert torch.equal(identity[0], weights[0])
            total, exact = all_reduce(x, None, format, algorithm, exact=column)
            assert torch.equal(torch.autograd.grad(exact, column, weights[1])[0], weights[1])
            assert not all_reduce(x.detach(), None, format, algorithm).requires_grad

    ranks(run, world)


# Groups


def test_without_a_group_the_sum_is_a_copy():
    x = heavy_tailed(10, 0).requires_grad_()
    for format in (*FORMATS, "auto"):
        counter = Counter()
        total = sparsefusion.all_reduce(x, format=format, counter=counter)
        assert torch.equal(total, x) and total.data_ptr() != x.data_ptr() and counter == Counter()
        total, exact = sparsefusion.all_reduce(x, format=format, exact=x)
        assert torch.equal(total, x) and torch.equal(exact, x) and exact.data_ptr() != x.data_ptr()
        assert torch.equal(torch.autograd.grad(total.sum() + 2 * exact.sum(), x)[0], torch.full((10,), 3.0))


@pytest.mark.parametrize("world", (3, pytest.param(4, marks=pytest.mark.full)))
def test_in_a_group_of_some_ranks(ranks, world):
    """By default the sum is in fp16 among all ranks. With a group, only its ranks take part."""

    def run(rank):
        group, alone = dist.new_group(range(1, world)), dist.new_group([0])
        whole = sparsefusion.all_reduce(torch.full((3,), 2.0**rank))
        assert torch.equal(whole, all_reduce(torch.full((3,), 2.0**rank), dist.group.WORLD, "fp16", "one_shot"))
        if rank == 0:
            counter = Counter()
            assert torch.equal(all_reduce(whole, alone, "int8", counter=counter), whole) and counter == Counter()
            return whole[0].item()
        return [all_reduce(torch.full((300,), 2.0**rank), group, *pair)[299].item() for pair in PAIRS]

    first, *others = ranks(run, world)
    assert first == pytest.approx(2**world - 1, rel=1e-3)
    for sums in others:
        assert sums == pytest.approx([2**world - 2] * len(PAIRS), rel=0.01)


@fewer
def test_errors_come_before_messages(ranks, world):
    """Every rank raises the same error, which says what would be right, and sends nothing."""
    floats, integers = torch.ones(3), torch.ones(3, dtype=torch.int64)
    refused = [
        (dict(tensor=floats, format="fp8"), "unknown format 'fp8': expected fp32, fp16, bf16, int8, auto"),
        (dict(tensor=floats, algorithm="ring"), "unknown algorithm 'ring': expected native, one_shot, two_shot"),
        (dict(tensor=floats, format="int8", algorithm="native"), "int8 has no native all-reduce"),
        (
            dict(tensor=floats, format="auto", algorithm="one_shot"),
            "algorithm must be None with format='auto', not 'one_shot'",
        ),
        (dict(tensor=integers), "needs floating-point tensors, not torch.int64"),
        (dict(tensor=[1.0]), "needs floating-point tensors, not list"),
        (dict(tensor=floats, exact=integers), "needs floating-point tensors, not torch.int64"),
    ]

    def run(rank):
        counter = Counter()
        for arguments, message in refused:
            for group in (dist.group.WORLD, None):
                with pytest.raises(ValueError, match=message):
                    all_reduce(group=group, counter=counter, **arguments)
        assert counter == Counter()
        return all_reduce(torch.ones(1)).item()  # no rank still waits for a message of a failed call

    assert ranks(run, world) == [world] * world
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            all_reduce(**arguments)


# Algorithms


@pytest.mark.parametrize("format,numel,world,device,algorithm", [
    ("fp32", 1, 2, "cpu", "native"), ("fp32", 10**6, 4, "cuda", "native"),
    ("fp16", 10**6, 2, "cpu", "one_shot"), ("int8", 10**6, 2, "cpu", "one_shot"), ("bf16", 1, 4, "cpu", "one_shot"),
    ("bf16", 24_576, 3, "cpu", "one_shot"), ("bf16", 24_577, 3, "cpu", "two_shot"),
    ("fp16", 10_880, 4, "cpu", "one_shot"), ("fp16", 10_881, 4, "cpu", "two_shot"),
    ("int8", 165 * 128, 4, "cpu", "one_shot"), ("int8", 165 * 128 + 1, 4, "cpu", "two_shot"),
    ("fp16", 10**6, 4, "cuda", "native"), ("bf16", 1, 2, "cuda", "native"), ("int8", 10**6, 4, "cuda", "two_shot"),
])  # fmt: skip
def test_default_algorithm(format, numel, world, device, algorithm):
    """One round is preferred to two if it sends at most 32 KB more; two ranks need only one."""
    assert default_algorithm(format, numel, world, device) == algorithm


@fewer
def test_the_default_algorithm_is_used(ranks, world):
    def run(rank):
        for format, n in product(FORMATS, (5, 20_000, 40_000)):
            counter, chosen = Counter(), default_algorithm(format, n, world)
            all_reduce(torch.ones(n), None, format, counter=counter)
            assert counter.sent == bytes_by_hand(format, chosen, n, world), (format, n)

    ranks(run, world)


# auto


def fabric_of(world=2, **seconds):
    """A fabric where the named candidates take these seconds, or (latency, seconds per byte), and all others one second."""
    times = {operation(*pair): (1.0, 0.0) for pair in CANDIDATES}
    for name, time in seconds.items():
        times[operation(*name.split("_", 1))] = time if isinstance(time, tuple) else (time, 0.0)
    sizes = [1 << bits for bits in range(8, 24)]
    points = {name: [(size, alpha + beta * size) for size in sizes] for name, (alpha, beta) in times.items()}
    return Fabric(tuple(Curve.fit(name, world, curve) for name, curve in points.items()))


@pytest.mark.parametrize("seconds,chosen", [
    (dict(int8_two_shot=0.5), ("int8", "two_shot")),
    (dict(int8_two_shot=0.5, fp16_one_shot=0.52), ("fp16", "one_shot")),
    (dict(int8_two_shot=0.5, fp16_one_shot=0.53), ("int8", "two_shot")),
    (dict(int8_two_shot=0.5, int8_one_shot=0.51), ("int8", "one_shot")),
    (dict(int8_two_shot=0.5, fp16_two_shot=0.51, fp16_native=0.515, fp32_native=0.55), ("fp16", "native")),
    (dict(int8_two_shot=0.5, fp32_native=0.52, fp16_native=0.5), ("fp32", "native")),
    (dict(int8_two_shot=0.98), ("fp32", "native")),
    ({}, ("fp32", "native")),
])  # fmt: skip
def test_auto_takes_the_most_exact_of_the_fastest(seconds, chosen):
    """Candidates within 5 % of the fastest count as equally fast."""
    assert FormatChoice(fabric_of(**seconds), 2).choose(1000) == chosen


def test_auto_chooses_by_size():
    """It chooses few rounds for small tensors and few bytes for large ones. The size is that in float32."""
    fabric = fabric_of(fp32_native=(1e-4, 1e-8), fp16_one_shot=(2e-4, 5e-9), int8_two_shot=(4e-4, 2e-9))
    chooser = FormatChoice(fabric, 2)
    for numel in [1 << bits for bits in range(22)]:
        seconds = {
            ("fp32", "native"): 1e-4 + 1e-8 * 4 * numel,
            ("fp16", "one_shot"): 2e-4 + 5e-9 * 4 * numel,
            ("int8", "two_shot"): 4e-4 + 2e-9 * 4 * numel,
        }
        near = [pair for pair, time in seconds.items() if time <= 1.05 * min(seconds.values())]
        assert chooser.choose(numel) == near[0], numel
    # Times are equal at 20,000 and 66,667 bytes; the more exact format is chosen until it is 5 % slower.
    assert str(chooser) == "from 1 KB fp32 native, from 32 KB fp16 one_shot, from 128 KB int8 two_shot"


@pytest.fixture
def short_measurement(monkeypatch):
    """`auto` measures two sizes with few repetitions."""
    monkeypatch.setattr(quantized, "AUTO_SIZES", [2048, 65536])
    monkeypatch.setattr("commfabric.fabric.measurement.BUDGET_S", 0.0)


NUMELS = [1 << bits for bits in range(9, 15)]  # from 2 to 64 KB, the sizes measured


@worlds
def test_all_ranks_make_the_same_choice(ranks, world, short_measurement, monkeypatch):
    """They choose from the same fabric, measured once for each group. The sums are those of the chosen format."""
    measured, measure = [], quantized.measure
    monkeypatch.setattr(quantized, "measure", lambda *args, **kwargs: measured.append(1) or measure(*args, **kwargs))

    def run(rank):
        chooser = format_choice(dist.group.WORLD)
        for n in (5, 2000, 100_000):
            x, counter = heavy_tailed(n, rank), Counter()
            total = all_reduce(x, None, "auto", counter=counter, exact=x)[0]
            format, algorithm = chooser.choose(n)
            assert counter.sent == bytes_by_hand(format, algorithm, n, world, n)
            assert torch.allclose(total, all_reduce(x, None, format, algorithm), rtol=1e-5, atol=1e-5)
        assert format_choice(dist.group.WORLD) is chooser and len(measured) == 1
        other = dist.new_group(range(world))
        all_reduce(x, other, "auto")
        assert format_choice(other) is not chooser and len(measured) == 2
        return chooser.fabric, [chooser.choose(n) for n in NUMELS], str(chooser)

    first, *others = ranks(run, world)
    assert all(other == first for other in others)
    assert {curve.operation for curve in first[0].curves} == {operation(*pair) for pair in CANDIDATES}


@fewer
def test_a_choice_for_each_kind_of_device(ranks, world, monkeypatch):
    """A group may have one backend for the CPU and another for CUDA; the choice for one must not be used for the other."""
    measured = []
    monkeypatch.setattr(quantized, "measure", lambda group, calls, sizes, device, race: measured.append(device))
    monkeypatch.setattr(FormatChoice, "__str__", lambda choice: "")

    def run(rank):
        devices = (torch.device("cuda", 0), "cpu", "cuda:1", torch.device("cpu"))
        choices = [format_choice(dist.group.WORLD, device) for device in devices]
        assert choices[0] is choices[2] and choices[1] is choices[3]
        return list(map(str, measured))

    assert ranks(run, world) == [["cuda:0", "cpu"]] * world


@fewer
def test_a_candidate_that_is_slow_on_one_rank_is_chosen_on_none(ranks, world, short_measurement):
    """The other ranks measure it as fast, but use the times of the slowest rank."""
    from time import perf_counter

    def run(rank):
        if rank == world - 1:
            original = collectives.all_reduce

            def slow(tensor, *arguments, **keywords):
                until = perf_counter() + 0.02 * (tensor.dtype == torch.float32)
                while perf_counter() < until:
                    pass
                return original(tensor, *arguments, **keywords)

            collectives.all_reduce = slow
        chooser = format_choice(dist.group.WORLD)
        return [chooser.choose(n) for n in NUMELS]

    first, *others = ranks(run, world)
    assert all(other == first for other in others)
    assert ("fp32", "native") not in first
