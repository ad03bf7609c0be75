"""Attention on several ranks, forward and backward. Oracle: exact attention in float64 in one process."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from attention2d import USP, AllGather, Attention2D, Ring, Ulysses
from attention2d.compute import tile
from attention2d.layout.token_order import ORDERS
from attention_problems import Problem, exact, sub_group

FORWARD, GRADIENTS = 1e-13, 1e-12  # the largest absolute errors in float64: of out and lse, and of dq, dk and dv


def grids(ranks):
    """All (ulysses, rows, cols) whose product is `ranks`."""
    sizes = range(1, ranks + 1)
    return [grid for grid in itertools.product(sizes, repeat=3) if grid[0] * grid[1] * grid[2] == ranks]


def all_arguments(ranks):
    """All valid keyword arguments of Attention2D on `ranks` ranks."""
    found = []
    for ulysses, rows, cols in grids(ranks):
        for order, overlap in itertools.product(ORDERS, (False, True)):
            if order != "cyclic" or ulysses == 1:
                found.append(dict(rows=rows, cols=cols, ulysses=ulysses, order=order, overlap=overlap))
        if ulysses == 1:
            found += [
                dict(rows=rows, cols=cols, order="cyclic", overlap=overlap, transpose=True) for overlap in (False, True)
            ]
    return found


def head_counts(ulysses):
    """(query heads, key/value heads): equally many, half as many, and one key/value head for each rank of a cell."""
    return [(2 * ulysses, 2 * ulysses), (4 * ulysses, 2 * ulysses), (2 * ulysses, ulysses)]


def lengths(ranks):
    """Lengths that divide over the ranks, that do not, and that are smaller than the number of ranks."""
    return [16 * ranks, 8 * ranks - 1, 16 * ranks + 3, ranks - 1, 1]


def largest_errors(rank, work):
    """The largest error of out, lse, dq, dk and dv over `work`, a list of (arguments, problem), on this rank."""
    worst = [0.0] * 5
    for arguments, problem in work:
        schedule = Attention2D(dist.group.WORLD, **arguments)
        errors = problem.errors(schedule, problem.solve(schedule))
        assert max(errors) < 1e-3, (arguments, problem.seq, errors)
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    return worst


def make_work(ranks, chosen, count, skip=0):
    """[(arguments, problem)], `count` problems for each of the `chosen` arguments.

    The problems cycle through all lengths, masks and head counts. skip: how many of these combinations to leave out first.
    """
    kinds = itertools.cycle(
        (length, causal, index) for length, causal, index in itertools.product(lengths(ranks), (True, False), range(3))
    )
    work = []
    for _ in range(skip):
        next(kinds)
    for arguments, _ in itertools.product(chosen, range(count)):
        length, causal, index = next(kinds)
        heads, kv_heads = head_counts(arguments.get("ulysses", 1))[index]
        work.append((arguments, Problem.of(max(1, length), heads, kv_heads, causal, seed=len(work))))
    return work


def check(errors):
    assert max(max(each[:2]) for each in errors) <= FORWARD
    assert max(max(each[2:]) for each in errors) <= GRADIENTS


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_all_schedules_on_few_ranks(world_size, ranks):
    check(ranks(largest_errors, world_size, make_work(world_size, all_arguments(world_size), 1)))


OPTIONS = (
    {},
    dict(overlap=True),
    dict(order="contiguous"),
    dict(order="cyclic", overlap=True),
    dict(order="cyclic", transpose=True),
)


@pytest.mark.parametrize(
    "world_size, least",
    (pytest.param(6, 2, marks=pytest.mark.full), pytest.param(8, 2, marks=pytest.mark.full), (9, 3)),
)
def test_some_schedules_on_more_ranks(world_size, least, ranks):
    """Grids of at least `least` rows and columns, on which a wrong direction shows, and grids with ulysses=2."""
    chosen = [
        dict(rows=rows, cols=cols, **options)
        for ulysses, rows, cols in grids(world_size)
        for options in OPTIONS
        if ulysses == 1 and min(rows, cols) >= least
    ]
    shared = [
        dict(rows=rows, cols=cols, ulysses=2, overlap=overlap)
        for ulysses, rows, cols in grids(world_size)
        for overlap in (False, True)
        if ulysses == 2
    ]
    # These combinations include lengths smaller than the number of ranks.
    work = make_work(world_size, chosen, 1, skip=13) + make_work(world_size, shared, 1, skip=16)
    check(ranks(largest_errors, world_size, work))


@pytest.mark.full
@pytest.mark.parametrize("world_size", (2, 3, 4, 5, 6, 8, 9, 12))
def test_all_schedules(world_size, ranks):
    check(ranks(largest_errors, world_size, make_work(world_size, all_arguments(world_size), 4), timeout=900))


# Changes that must not change the result


@pytest.mark.parametrize("world_size, rows, cols", ((4, 2, 2), (6, 2, 3)))
@pytest.mark.parametrize("overlap", (False, True))
def test_two_runs_are_bitwise_equal(world_size, rows, cols, overlap, ranks):
    problem = Problem.of(16 * world_size - 3, 4, 2, True, dtype=torch.float32)

    def run(rank):
        return [problem.solve(Attention2D(dist.group.WORLD, rows, cols, overlap=overlap)) for _ in range(2)]

    for first, again in ranks(run, world_size):
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("dtype, largest", ((torch.float64, 1e-13), (torch.float32, 1e-5)))
@pytest.mark.parametrize(
    "world_size, rows, cols, ulysses",
    ((4, 2, 2, 1), (4, 2, 1, 2), pytest.param(8, 2, 2, 2, marks=pytest.mark.full), (3, 1, 3, 1)),
)
def test_overlap_makes_no_difference(world_size, rows, cols, ulysses, dtype, largest, ranks):
    problem = Problem.of(8 * world_size + 5, 4, 2, True, dtype=dtype)

    def run(rank):
        return [problem.solve(Attention2D(dist.group.WORLD, rows, cols, ulysses, overlap=on)) for on in (False, True)]

    for plain, overlapped in ranks(run, world_size):
        for ours, theirs in zip(plain, overlapped, strict=True):
            assert (ours - theirs).nan_to_num().abs().max() <= largest


@pytest.mark.parametrize("world_size, count", ((4, 2), (6, 2), pytest.param(8, 2, marks=pytest.mark.full), (6, 3)))
def test_disjoint_groups_at_once(world_size, count, ranks):
    """Several groups, none of which is the world, call different schedules on different problems at the same time."""
    size = world_size // count
    problems = [Problem.of(10 * size + 1 + index, 4, 2, True, seed=index) for index in range(count)]
    choices = [arguments for arguments in all_arguments(size) if arguments.get("ulysses", 1) <= 2]

    def run(rank):
        group, worst, number = sub_group(count), [], rank // size
        for index in range(len(choices)):
            schedule = Attention2D(group, **choices[(index + number) % len(choices)])
            worst.append(problems[number].errors(schedule, problems[number].solve(schedule)))
        return [max(each) for each in zip(*worst, strict=True)]

    check(ranks(run, world_size))


@pytest.mark.parametrize("world_size", [4])
def test_views_of_one_projection(world_size, ranks):
    """q, k and v are views of one tensor; and only some of them require gradients."""
    problem = Problem.of(12 * world_size, 4, 2, True)

    def run(rank):
        schedule = Attention2D(dist.group.WORLD, 1, world_size)
        q, k, v, dout = (schedule.shard(t) for t in problem.inputs)
        packed = torch.cat([q, k, v], dim=2).requires_grad_()
        out = schedule(*packed.split([4, 2, 2], dim=2), causal=True)
        out.backward(dout)
        found = [out.detach(), None, *packed.grad.split([4, 2, 2], dim=2)]
        for required in ((True, False, False), (False, True, True)):
            leaves = [t.clone().requires_grad_(flag) for t, flag in zip((q, k, v), required, strict=True)]
            schedule(*leaves, causal=True).backward(dout)
            for leaf, flag, gradient in zip(leaves, required, found[2:], strict=True):
                assert torch.equal(leaf.grad, gradient) if flag else leaf.grad is None
        with torch.no_grad():
            assert torch.equal(schedule(q, k, v, causal=True), found[0])
        found[1] = schedule(q, k, v, causal=True, return_lse=True)[1]
        return problem.errors(schedule, found)

    check(ranks(run, world_size))


@pytest.mark.parametrize("world_size", [4])
def test_scale_and_sizes(world_size, ranks):
    problems = [
        Problem.of(6 * world_size + 1, 2, 2, True, batch=1, head_dim=80, scale=0.01),
        Problem.of(6 * world_size + 1, 2, 1, False, batch=3, head_dim=64, scale=3.0),
        Problem.of(6 * world_size, 2, 1, True, batch=1, head_dim=5, scale=1e-6),
    ]
    check(ranks(largest_errors, world_size, [(dict(rows=world_size, cols=1), problem) for problem in problems]))


@pytest.mark.parametrize("world_size", [2])
def test_several_calls_before_backward(world_size, ranks):
    """One loss of several calls with sequences of different lengths; backward runs in reverse order."""
    problems = [Problem.of(seq * world_size, 4, 2, True, seed=seq) for seq in (4, 6, 4)]

    def run(rank):
        schedule = Attention2D(dist.group.WORLD, world_size // 2, 2, overlap=True)
        leaves = [[schedule.shard(t).requires_grad_() for t in problem.inputs[:3]] for problem in problems]
        outs = [schedule(*each, causal=True) for each in leaves]
        pairs = zip(outs, problems, strict=True)
        sum((out * schedule.shard(problem.inputs[3])).sum() for out, problem in pairs).backward()
        errors = []
        for problem, each in zip(problems, leaves, strict=True):
            gradients = zip(each, problem.answers[2:], strict=True)
            errors += [(leaf.grad - schedule.shard(answer)).abs().max().item() for leaf, answer in gradients]
        return max(errors)

    assert max(ranks(run, world_size)) <= GRADIENTS


@pytest.mark.parametrize("world_size, rows, cols", ((2, 1, 2), (4, 2, 2), (4, 1, 1)))
def test_long_sequences_are_attended_in_tiles(world_size, rows, cols, ranks, monkeypatch):
    monkeypatch.setattr(tile, "CPU_ELEMENTS", 5 * 2 * 4 * 16)  # five queries
    arguments = dict(rows=rows, cols=cols, ulysses=world_size // rows // cols)
    problems = [Problem.of(24 * world_size + 5, 4, 4, causal) for causal in (True, False)]
    options = itertools.product((False, True), problems)
    check(
        ranks(largest_errors, world_size, [(dict(arguments, overlap=overlap), problem) for overlap, problem in options])
    )


EQUIVALENT = {  # by number of ranks: schedules with the same result
    2: (Ring, AllGather, partial(Attention2D, rows=2, cols=1), partial(USP, ulysses=1)),
    4: (
        AllGather,
        partial(Attention2D, rows=4, cols=1),
        Ring,
        partial(USP, ulysses=1),
        partial(Attention2D, rows=1, cols=4),
    ),
    3: (Ulysses, partial(USP, ulysses=3), partial(Attention2D, rows=1, cols=1, ulysses=3)),
}


@pytest.mark.parametrize("world_size", [3, 4])
def test_equivalent_schedules(world_size, ranks):
    problem = Problem.of(11 * world_size, 6, 3, True)

    def run(rank):
        return [problem.solve(make(dist.group.WORLD)) for make in EQUIVALENT[world_size]]

    for first, *others in ranks(run, world_size):
        for other in others:
            assert all((a - b).nan_to_num().abs().max() <= 1e-13 for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("world_size", [4])
def test_values_in_padding_do_not_matter(world_size, ranks):
    """Padding may even be NaN."""
    problem = Problem.of(8 * world_size - 3, 4, 2, False)

    def run(rank):
        found = []
        for arguments in all_arguments(world_size):
            schedule = Attention2D(
                dist.group.WORLD,
                **dict(arguments) if arguments.get("ulysses", 1) <= 2 else dict(rows=world_size, cols=1),
            )
            padding = schedule.positions(problem.seq) >= problem.seq
            q, k, v, dout = (schedule.shard(t) for t in problem.inputs)
            for t in (q, k, v, dout):
                t[:, padding] = torch.nan
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out, lse = schedule(*leaves, seq=problem.seq, return_lse=True)
            out.backward(dout)
            found.append(problem.errors(schedule, [out.detach(), lse, *(t.grad for t in leaves)]))
        return [max(each) for each in zip(*found, strict=True)]

    check(ranks(run, world_size))


@pytest.mark.parametrize("world_size, rows, cols", ((2, 1, 2), (4, 2, 2)))
@pytest.mark.parametrize("reentrant", (False, True))
def test_recomputation_and_repeated_backward(world_size, rows, cols, reentrant, ranks):
    problem = Problem.of(8 * world_size, 4, 2, True)

    def run(rank):
        schedule = Attention2D(dist.group.WORLD, rows, cols)
        q, k, v, dout = (schedule.shard(t) for t in problem.inputs)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = checkpoint(partial(schedule, causal=True), *leaves, use_reentrant=reentrant)
        out.backward(dout)
        again = schedule(*leaves, causal=True)
        again.backward(dout, retain_graph=True)
        again.backward(dout)
        lse = schedule(q, k, v, causal=True, return_lse=True)[1]
        return problem.errors(schedule, [out.detach(), lse, *(t.grad / 3 for t in leaves)])

    check(ranks(run, world_size))


@pytest.mark.parametrize("world_size", [2])
def test_autocast(world_size, ranks):
    """float32 inputs, which rotary embeddings return, are cast as torch's own attention casts them."""
    problem = Problem.of(8 * world_size, 4, 2, True, dtype=torch.float32)

    def run(rank):
        schedule = Ring(dist.group.WORLD)
        q, k, v, _ = (schedule.shard(t) for t in problem.inputs)
        with torch.autocast("cpu", torch.bfloat16):
            out = schedule(q, k, v.bfloat16(), causal=True)
        return out.dtype, problem.errors(schedule, [out.float()])[0]

    for dtype, largest in ranks(run, world_size):
        assert dtype == torch.bfloat16 and largest <= 0.05


@pytest.mark.parametrize("world_size", [2])
def test_the_output_can_be_viewed_and_added_to(world_size, ranks):
    """It is contiguous for any batch size, and without gradients it can be changed in place."""

    def run(rank):
        for batch in (1, 3):
            q, kv = torch.randn(batch, 4, 4, 8), torch.randn(batch, 4, 2, 8)
            with torch.no_grad():
                out = Ring(dist.group.WORLD)(q, kv, kv)
                out += q
            out = Ring(dist.group.WORLD)(q.requires_grad_(), kv, kv)
            assert out.shape == q.shape and out.is_contiguous() and out.view(batch, 4, -1).requires_grad
            (out + q).sum().backward()

    ranks(run, world_size)


@pytest.mark.parametrize("world_size, arguments", ((4, dict(rows=2, cols=2)), (2, dict(rows=1, cols=1, ulysses=2))))
@pytest.mark.parametrize("overlap", (False, True))
def test_expanded_gradients(world_size, arguments, overlap, ranks):
    """The gradient of `sum()` is a single expanded element. Also a tiny element, whose square is 0."""
    problem = Problem.of(4 * world_size, 4, 2, True)
    leaves = [t.clone().requires_grad_() for t in problem.inputs[:3]]
    expected = torch.autograd.grad(exact(*leaves, True)[0].sum(), leaves)

    def run(rank):
        schedule = Attention2D(dist.group.WORLD, **arguments, overlap=overlap)
        q, k, v = (schedule.shard(t).requires_grad_() for t in problem.inputs[:3])
        out = schedule(q, k, v, causal=True)
        for factor in (1, 1e-30):
            found = torch.autograd.grad(out.sum() * factor, (q, k, v), retain_graph=True)
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours / factor - schedule.shard(theirs)).abs().max() <= GRADIENTS

    ranks(run, world_size)


def test_one_rank_needs_no_group():
    """The sequence may have any length."""
    problem = Problem.of(7, 4, 2, True)
    q, k, v = problem.inputs[:3]
    for schedule in (Ring(), Attention2D(None, 1, 1, order="cyclic")):
        assert (schedule(q, k, v, causal=True) - problem.answers[0]).abs().max() <= FORWARD
    for schedule in (
        Attention2D(None, 1, 1),
        Ring(),
        AllGather(),
        Ulysses(),
        USP(None, 1),
        Attention2D(rows=1, cols=1, order="cyclic"),
    ):
        check([problem.errors(schedule, problem.solve(schedule))])


# Lower precision


def relative_error(ours, theirs):
    """The root mean square error, relative to the root mean square."""
    return ((ours.double() - theirs).square().mean() / theirs.square().mean()).sqrt().item()


@pytest.mark.parametrize(
    "world_size, rows, cols", ((2, 2, 1), (4, 2, 2), pytest.param(8, 2, 4, marks=pytest.mark.full))
)
@pytest.mark.parametrize("overlap", (False, True))
def test_float32(world_size, rows, cols, overlap, ranks):
    problem = Problem.of(64 * world_size, 4, 2, True, dtype=torch.float32)

    def run(rank):
        schedule = Attention2D(dist.group.WORLD, rows, cols, overlap=overlap)
        return problem.errors(schedule, problem.solve(schedule))

    errors = [max(each) for each in zip(*ranks(run, world_size), strict=True)]
    assert max(errors[:2]) <= 5e-6 and max(errors[2:]) <= 1e-5


@pytest.mark.parametrize("world_size, rows, cols", ((4, 2, 2), (8, 2, 4)))
@pytest.mark.parametrize("overlap", (False, True))
def test_bfloat16_does_not_get_worse_with_more_ranks(world_size, rows, cols, overlap, ranks):
    """Because partial results are rounded once. Gradients are as exact as those of torch's attention in one process."""
    problem = Problem.of(512, 4, 2, True, batch=1, head_dim=64, dtype=torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in problem.inputs[:3]]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    out.backward(problem.inputs[3])
    answers = [problem.answers[0], *problem.answers[2:]]
    alone = [relative_error(*pair) for pair in zip([out.detach(), *(t.grad for t in leaves)], answers, strict=True)]

    def run(rank, rows, cols):
        schedule = Attention2D(dist.group.WORLD, rows, cols, overlap=overlap)
        out, _, *gradients = problem.solve(schedule)
        return [schedule.unshard(t) for t in (out, *gradients)]

    few, many = (
        [relative_error(*pair) for pair in zip(ranks(run, *grid)[0], answers, strict=True)]
        for grid in ((2, 1, 2), (world_size, rows, cols))
    )
    assert all(more <= 1.2 * less for less, more in zip(few, many, strict=True)), (few, many)
    limits = [1.7 * alone[0], *alone[1:]]
    assert all(ours <= limit for ours, limit in zip(many, limits, strict=True)), (many, alone)


# Bytes


def sent_and_volumes(rank, work):
    """For each (arguments, problem): the bytes that this rank sent (forward, backward), and those of `volume`."""
    found = []
    for arguments, problem in work:
        schedule = Attention2D(dist.group.WORLD, **arguments)
        q, k, v, dout = (schedule.shard(t) for t in problem.inputs)
        out = schedule(*(t.requires_grad_() for t in (q, k, v)), causal=problem.causal, seq=problem.seq)
        forward = schedule.counter.sent
        out.backward(dout)
        batch, seq, heads, head_dim = problem.inputs[0].shape
        volume = schedule.volume(batch, seq, heads, k.shape[2], head_dim, q.element_size())
        found.append(((forward, schedule.counter.sent - forward), (volume.forward, volume.backward)))
    return found


@pytest.mark.parametrize(
    "world_size, dtype",
    (
        (2, torch.float64),
        (3, torch.bfloat16),
        (4, torch.float64),
        (4, torch.bfloat16),
        pytest.param(6, torch.float32, marks=pytest.mark.full),
        pytest.param(8, torch.bfloat16, marks=pytest.mark.full),
    ),
)
def test_volume_is_what_is_sent(world_size, dtype, ranks):
    """The busiest rank sends exactly `volume`, and without transpose every rank does.

    Up to four ranks try all schedules, more ranks a part of them.
    """
    work = []
    for index, arguments in enumerate(all_arguments(world_size)):
        if world_size > 4 and (arguments["order"] == "contiguous" or index // 2 % 2):
            continue
        heads, kv_heads = head_counts(arguments.get("ulysses", 1))[index % 3]
        work.append((arguments, Problem.of(4 * world_size + index % 3, heads, kv_heads, True, dtype=dtype)))
    for arguments, *each in zip(
        (arguments for arguments, _ in work), *ranks(sent_and_volumes, world_size, work), strict=True
    ):
        sent, volumes = zip(*each, strict=True)
        assert len(set(volumes)) == 1 and tuple(map(max, zip(*sent, strict=True))) == volumes[0]
        if not arguments.get("transpose"):
            assert len(set(sent)) == 1


# Properties


@st.composite
def any_work(draw, world_size):
    """(arguments, problem)."""
    arguments = draw(st.sampled_from(all_arguments(world_size)))
    ulysses = arguments.get("ulysses", 1)
    kv_heads = ulysses * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    sizes = dict(
        batch=draw(st.integers(1, 2)), head_dim=draw(st.sampled_from((1, 8, 24))), seed=draw(st.integers(0, 99))
    )
    problem = Problem.of(draw(st.integers(1, 50)), heads, kv_heads, draw(st.booleans()), **sizes)
    return arguments, problem


@pytest.mark.parametrize("world_size", (2, 3, 4))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_schedule_on_any_problem(ranks, world_size, data):
    check(ranks(largest_errors, world_size, [data.draw(any_work(world_size))]))
