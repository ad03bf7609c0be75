"""Tensor-parallel layers and sums over ranks. Oracles: plain sums of tensors, torch's Linear and Embedding."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import megatron_ssm
from hf import save_hf
from megatron_ssm.layers.operator import Partial, as_input, sum_of
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    Packed,
    RowParallelLinear,
    VocabularyParallel,
    vocabulary_range,
)
from megatron_ssm.parallel.operators import copy_to_ranks, gather_last, reduce_from_ranks, sum_over_ranks
from megatron_ssm.parallel.ranks import Ranks

EXACT = dict(rtol=0, atol=1e-12)  # everything here is float64
worlds = pytest.mark.parametrize("world", (2, 3, 4))


def normal(*shape, seed=0):
    """The same float64 numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def poisoned(module):
    """Fill the module's parameters with NaN, so that a parameter that is never written is noticed."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    return module


# The three operators

OPERATORS = {  # name: (operator, forward sums, backward sums)
    "copy_to_ranks": (copy_to_ranks, False, True),
    "reduce_from_ranks": (reduce_from_ranks, True, False),
    "sum_over_ranks": (sum_over_ranks, True, True),
}


@worlds
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_against_plain_sums(ranks, world, name):
    operator, sums_forward, sums_backward = OPERATORS[name]
    given = [normal(2, 5, 3, seed=rank) for rank in range(world)]
    weights = [normal(2, 5, 3, seed=10 + rank) for rank in range(world)]

    def forward_and_backward(rank):
        shared = Ranks.of(dist.group.WORLD)
        x = given[rank].clone().requires_grad_()
        y = operator(x, shared.group, shared.all_reduce_exact)
        y.backward(weights[rank])
        assert torch.equal(x, given[rank]), "the input was overwritten"
        return y.detach(), x.grad

    for rank, (y, grad) in enumerate(ranks(forward_and_backward, world)):
        torch.testing.assert_close(y, sum(given) if sums_forward else given[rank], **EXACT)
        torch.testing.assert_close(grad, sum(weights) if sums_backward else weights[rank], **EXACT)


@worlds
@pytest.mark.parametrize("name", OPERATORS)
def test_every_rank_gets_the_same_bits(ranks, world, name):
    operator, sums_forward, _ = OPERATORS[name]

    def forward_and_backward(rank):
        shared = Ranks.of(dist.group.WORLD)
        x = normal(1000, seed=rank).float().requires_grad_()
        y = operator(x, shared.group, shared.all_reduce_exact)
        y.backward(normal(1000, seed=10 + rank).float())
        return y if sums_forward else x.grad

    first, *others = ranks(forward_and_backward, world)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", OPERATORS)
def test_one_rank_needs_no_operator(name):
    x = normal(3)
    assert OPERATORS[name][0](x, None, Ranks().all_reduce_exact) is x


@worlds
def test_gather_last(ranks, world):
    whole, weight = normal(2, 5, 3 * world), normal(2, 5, 3 * world, seed=1)

    def forward_and_backward(rank):
        x = whole[..., 3 * rank : 3 * rank + 3].clone().requires_grad_()
        y = gather_last(x, Ranks.of(dist.group.WORLD))
        y.backward(weight)
        return y.detach(), x.grad

    for rank, (y, grad) in enumerate(ranks(forward_and_backward, world)):
        assert torch.equal(y, whole)
        assert torch.equal(grad, weight[..., 3 * rank : 3 * rank + 3])


@worlds
def test_a_group_of_one_rank_is_one_rank(ranks, world):
    def alone(rank):
        ranks = Ranks.of(dist.new_group([rank], use_local_synchronization=True))
        return ranks.group, ranks.rank, ranks.size

    assert ranks(alone, world) == [(None, 0, 1)] * world


@pytest.mark.parametrize("tp, dp", [(4, 1), (4, 2), (6, 1)])
def test_neighbours_that_hold_the_same_piece(ranks, tp, dp):
    """With two pieces, each half of a replica sums on its own, even if some ranks have created groups before."""

    def sum_over_neighbours(rank):
        replicas = [dist.new_group(range(i * tp, (i + 1) * tp)) for i in range(dp)]
        if rank % 3 == 0:
            dist.new_group([rank], use_local_synchronization=True)
        whole = Ranks.of(replicas[rank // tp])
        half = whole.with_same_piece(2)
        assert whole.with_same_piece(1) is whole
        assert [whole.with_same_piece(pieces).group for pieces in (tp, 2 * tp)] == [None, None]
        return sum_over_ranks(normal(3, seed=rank), half.group, half.all_reduce_exact)

    for rank, total in enumerate(ranks(sum_over_neighbours, tp * dp)):
        first = rank // (tp // 2) * (tp // 2)
        expected = sum(normal(3, seed=other) for other in range(first, first + tp // 2))
        torch.testing.assert_close(total, expected, **EXACT)


@pytest.mark.parametrize("tp, dp", [(4, 1), (4, 2), (8, 1)])
def test_loading_again_makes_no_more_groups(ranks, tp, dp, tmp_path):
    """The first Zamba with two mamba heads creates one more group; models that are loaded later reuse it."""
    save_hf(tmp_path / "a", "zamba", num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8)
    save_hf(tmp_path / "b", "zamba", num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8, seed=1)
    ids = torch.arange(12).view(2, 6)

    def run(rank):
        replicas = [dist.new_group(range(i * tp, (i + 1) * tp)) for i in range(dp)]
        counts, logits = [len(dist.distributed_c10d._world.pg_names)], []
        for name in ("a", "b", "a"):
            model = megatron_ssm.load(tmp_path / name, replicas[rank // tp], dtype=torch.float64)
            counts.append(len(dist.distributed_c10d._world.pg_names))
            with torch.no_grad():
                logits.append(model(ids))
        return [count - counts[0] for count in counts], logits

    with torch.no_grad():
        first, second = (megatron_ssm.load(tmp_path / n, dtype=torch.float64)(ids) for n in ("a", "b"))
    for made, logits in ranks(run, tp * dp):
        assert made == [0, 1, 1, 1]
        for found, expected in zip(logits, (first, second, first), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# Packed parameters


def packed(dtype=torch.float64):
    """A module with fields a (2 rows), b (3) and c (1) of four columns, and their expected concatenation."""
    module = Packed({"a": 2, "b": 3, "c": 1}, (4,), Ranks(), dtype)
    whole = normal(6, 4).to(dtype)
    with torch.no_grad():
        for field, rows in zip(module.parameters(), whole.split([2, 3, 1]), strict=True):
            field.copy_(rows)
    return module, whole


def trained(module):
    torch.optim.SGD(module.parameters(), lr=1.0).step(lambda: module().sum().backward())


def assigned(module):
    module.load_state_dict({name: t.clone() for name, t in module.state_dict().items()}, assign=True)


CHANGES = {  # change of a module: (function, the expected fields afterwards, whether reading them still copies nothing)
    "nothing": (lambda m: m, lambda w: w, True),
    "to(float32)": (lambda m: m.to(torch.float32), lambda w: w.float(), True),
    "half().double()": (lambda m: m.half().double(), lambda w: w.half().double(), True),
    "deepcopy": (copy.deepcopy, lambda w: w, True),
    "deepcopy of to(float32)": (lambda m: copy.deepcopy(m.float()), lambda w: w.float(), True),
    "optimizer step": (lambda m: trained(m) or m, lambda w: w - 1, True),
    "load_state_dict": (lambda m: m.load_state_dict(packed()[0].state_dict()) and m, lambda w: w, True),
    "load_state_dict(assign=True)": (lambda m: assigned(m) or m, lambda w: w, False),
    "data of one field moved": (lambda m: setattr(m.b, "data", m.b.data + 1), None, False),
    "one field replaced": (lambda m: setattr(m, "b", nn.Parameter(m.b.data + 1)), None, False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_packed_reads_its_fields_whatever_happened(change):
    apply, expected, free = CHANGES[change]
    module, whole = packed()
    module = apply(module) or module
    if expected is None:
        whole[2:5] += 1
    else:
        whole = expected(whole)
    with torch.no_grad():
        read = module()
    assert torch.equal(read, whole)
    assert (read.data_ptr() == module.a.data_ptr()) == free
    assert (module().data_ptr() == module.a.data_ptr()) == free, "also when gradients are wanted"
    assert torch.equal(module(), whole), "with gradients wanted"
    with torch.no_grad():
        module.b.mul_(2)
        assert torch.equal(module()[2:5], 2 * whole[2:5]), "the fields no longer reach what is read"


def test_copies_of_packed_share_nothing():
    module, whole = packed()
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.a.zero_()
        assert torch.equal(module(), whole)


@pytest.mark.parametrize("frozen", ("", "a", "abc"))
def test_packed_gradients(frozen):
    module, _ = packed()
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    weight = normal(6, 4, seed=1)
    y = module()
    assert y.requires_grad == (frozen != "abc")
    if y.requires_grad:
        y.backward(weight)
    for name, rows in zip("abc", weight.split([2, 3, 1]), strict=True):
        grad = getattr(module, name).grad
        assert grad is None if name in frozen else torch.equal(grad, rows)


@worlds
def test_packed_adds_the_gradients_of_shared_fields(ranks, world):
    def gradients(rank):
        ranks = Ranks.of(dist.group.WORLD)
        module = Packed({"own": 2, "common": 3}, (4,), ranks, torch.float64, shared=("common",))
        poisoned(module)().backward(normal(5, 4, seed=rank))
        return module.own.grad, module.common.grad

    weights = [normal(5, 4, seed=rank) for rank in range(world)]
    for rank, (own, common) in enumerate(ranks(gradients, world)):
        assert torch.equal(own, weights[rank][:2])
        torch.testing.assert_close(common, sum(weights)[2:], **EXACT)


@pytest.mark.parametrize("change", (lambda module: module, lambda module: module.double(), copy.deepcopy))
def test_fields_changed_before_backward_are_refused(change):
    module = change(packed()[0])
    y = module().square().sum()
    with torch.no_grad():
        module.b.mul_(2)
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        y.backward()


@pytest.mark.parametrize("pieces,world", [(1, 2), (2, 4), (2, 6)])
def test_each_shared_piece_is_summed_over_its_own_ranks(ranks, pieces, world):
    def gradient(rank):
        module = Packed({"a": 1, "b": 2}, (), Ranks.of(dist.group.WORLD), torch.float64, shared=("b",), pieces=pieces)
        poisoned(module)().backward(normal(3, seed=rank))
        return module.b.grad

    copies = world // pieces
    for rank, grad in enumerate(ranks(gradient, world)):
        first = rank // copies * copies
        expected = sum(normal(3, seed=r)[1:] for r in range(first, first + copies))
        torch.testing.assert_close(grad, expected, **EXACT)


# Linear layers against torch.nn.Linear


def linear(inputs, outputs, bias, x, weight):
    """(y, the gradient of x, layer) of torch's Linear with seeded parameters; the layer has its gradients."""
    layer = nn.Linear(inputs, outputs, bias, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(normal(outputs, inputs, seed=2))
        if bias:
            layer.bias.copy_(normal(outputs, seed=3))
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(weight)
    return y.detach(), x.grad, layer


@worlds
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))
def test_column_parallel_linear(ranks, world, bias):
    """Two fields have 2 and 3 rows per rank; rank r holds the r-th piece of each."""
    inputs, outputs = 4, 5 * world
    x, weight = normal(2, 6, inputs), normal(2, 6, outputs, seed=1)
    y, dx, layer = linear(inputs, outputs, bias, x, weight)

    def rows(rank):
        return torch.cat([torch.arange(2) + 2 * rank, torch.arange(3) + 2 * world + 3 * rank])

    def forward_and_backward(rank):
        ours = ColumnParallelLinear(inputs, {"a": 2, "b": 3}, bias, Ranks.of(dist.group.WORLD), torch.float64)
        whole = dict(weight=layer.weight, bias=layer.bias)
        with torch.no_grad():
            for name, parameter in poisoned(ours).named_parameters():
                kind, field = name.split(".")
                parameter.copy_(whole[kind][rows(rank)].split([2, 3])["ab".index(field)])
        mine = x.clone().requires_grad_()
        with as_input(mine, ours.ranks) as whole_x:
            out = ours(whole_x)
        out.backward(weight[..., rows(rank)])
        grads = [torch.cat([p.grad for p in packed.parameters()]) for packed in (ours.weight, ours.bias) if packed]
        return out.detach(), mine.grad, grads

    for rank, (out, grad, parameters) in enumerate(ranks(forward_and_backward, world)):
        torch.testing.assert_close(out, y[..., rows(rank)], **EXACT)
        torch.testing.assert_close(grad, dx, **EXACT)
        expected = [p.grad[rows(rank)] for p in layer.parameters()]
        torch.testing.assert_close(parameters, expected, **EXACT)


@worlds
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))
def test_row_parallel_linear(ranks, world, bias):
    inputs, outputs = 3 * world, 5
    x, weight = normal(2, 6, inputs), normal(2, 6, outputs, seed=1)
    y, dx, layer = linear(inputs, outputs, bias, x, weight)

    def forward_and_backward(rank):
        mine = slice(3 * rank, 3 * rank + 3)
        ours = poisoned(RowParallelLinear(3, outputs, bias, Ranks.of(dist.group.WORLD), torch.float64))
        with torch.no_grad():
            ours.weight.copy_(layer.weight[:, mine])
            if bias:
                ours.bias.copy_(layer.bias)
        part = x[..., mine].clone().requires_grad_()
        out = sum_of([Partial(ours(part), bias=ours.bias)], ours.ranks)
        out.backward(weight)
        return out.detach(), part.grad, [p.grad for p in ours.parameters()]

    for rank, (out, grad, parameters) in enumerate(ranks(forward_and_backward, world)):
        mine = slice(3 * rank, 3 * rank + 3)
        torch.testing.assert_close(out, y, **EXACT)
        torch.testing.assert_close(grad, dx[..., mine], **EXACT)
        expected = [layer.weight.grad[:, mine], *([layer.bias.grad] if bias else [])]
        torch.testing.assert_close(parameters, expected, **EXACT)


@worlds
def test_only_row_parallel_outputs_use_reduce(ranks, world):
    """`reduce` may be quantized; the gradient of a column-parallel layer's input is summed exactly."""

    def called(rank):
        reduced = []

        def reduce(tensor, group):
            reduced.append(tensor)
            return exact.all_reduce_exact(tensor, group)

        exact = Ranks.of(dist.group.WORLD)
        chosen = replace(exact, format=reduce)
        column = ColumnParallelLinear(4, {"a": 3}, False, chosen, torch.float64)
        row = RowParallelLinear(3, 4, False, chosen, torch.float64)
        with as_input(normal(2, 4).requires_grad_(), chosen) as x:
            part = row(column(x))
        sum_of([Partial(part)], chosen).sum().backward()
        return len(reduced)

    assert ranks(called, world) == [1] * world


# The vocabulary against torch.nn.Embedding and Linear

VOCABULARIES = [(61, 6), (5, 3), (4, 3), (1, 2)]  # (ids, hidden); 5, 4 and 1 ids leave some of 3 or 4 ranks empty


@pytest.mark.parametrize("vocab", (1, 5, 8, 61))
@pytest.mark.parametrize("size", (1, 2, 3, 4, 7))
def test_every_id_has_one_rank(vocab, size):
    ranges = [vocabulary_range(vocab, Ranks(None, rank, size)) for rank in range(size)]
    assert [id for start, stop in ranges for id in range(start, stop)] == list(range(vocab))
    assert max(stop - start for start, stop in ranges) == -(-vocab // size)


def tied_vocabulary(vocab, hidden, ids, weights):
    """torch's embedding and head with one weight: (embedded, logits, gradient of the weight, gradient of the head's x)."""
    weight = normal(vocab, hidden, seed=2).requires_grad_()
    x = normal(*ids.shape, hidden, seed=3).requires_grad_()
    embedded, logits = F.embedding(ids, weight), F.linear(x, weight)
    torch.autograd.backward([embedded, logits], weights)
    return embedded.detach(), logits.detach(), weight.grad, x.grad


@worlds
@pytest.mark.parametrize("vocab, hidden", VOCABULARIES)
def test_vocabulary_parallel(ranks, world, vocab, hidden):
    ids = torch.randint(vocab, (2, 40), generator=torch.Generator().manual_seed(0))
    weights = normal(2, 40, hidden, seed=4), normal(2, 40, vocab, seed=5)
    embedded, logits, dweight, dx = tied_vocabulary(vocab, hidden, ids, weights)

    def forward_and_backward(rank):
        tied = poisoned(VocabularyParallel(vocab, hidden, Ranks.of(dist.group.WORLD), torch.float64))
        with torch.no_grad():
            tied.weight.copy_(normal(vocab, hidden, seed=2)[tied.start : tied.stop])
        x = normal(*ids.shape, hidden, seed=3).requires_grad_()
        a, b = tied.embed(ids), gather_last(tied.logits(x), tied.ranks)
        assert a.requires_grad, "a rank whose output hangs on no parameter may skip a collective of backward"
        padding = b.shape[-1] - vocab
        assert b[..., vocab:].eq(float("-inf")).all()
        torch.autograd.backward([a, b], [weights[0], F.pad(weights[1], (0, padding))])
        return a.detach(), b[..., :vocab].detach(), tied.weight.grad, x.grad

    results = ranks(forward_and_backward, world)
    for a, b, _, grad in results:
        torch.testing.assert_close(a, embedded, **EXACT)
        torch.testing.assert_close(b, logits, **EXACT)
        torch.testing.assert_close(grad, dx, **EXACT)
    torch.testing.assert_close(torch.cat([grad for _, _, grad, _ in results]), dweight, **EXACT)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_logits_are_at_least_fp32(dtype):
    layer = VocabularyParallel(5, 3, Ranks(), dtype)
    with torch.no_grad():
        layer.weight.copy_(normal(5, 3))
    assert layer.logits(normal(2, 3).to(dtype)).dtype == torch.promote_types(dtype, torch.float32)
