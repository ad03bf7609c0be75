"""Wrong arguments: every rank raises the same one-sentence ValueError, and none waits. Oracle: the numbers passed."""

import pytest
import torch
import torch.distributed as dist

from attention2d import USP, Attention2D, Ring, Tree, Ulysses, attention


def error_message(function):
    """The message of the ValueError or TypeError that `function()` raises, or None."""
    try:
        function()
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def tensors(local=4, heads=4, kv_heads=2, head_dim=8, batch=1, dtype=torch.float32):
    return [torch.ones(batch, local, count, head_dim, dtype=dtype) for count in (heads, kv_heads, kv_heads)]


GRIDS = {  # part of the error's message: how to make the schedule (the messages are those of four ranks)
    "rows=3, cols=2 is 1 * 3 * 2 = 6 ranks; the group has 4": lambda group: Attention2D(group, 3, 2),
    "ulysses=3, rows=1, cols=1 is 3 * 1 * 1 = 3 ranks": lambda group: USP(group, 3),
    "rows=0: expected at least 1": lambda group: Attention2D(group, 0, 4),
    "unknown order 'spiral': expected zigzag, contiguous, cyclic": lambda group: Ring(group, "spiral"),
    "cyclic order needs ulysses=1, not 4": lambda group: Ulysses(group, "cyclic"),
    "transpose=True needs the cyclic order, not zigzag": lambda group: Attention2D(
        group, 1, group.size(), transpose=True
    ),
}
CALLS = {  # part of the error's message: the call of a schedule
    "6 query heads do not divide over 4 key/value heads (6 % 4 = 2)": lambda s: s(*tensors(heads=6, kv_heads=4)),
    "zigzag order has two equal blocks on each rank, and 3 local tokens are odd": lambda s: s(*tensors(local=3)),
    "seq=9 in zigzag order makes": lambda s: s(*tensors(local=8), seq=9),
    "seq=0: expected at least 1": lambda s: s(*tensors(), seq=0),
    "q has shape (4, 4, 8): expected (batch, seq, heads, head_dim)": lambda s: s(*(t[0] for t in tensors())),
    "q has dtype torch.int64: expected a floating-point dtype": lambda s: s(*(t.long() for t in tensors())),
    "k is torch.bfloat16 on cpu: expected torch.float32 on cpu, as q is": lambda s: s(
        tensors()[0], *tensors(dtype=torch.bfloat16)[1:]
    ),
    "v has shape (1, 4, 4, 8): expected (1, 4, 2, 8), as k has": lambda s: s(*tensors()[:2], tensors()[0]),
    "k has 6 local tokens: expected 4, as q has": lambda s: s(tensors()[0], *tensors(local=6)[1:]),
    "k has 2 sequences: expected 1, as q has": lambda s: s(tensors()[0], *tensors(batch=2)[1:]),
    "k has 4 elements per head: expected 8, as q has": lambda s: s(tensors()[0], *tensors(head_dim=4)[1:]),
    "no size may be 0": lambda s: s(*tensors(batch=0)),
    "softcap=30.0 is not supported by attention2d": lambda s: s(*tensors(), softcap=30.0),
    "scale=0: expected a positive, finite number": lambda s: s(*tensors(), scale=0),
    "mask is (4, 4) torch.bool: expected a bool tensor": lambda s: s(*tensors(), mask=torch.ones(4, 4) > 0),
    "mask is list: expected a bool tensor": lambda s: s(*tensors(), mask=[True]),
    "mask has 3 sequences: expected 1 or 1": lambda s: s(*tensors(), mask=torch.ones(3, 1, 8) > 0),
    "mask has 5 key blocks: 8 tokens do not divide": lambda s: s(*tensors(), mask=torch.ones(1, 1, 5) > 0),
    "'float' object cannot be interpreted as an integer": lambda s: s(*tensors(), seq=4.0 * s.ranks - 1),
}
REFUSED = dict(
    attn_mask=torch.ones(4, 4), dropout_p=0.1, sliding_window=128, window_size=(128, 0), softcap=50.0, s_aux=torch.ones(4),
    attn_bias=torch.ones(4, 4), packed_seq_params=object(), alibi_slopes=torch.ones(4),
)  # fmt: skip


@pytest.mark.parametrize("world_size", [4])
def test_wrong_grids(world_size, ranks):
    def run(rank):
        return [error_message(lambda make=make: make(dist.group.WORLD)) for make in GRIDS.values()]

    for messages in ranks(run, world_size):
        for part, message in zip(GRIDS, messages, strict=True):
            assert part.replace("has 4", f"has {world_size}").replace("not 4", f"not {world_size}") in message


@pytest.mark.parametrize("world_size", [2])
def test_wrong_calls(world_size, ranks):
    """One rank alone or all ranks make the wrong call. A correct call works afterwards."""

    def run(rank):
        schedule, good = Ring(dist.group.WORLD), tensors()
        everywhere = [error_message(lambda call=call: call(schedule)) for call in CALLS.values()]
        on_one = [
            error_message(lambda call=call: call(schedule) if rank == 1 else schedule(*good)) for call in CALLS.values()
        ]
        return everywhere, on_one, schedule(*good).sum().item()

    for everywhere, on_one, total in ranks(run, world_size):
        for part, every, one in zip(CALLS, everywhere, on_one, strict=True):
            assert part in every and part in one
        assert total == pytest.approx(128)


@pytest.mark.parametrize("world_size, ulysses", ((3, 3),))
def test_heads_that_do_not_divide_over_ulysses_ranks(world_size, ulysses, ranks):
    def run(rank):
        schedule = Ulysses(dist.group.WORLD)
        few = dict(batch=1, seq=12, head_dim=8, itemsize=4)
        return [
            error_message(lambda: schedule(*tensors(heads=10, kv_heads=10))),
            error_message(lambda: schedule(*tensors(heads=2 * ulysses, kv_heads=2))),
            error_message(lambda: schedule.volume(heads=2 * ulysses, kv_heads=2, **few)),
        ]

    for query, keys, volume in ranks(run, world_size):
        assert f"10 query heads do not divide over ulysses={ulysses} ranks (10 % {ulysses} = {10 % ulysses})" in query
        assert f"2 key/value heads do not divide over ulysses={ulysses} ranks" in keys and keys.startswith(volume)


@pytest.mark.parametrize("world_size", [2])
def test_unsupported_features_are_refused_by_name(world_size, ranks):
    """Every rank raises the error if only one of them uses the feature."""

    def run(rank):
        schedule, (q, k, v) = Ring(dist.group.WORLD), (t.transpose(1, 2) for t in tensors())
        messages = [
            error_message(
                lambda name=name, value=value: attention(q, k, v, schedule, **{name: value if rank == 1 else None})
            )
            for name, value in REFUSED.items()
        ]
        return messages, attention(q, k, v, schedule, **dict.fromkeys(REFUSED)).shape

    for messages, shape in ranks(run, world_size):
        assert shape == (1, 4, 4, 8)
        assert all(f"{name}" in m and "is not supported" in m for name, m in zip(REFUSED, messages, strict=True)), (
            messages
        )


@pytest.mark.parametrize("world_size", [2])
def test_wrong_calls_of_tree(world_size, ranks):
    def run(rank):
        tree, (q, k, v) = Tree(dist.group.WORLD), tensors(local=2)
        return [
            error_message(lambda: tree(q, k, v, causal=True)),
            error_message(lambda: tree(q.clone().requires_grad_(), k, v)),
            error_message(lambda: tree(q, k[:, :, :1], v)),
            error_message(lambda: tree(q[:, : 1 + (rank == 1)], k, v)),
            error_message(lambda: tree(q, k, v, seq=100)),
        ]

    parts = ("causal=True with 2 queries", "no gradient", "v has shape", "arguments differ across ranks", "seq=100")
    for messages in ranks(run, world_size):
        assert all(part in message for part, message in zip(parts, messages, strict=True)), messages


@pytest.mark.parametrize("world", [2])
def test_a_rank_that_is_no_member_of_the_group(ranks, world):
    def run(rank):
        group = dist.new_group([0])
        return [error_message(make) for make in (lambda: Ring(group), lambda: Tree(group), lambda: USP(group, 1))]

    member, *others = ranks(run, world)
    assert member == [None] * 3
    assert all("is not a process group of this rank" in message for message in sum(others, []))


def test_attention_does_not_return_the_log_sum_exp():
    q, k, v = (t.transpose(1, 2) for t in tensors())
    assert "return_lse=True" in error_message(lambda: attention(q, k, v, Ring(None), return_lse=True))
