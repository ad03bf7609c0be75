"""Process groups. Oracle: the sizes with which Megatron's parallel_state was initialized."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist

from megatron_ssm.parallel.groups import Groups, check_world, initialize, join
from ranks import run_agent
from serving import attempt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize(
    "name,argument", [("context", "context_parallel_size"), ("pipeline", "pipeline_model_parallel_size")]
)
def test_a_parallel_state_with_more_than_tensor_and_data_parallelism(ranks, world, name, argument):
    """The data-parallel group would not contain all ranks whose gradients belong together, so it is an error."""

    def run(rank):
        parallel_state.initialize_model_parallel(**{argument: 2})
        return attempt(initialize, 1)

    error = ("ValueError", f"Megatron's parallel_state already has 2 {name}-parallel ranks, not 1")
    assert ranks(run, world) == [error] * world


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_a_parallel_state_of_another_tensor_parallel_degree(ranks, world):
    def run(rank):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        return attempt(initialize, 1), initialize(2).tensor_ranks

    error = ("ValueError", "Megatron's parallel_state already has 2 tensor-parallel ranks, not 1")
    assert ranks(run, world) == [(error, 2)] * world


def test_one_rank_without_a_launcher_has_a_parallel_state_too(ranks):
    def run(rank):
        dist.destroy_process_group()
        groups = initialize()
        sizes = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_data_parallel_world_size()
        return groups, sizes, dist.get_world_size()

    assert ranks(run, 1) == [(Groups(), (1, 1), 1)]


@pytest.mark.parametrize("tensor", (0, -1))
def test_there_is_at_least_one_rank(tensor):
    with pytest.raises(ValueError, match=f"^{tensor} tensor-parallel ranks: there must be at least 1$"):
        check_world(tensor, 4)


@pytest.mark.parametrize("world", (4, 8))
def test_groups_of_tensor_context_and_data_parallel_ranks(ranks, world):
    """In Megatron's order: tensor-parallel ranks are neighbours, and data-parallel ranks are furthest apart. Of the others,
    all divide the experts.
    """

    def run(rank):
        groups = initialize(2, context=2, expert=world // 2)
        names = "tensor", "context", "data", "data_context", "expert", "expert_data"
        members = {name: getattr(groups, name) for name in names}
        return {name: group and dist.get_process_group_ranks(group) for name, group in members.items()}

    for rank, found in enumerate(ranks(run, world)):
        tensor, replica = rank % 2, rank // 4 * 4
        context = [replica + tensor, replica + tensor + 2]
        assert found == {
            "tensor": [rank // 2 * 2, rank // 2 * 2 + 1],
            "context": context,
            "data": None if world == 4 else [rank % 4, rank % 4 + 4],
            "data_context": list(range(tensor, world, 2)),
            "expert": list(range(tensor, world, 2)),
            "expert_data": None,
        }


def test_replicas_that_do_not_divide_the_world():
    with pytest.raises(
        ValueError, match=r"^6 ranks do not .* 2 tensor-parallel x 2 context-parallel ranks \(6 % 4 = 2\)"
    ):
        check_world(2, 6, 2)
    with pytest.raises(
        ValueError,
        match=r"^12 ranks / 2 tensor-parallel ranks are not a multiple of 4 expert-parallel ranks \(6 % 4 = 2\)",
    ):
        check_world(2, 12, 1, 4)


def test_ranks_that_torchrun_has_restarted_meet_again(tmp_path):
    """One rank ends by itself; all are started again, with other addresses."""

    def run():
        world = join(1)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                os._exit(1)
            dist.barrier()  # fails, as rank 1 has ended
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"rank {os.environ['RANK']} of {world}: {total.item():g}")

    assert run_agent(run, 2, tmp_path, restarts=1)
    assert [(tmp_path / f"out-{rank}").read_text() for rank in (0, 1)] == ["rank 0 of 2: 2\n", "rank 1 of 2: 2\n"]
