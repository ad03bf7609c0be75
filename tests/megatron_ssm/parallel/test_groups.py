"""Process groups. Oracle: the sizes with which Megatron's parallel_state was initialized."""

import warnings

import pytest

from megatron_ssm.parallel.groups import check_world, initialize
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


@pytest.mark.parametrize("world", (2, 4))
def test_a_parallel_state_of_another_tensor_parallel_degree(ranks, world):
    def run(rank):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        return attempt(initialize, 1), initialize(2).tensor_ranks

    error = ("ValueError", "Megatron's parallel_state already has 2 tensor-parallel ranks, not 1")
    assert ranks(run, world) == [(error, 2)] * world


@pytest.mark.parametrize("tensor", (0, -1))
def test_there_is_at_least_one_rank(tensor):
    with pytest.raises(ValueError, match=f"^{tensor} tensor-parallel ranks: there must be at least 1$"):
        check_world(tensor, 4)
