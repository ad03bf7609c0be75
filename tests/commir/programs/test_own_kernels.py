"""Kernels of a user's own. Oracle: the pattern in plain operations, torch's products, and float64 attention."""

import pytest
import torch
import torch.distributed as dist

import commir
from commir import In, Mesh, Out, Plan, Schedule, execute, grid, kernel, known, programs, verify
from commir.execution.verifier import VerificationError
from commir.programs.kernels import kernels_of
from commir.scheduling.loop_nest import IllegalSchedule
from loop_programs import assert_close, attention, attention_backward, linear


@commir.operator
def product(m=4, n=4, k=4):
    x = In[m, k]
    y = In[k, n]
    z = Out[m, n]
    for m, n, k in grid("ssr"):
        z[m, n] += x[m, k] * y[k, n]


@commir.operator
def nearest(points=8, centres=8):
    x = In[points]
    y = In[centres]
    best = Out[points]
    for points, centres in grid("sr"):
        best[points] = max(best[points], -torch.abs(x[points] - y[centres]))


@kernel(product)
def blas(x, y):
    return x @ y


@kernel(product)
def forgetful_blas(x, y):
    """The last element of a long sum is missing."""
    return x[:, :-1] @ y[:-1]


@kernel(product)
def transposed_blas(x, y):
    return (x @ y).T


@kernel(nearest)
def sorted_nearest(x, y):
    y = y.sort().values
    after = (
        torch.searchsorted(y, x).clamp(1, max(len(y) - 1, 1)) if len(y) > 1 else torch.zeros(len(x), dtype=torch.long)
    )
    return -torch.minimum((x - y[after]).abs(), (x - y[(after - 1).clamp(0)]).abs())


@kernel("attention")
def softmax(q, k, v, indices, causal, scale):
    """In the layout (batch, heads, seq, dim), with an explicit mask."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = (q @ k.mT) * scale
    if causal:
        scores = scores.masked_fill(indices["q"][:, None] < indices["kv"], -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse.clamp(min=-1e300)).exp() @ v
    return out.transpose(1, 2), lse.squeeze(-1).transpose(1, 2)


@kernel("attention")
def softmax_without_offsets(q, k, v, indices, causal, scale):
    """A causal mask by the places inside of a block, as if it were the whole sequence."""
    local = {axis: torch.arange(len(each)) for axis, each in indices.items()}
    return softmax(q, k, v, local, causal, scale)


@kernel("attention_backward")
def gradients(dout, q, k, v, lse, delta, indices, causal, scale):
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        scores = scores.masked_fill(indices["q"][:, None] < indices["kv"], -torch.inf)
    weights = (scores - lse.transpose(1, 2)[..., None]).exp()
    dscores = weights * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - delta.transpose(1, 2)[..., None]) * scale
    dk, dv = torch.einsum("bhqk,bqhd->bkhd", dscores, q), torch.einsum("bhqk,bqhd->bkhd", weights, dout)
    dk, dv = (x.unflatten(2, (-1, groups)).sum(3) for x in (dk, dv))
    return torch.einsum("bhqk,bkhd->bqhd", dscores, k), dk, dv


def run_plans(rank, chosen):
    """The outputs of each (plan, inputs) on this rank."""
    return [execute(plan, plan.shard(inputs, rank), dist.group.WORLD) for plan, inputs in chosen]


def test_kernels_on_ranks(ranks):
    """Matrix products, attention and its gradients, in rings and with collectives."""
    cases = [
        (linear(programs.all_gather_matmul, 8, 12, 20), Mesh(x=4), ["all-gather, then product", "AsyncTP"], "blas"),
        (linear(programs.matmul_reduce_scatter, 8, 12, 20), Mesh(x=4), ["AsyncTP"], "blas"),
        (attention(16, 4, 4), Mesh(x=4), ["ring", "all-gather", "Ulysses"], "softmax"),
        (attention(16, 4, 2), Mesh(x=2, y=2), ["USP", "double ring", "Attention2D, overlapped"], "softmax"),
        (attention_backward(16, 4, 2), Mesh(x=2, y=2), ["USP", "Attention2D"], "gradients"),
    ]
    chosen, expected = [], []
    for case, mesh, names, used in cases:
        for name in names:
            plan = known(Schedule(case.program, mesh), name).patch(used).lower()
            verify(plan)
            assert Plan.from_json(plan.to_json()) == plan and used in plan.to_json()
            chosen.append((plan, case.inputs))
            expected.append(case.expected)
    results = ranks(run_plans, 4, chosen)
    for index, (plan, _) in enumerate(chosen):
        assert_close(plan.unshard([result[index] for result in results]), expected[index])


def test_a_kernel_of_a_users_operator(ranks):
    program = nearest(dtype="float64", points=16, centres=8)
    tiled = Schedule(program, Mesh(x=4)).tile("points", 4).tile("centres", 4)
    plan = tiled.parallelize("points.o", "x").shift("centres.o", "x").patch("sorted_nearest").lower()
    verify(plan)
    inputs = {"x": torch.randn(16, dtype=torch.float64), "y": torch.randn(8, dtype=torch.float64)}
    results = [result[0] for result in ranks(run_plans, 4, [(plan, inputs)])]
    assert_close(plan.unshard(results), {"best": -(inputs["x"][:, None] - inputs["y"]).abs().amin(1)})


@pytest.mark.parametrize(
    ("make", "name", "wrong", "words"),
    [
        (linear, "AsyncTP", "forgetful_blas", r"c\[0, 0\] is \S+ and should be"),
        (linear, "AsyncTP", "transposed_blas", r"do not fit together|should be"),
        (attention, "ring", "softmax_without_offsets", r"out\[.*\] is \S+ and should be .*causal = True"),
    ],
)
def test_a_wrong_kernel_is_refused(make, name, wrong, words):
    case = make(programs.all_gather_matmul, 8, 12, 20) if make is linear else make(16)
    plan = known(Schedule(case.program, Mesh(x=4)), name).patch(wrong).lower()
    with pytest.raises(VerificationError, match=words):
        verify(plan)


def test_which_programs_have_a_pattern():
    """Names may differ, but not the dimensions, the operations, the numbers or the reduction."""
    with_blas = [programs.all_gather_matmul(8, 8, 8), programs.matmul_reduce_scatter(8, 8, 8)]
    assert all("blas" in kernels_of(program) for program in with_blas)
    others = [
        programs.weighted_sum(8, 8),
        programs.attention(1, 1, 1, 8, 4),
        nearest(),
        programs.selective_scan(1, 8, 2, 2, 2),
    ]
    assert not any("blas" in kernels_of(program) for program in others)
    assert "sorted_nearest" in kernels_of(nearest()) and "softmax" in kernels_of(others[1])

    @commir.operator
    def of_transposed(m=4, n=4, k=4):
        x = In[m, k]
        y = In[n, k]
        z = Out[m, n]
        for m, n, k in grid("ssr"):
            z[m, n] += x[m, k] * y[n, k]

    @commir.operator
    def square(m=4, k=4):
        x = In[m, k]
        z = Out[m]
        for m, k in grid("sr"):
            z[m] += x[m, k] * x[m, k]

    @commir.operator
    def doubled(m=4, n=4, k=4):
        x = In[m, k]
        y = In[k, n]
        z = Out[m, n]
        for m, n, k in grid("ssr"):
            z[m, n] += 2 * x[m, k] * y[k, n]

    for other in (of_transposed(), square(), doubled()):
        assert "blas" not in kernels_of(other)

    @commir.operator
    def exponentials(rows=4, cols=4):
        a = In[rows, cols]
        c = Out[rows]
        for rows, cols in grid("sr"):
            c[rows] += torch.exp(a[rows, cols])

    @commir.operator
    def logarithms(i=4, j=4):
        x = In[i, j]
        y = Out[i]
        for i, j in grid("sr"):
            y[i] += torch.log(x[i, j])

    @kernel(exponentials)
    def sum_of_exponentials(a):
        return a.exp().sum(1)

    assert "sum_of_exponentials" in kernels_of(exponentials()) and "sum_of_exponentials" not in kernels_of(logarithms())


def test_errors_of_kernels():
    schedule = known(Schedule(programs.attention(1, 4, 4, 16, 8), Mesh(x=4)), "ring")
    with pytest.raises(IllegalSchedule, match=r"patch\(blas\): attention has no kernel 'blas': expected library or"):
        schedule.patch("blas")
    with pytest.raises(ValueError, match="pattern 'flash': expected an operator"):
        kernel("flash")
    with pytest.raises(ValueError, match="a kernel cannot be called library"):
        kernel(product)(lambda_named("library"))


def lambda_named(name):
    """A function with this name."""

    def function(x, y):
        return x @ y

    function.__name__ = name
    return function
