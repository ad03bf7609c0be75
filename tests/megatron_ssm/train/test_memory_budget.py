"""The memory that training needs against --memory-budget."""

import re
from dataclasses import replace

import pytest

import tiny
from megatron_ssm import families
from megatron_ssm.model.memory import Memory
from megatron_ssm.train.memory_budget import check_memory_budget, needed_memory
from megatron_ssm.train.run_inputs import RunInputs

RUN = tiny.options(seq_length=30_000, params_dtype="float32")
CONFIG = families.from_dict(RUN.new_config(tiny.VOCAB, 0))


@pytest.mark.parametrize("used", (1, 2, 5))
def test_the_error_names_the_fewest_ranks_that_are_enough(used):
    for ranks in (1, 2, 3, 7):
        budget = needed_memory(RUN, CONFIG, ranks) / 1e9
        run = replace(RUN, context_parallel_size=used, memory_budget=budget)
        if used >= ranks:
            check_memory_budget(run, CONFIG)
            continue
        with pytest.raises(
            ValueError, match=rf"on {used} context ranks need .* --context-parallel-size {ranks} is enough"
        ):
            check_memory_budget(run, CONFIG)


def test_a_convolution_without_history():
    raw = RUN.new_config(tiny.VOCAB, 0)
    with pytest.raises(ValueError, match="--context-parallel-size 3 is enough"):
        check_memory_budget(replace(RUN, memory_budget=0.1), families.from_dict(raw | dict(conv_kernel=1)))


def test_residuals_of_sparse_gradients_are_counted():
    sparse = needed_memory(replace(RUN, gradient_mode="layerwise"), CONFIG, 1)
    assert sparse - needed_memory(RUN, CONFIG, 1) == Memory(CONFIG, 1, 4).weights


def test_a_budget_that_the_parameters_exceed():
    with pytest.raises(ValueError, match="no number of context ranks is enough"):
        check_memory_budget(replace(RUN, memory_budget=1e-6), CONFIG)
    check_memory_budget(replace(RUN, memory_budget=0.0), CONFIG)


def test_float64_needs_twice_as_much():
    assert needed_memory(replace(RUN, params_dtype="float64"), CONFIG, 1) == pytest.approx(
        2 * needed_memory(RUN, CONFIG, 1)
    )


def test_pretrain_refuses_on_every_rank(ranks, tmp_path, world=2):
    (tmp_path / "text").mkdir()
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i} " * 500)

    def run(rank):
        options = tiny.options(
            data=(str(tmp_path / "text"),), out=str(tmp_path / "out"), tokenizer_model="byte", memory_budget=1e-4
        )
        with pytest.raises(ValueError, match=re.escape("more than --memory-budget 0.0001")):
            RunInputs.read(options)

    ranks(run, world)
