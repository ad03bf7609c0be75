"""Training over tensor x context x data-parallel ranks. Oracle: the run on one rank."""

import functools

import pytest
import torch

import tiny
from megatron_ssm.parallel.groups import initialize
from megatron_ssm.train.batches import Tokens
from megatron_ssm.train.trainer import evaluate

EXACT = 1e-10
# 29 tokens do not divide over the context ranks, and are padded. The stream has 17 ends of text, most of them inside blocks.
MODELS = {
    name: dict(changes, seq_length=29)
    for name, changes in {
        "mamba": dict(model_type="mamba"),
        "mamba2": {},
        "mamba2 groups": dict(mamba_num_groups=2),
        "mamba2 large states": dict(mamba_state_dim=32),  # larger than a rank's tokens
        "falcon": dict(model_type="falcon_mamba", lr=1e-3),
        "zamba": tiny.ZAMBA,
        "zamba2": dict(tiny.ZAMBA2, lr=1e-3),
        "zamba2 GQA": dict(tiny.ZAMBA2, lr=1e-3, num_query_groups=2),  # four query heads
        "nemotron": tiny.NEMOTRON,
        **{name: dict(model_type=name) for name in tiny.RAW},
    }.items()
}
SCHEDULES = ("auto", "ring", "all-gather", "ulysses", "usp", "2d", "3d")
LAYOUTS = [(tp, cp, dp) for tp in (1, 2) for cp in (2, 4) for dp in (1, 2) if tp * cp * dp <= 8]


@functools.cache
def one_rank(model):
    """(curve, final parameters, fields, held-out loss) of the run on one rank with the whole batch at once."""
    trainer = tiny.trainer(tiny.options(**MODELS[model], micro_batch_size=4))
    curve = tiny.curve(trainer)
    return curve, tiny.pieces(trainer), trainer.model.config.fields(), held_out_loss(trainer)


def held_out_loss(trainer):
    return evaluate(trainer.model, Tokens(tiny.stream(tokens=100).ids, 101), trainer.groups, trainer.options)


def check_run(ranks, model, tp, cp, dp, schedule, micro=2, **changes):
    """Assert that clipped steps give the losses, gradient norms and parameters of one rank, on every rank.

    changes: other options.
    """
    sizes = dict(micro_batch_size=micro, context_parallel_size=cp, context_schedule=schedule)
    run = tiny.options(**MODELS[model], **sizes, **changes)

    def train(rank):
        trainer = tiny.trainer_on(tp, run)
        return tiny.curve(trainer), tiny.pieces(trainer), held_out_loss(trainer)

    curves, parameters, held_out = zip(*ranks(train, tp * cp * dp), strict=True)
    curve, wholes, fields, expected = one_rank(model)
    assert (curve[1] > run.clip_grad).all(), "clipping was not active"
    assert all(torch.equal(other, curves[0]) for other in curves)
    assert (curves[0] - curve).abs().max() <= EXACT
    assert set(held_out) == {held_out[0]} and abs(held_out[0] - expected) <= EXACT
    for name, whole in tiny.assembled(parameters, fields, tp).items():
        assert (whole - wholes[name]).abs().max() <= EXACT, name


@pytest.mark.parametrize(
    "model, tp, cp, dp, schedule",
    [
        pytest.param("mamba", 1, 4, 1, "auto", marks=pytest.mark.full),
        ("mamba2 groups", 2, 2, 1, "auto"),
        pytest.param("falcon", 1, 2, 2, "auto", marks=pytest.mark.full),
        ("zamba", 1, 2, 1, "ring"),
        pytest.param("zamba2", 1, 4, 1, "2d", marks=pytest.mark.full),
        pytest.param("zamba2", 1, 2, 2, "auto", marks=pytest.mark.full),
        ("mamba2 large states", 1, 2, 1, "search"),
        ("zamba2 GQA", 1, 3, 1, "search"),
        pytest.param("zamba2 GQA", 1, 2, 1, "search", marks=pytest.mark.full),
        pytest.param("zamba2", 1, 3, 1, "search", marks=pytest.mark.full),
        pytest.param("zamba2", 1, 4, 1, "search", marks=pytest.mark.full),
        pytest.param("zamba2", 1, 5, 1, "search", marks=pytest.mark.full),
        pytest.param("mamba2 large states", 1, 3, 1, "search", marks=pytest.mark.full),
        pytest.param("nemotron", 2, 2, 1, "auto", marks=pytest.mark.full),
        ("falcon_h1", 1, 2, 2, "2d"),
        pytest.param("granitemoehybrid", 2, 2, 1, "ring", marks=pytest.mark.full),
        pytest.param("bamba", 1, 4, 1, "usp", marks=pytest.mark.full),
        pytest.param("jamba", 2, 2, 1, "auto", marks=pytest.mark.full),
        ("qwen3_5_text", 2, 2, 1, "auto"),
        pytest.param("olmo_hybrid", 1, 4, 1, "ring", marks=pytest.mark.full),
    ],
)
def test_curves(ranks, model, tp, cp, dp, schedule):
    check_run(ranks, model, tp, cp, dp, schedule)


@pytest.mark.parametrize(
    "model, tp, cp, dp",
    [
        ("mamba2", 2, 1, 1),
        pytest.param("zamba2", 2, 2, 1, marks=pytest.mark.full),
        pytest.param("falcon_h1", 2, 2, 1, marks=pytest.mark.full),
        ("jamba", 2, 1, 1),
        ("qwen3_5_text", 2, 2, 1),
        pytest.param("olmo_hybrid", 2, 2, 1, marks=pytest.mark.full),
        pytest.param("nemotron", 2, 2, 1, marks=pytest.mark.full),
        pytest.param("granitemoehybrid", 2, 1, 2, marks=pytest.mark.full),
        pytest.param("bamba", 2, 1, 1, marks=pytest.mark.full),
    ],
)
def test_curves_in_less_memory(ranks, model, tp, cp, dp):
    """With sequence parallelism and recomputation; 29 tokens do not divide over tensor and context ranks."""
    check_run(ranks, model, tp, cp, dp, "auto", sequence_parallel=True, recompute_activations=True)


@pytest.mark.full
@pytest.mark.parametrize("tp, cp, dp, micro", [(1, 2, 2, 1), (1, 4, 1, 2), (2, 2, 1, 2)])
@pytest.mark.parametrize("model", MODELS)
def test_every_curve(ranks, model, tp, cp, dp, micro):
    check_run(ranks, model, tp, cp, dp, "auto", micro)


@pytest.mark.full
@pytest.mark.parametrize("tp, cp, dp, micro", [(2, 2, 2, 2), (2, 4, 1, 1), (1, 4, 2, 1)])
@pytest.mark.parametrize("model", ("mamba2 large states", "zamba2", "qwen3_5_text"))
def test_eight_ranks(ranks, model, tp, cp, dp, micro):
    check_run(ranks, model, tp, cp, dp, "auto", micro)


@pytest.mark.full
@pytest.mark.parametrize("model", ("zamba", "zamba2"))
@pytest.mark.parametrize("cp", (2, 4))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(ranks, model, cp, schedule):
    check_run(ranks, model, 1, cp, 1, schedule)


@pytest.mark.parametrize(
    "tp, cp, dp",
    [(1, 2, 1), pytest.param(2, 2, 1, marks=pytest.mark.full), pytest.param(1, 2, 2, marks=pytest.mark.full)],
)
def test_sparse_gradients_are_summed_over_context_ranks(ranks, tp, cp, dp):
    """At density 1 every element is sent, so the run is the dense one, up to rounding in another order."""
    changes = dict(gradient_mode="layerwise", gradient_density=1.0, gradient_sparsifier="topk")
    run = tiny.options(**MODELS["mamba2"], context_parallel_size=cp, **changes)
    curves = ranks(lambda rank: tiny.curve(tiny.trainer_on(tp, run), 8), tp * cp * dp)
    assert all(torch.equal(other, curves[0]) for other in curves)
    dense = tiny.curve(tiny.trainer(tiny.options(**MODELS["mamba2"], micro_batch_size=4)), 8)
    assert (curves[0] - dense).abs().max() <= EXACT


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_a_search_also_chooses_what_scans_exchange(ranks, world):
    def run(rank):
        found = {}
        for model in ("mamba2", "mamba2 large states"):
            for schedule in ("auto", "search"):
                run = tiny.options(**MODELS[model], context_parallel_size=world, context_schedule=schedule)
                found[model, schedule] = tiny.trainer_on(1, run).model.context_ranks.exchanges_channels
        return found

    for found in ranks(run, world):
        assert [key for key, exchanges in found.items() if exchanges] == [("mamba2 large states", "search")]


@pytest.mark.parametrize("world", (3, 5))
def test_schedules_that_do_not_fit_are_one_error(ranks, world):
    def run(rank):
        errors = []
        for schedule in ("usp", "ulysses"):
            options = tiny.options(
                **tiny.ZAMBA2, context_parallel_size=world, context_schedule=schedule, num_attention_heads=2
            )
            with pytest.raises(ValueError) as error:
                tiny.trainer(options, initialize(1, context=world))
            errors.append(str(error.value))
        return errors

    for usp, ulysses in ranks(run, world):
        assert f"the schedule usp needs an even number of ranks, not {world}" in usp
        assert f"do not divide over ulysses={world}" in ulysses
