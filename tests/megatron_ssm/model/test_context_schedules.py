"""The names of context schedules. Oracle: the schedules of attention2d."""

import pytest
import torch.distributed as dist

from attention2d import Attention2D, Ring, Ulysses
from commfabric.fabric.curve import Curve
from megatron_ssm import families
from megatron_ssm.model.context import schedule_of
from serving import checkpoint
from sparsefusion import Fabric

SIZES = dict(tensor_ranks=1, seq=64, batch=1)


def grouped(family, groups):
    """The stack of a family's checkpoint, with so many query heads per key/value head."""
    raw = families.read(checkpoint(family)).raw
    if groups == 1:
        return families.from_dict(raw)
    kv_heads = raw["num_attention_heads"] // groups
    return families.from_dict(raw | dict(num_key_value_heads=kv_heads, use_shared_attention_adapter=False))


@pytest.mark.parametrize("world", (2, 4))
def test_names(ranks, world):
    config = families.read(checkpoint("zamba2"))

    def run(rank):
        def of(name):
            return schedule_of(name, dist.group.WORLD, config, **SIZES)

        assert of("ring").grid == Ring(dist.group.WORLD).grid
        assert of("ulysses").grid == Ulysses(dist.group.WORLD).grid
        assert of("2d").grid == Attention2D(dist.group.WORLD, world // 2, 2).grid
        assert of("3d").grid.ulysses == 2
        assert of("auto").ranks == world
        with pytest.raises(KeyError, match="tree"):
            of("tree")

    ranks(run, world)


@pytest.mark.parametrize("world", (3, 4, 5, 6))
@pytest.mark.parametrize("family, groups", [("zamba", 1), ("zamba2", 1), ("zamba2", 2), ("zamba2", 4), ("mamba", 1)])
def test_a_search_finds_what_sends_the_fewest_bytes(ranks, world, family, groups):
    """`choose` takes a schedule with fewer steps if it sends at most 2 % more. groups: query heads per key/value head.

    The bytes of the search's reason are those that attention2d sends.
    """
    config = grouped(family, groups)

    def run(rank):
        found, chosen = (
            schedule_of(name, dist.group.WORLD, config, 1, 24 * world + 1, 2) for name in ("search", "auto")
        )
        if not config.attentions:
            return repr(found) == repr(chosen), found.reason
        sizes = dict(batch=2, seq=24 * world + 1, **vars(config.attentions[0]))
        volumes = [each.volume(**sizes, itemsize=4) for each in (found, chosen)]
        sent = [volume.forward + volume.backward for volume in volumes]
        assert f"a rank sends {volumes[0].forward:,} bytes" in found.reason
        assert "grids by prediction, forward and backward" in found.reason
        return sent[0] <= sent[1] <= 1.02 * sent[0], found.reason

    results = ranks(run, world)
    assert all(is_best for is_best, _ in results)
    assert len({reason for _, reason in results}) == 1


@pytest.mark.parametrize("world, groups, name", [(2, 1, "Ulysses"), (4, 1, "Ulysses"), (4, 2, "USP")])
def test_the_reason_of_a_search_names_the_schedule(ranks, world, groups, name):
    """Its plan leaves lse where it is computed. groups: query heads per key/value head."""
    config = grouped("zamba2", groups)

    def run(rank):
        reason = schedule_of("search", dist.group.WORLD, config, **SIZES).reason
        return reason.splitlines()[0]

    for line in ranks(run, world):
        assert "; lse kept along heads on " in line and line.endswith(f" ({name})")


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_a_measured_fabric_decides(ranks, world):
    """Ulysses sends the fewest bytes; behind links of high latency, both searches take a schedule with fewer messages."""
    config = families.read(checkpoint("zamba2"))
    fabric = Fabric((Curve.fit("p2p", world, [(1e3, 1.0), (1e9, 1.1)]),))

    def run(rank):
        found = []
        for name in ("auto", "search"):
            chosen = [schedule_of(name, dist.group.WORLD, config, **SIZES, fabric=each) for each in (None, fabric)]
            assert [each.grid.ulysses == world for each in chosen] == [True, False]
            found.append(chosen[1].reason)
        return found

    results = ranks(run, world)
    assert all(found == results[0] for found in results)


@pytest.mark.parametrize("world", (3, 5))
def test_pairs_of_ranks_need_an_even_number(ranks, world):
    config = families.read(checkpoint("zamba2"))

    def run(rank):
        for name in ("usp", "3d"):
            with pytest.raises(ValueError, match=f"the schedule {name} needs an even number of ranks, not {world}"):
                schedule_of(name, dist.group.WORLD, config, **SIZES)

    ranks(run, world)
