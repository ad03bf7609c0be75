"""The names of context schedules. Oracle: the schedules of attention2d."""

import pytest
import torch.distributed as dist

from attention2d import Attention2D, Ring, Ulysses
from megatron_ssm import Config
from megatron_ssm.models.context import schedule_of
from serving import checkpoint

SIZES = dict(tensor_ranks=1, seq=64, batch=1)


@pytest.mark.parametrize("world", (2, 4))
def test_names(ranks, world):
    config = Config.read(checkpoint("zamba2"))

    def run(rank):
        def of(name):
            return schedule_of(name, dist.group.WORLD, config, **SIZES)

        assert of("ring").grid == Ring(dist.group.WORLD).grid
        assert of("ulysses").grid == Ulysses(dist.group.WORLD).grid
        assert of("2d").grid == Attention2D(dist.group.WORLD, world // 2, 2).grid
        assert of("3d").grid.ulysses == 2
        assert of("auto").ranks == world
        with pytest.raises(ValueError, match="'tree' is none of auto, ring, all-gather, ulysses, usp, 2d, 3d"):
            of("tree")

    ranks(run, world)


@pytest.mark.parametrize("world", (3, 5))
def test_pairs_of_ranks_need_an_even_number(ranks, world):
    config = Config.read(checkpoint("zamba2"))

    def run(rank):
        for name in ("usp", "3d"):
            with pytest.raises(ValueError, match=f"the schedule {name} needs an even number of ranks, not {world}"):
                schedule_of(name, dist.group.WORLD, config, **SIZES)

    ranks(run, world)
