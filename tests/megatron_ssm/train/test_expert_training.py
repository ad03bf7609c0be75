"""Training with experts that ranks divide. Oracle: the run on one rank."""

import functools

import pytest
import torch

import tiny
from hf import tensors_in
from megatron_ssm.checkpoints.hf import save
from megatron_ssm.checkpoints.training import Snapshot
from megatron_ssm.train.batches import Tokens
from megatron_ssm.train.run_inputs import RunInputs
from megatron_ssm.train.trainer import evaluate

EXACT = 1e-10
STEPS = 4
MODELS = {
    "qwen3.5": dict(model_type="qwen3_5_moe_text"),
    "nemotron": dict(model_type="nemotron_h"),
}


@functools.cache
def one_rank(model):
    """(curve, final parameters, fields, held-out loss) of the run on one rank with the whole batch at once."""
    trainer = tiny.trainer(tiny.options(**MODELS[model], micro_batch_size=4))
    curve = tiny.curve(trainer, STEPS)
    return curve, tiny.pieces(trainer), trainer.model.config.fields(), held_out_loss(trainer)


def held_out_loss(trainer):
    return evaluate(trainer.model, Tokens(tiny.stream(tokens=100).ids, 101), trainer.groups, trainer.options)


def options(model, cp, ep, **changes):
    """Those of a run with one sequence in a micro-batch."""
    sizes = dict(micro_batch_size=1, context_parallel_size=cp, expert_model_parallel_size=ep)
    return tiny.options(**MODELS[model] | sizes | changes)


LESS_MEMORY = dict(sequence_parallel=True, recompute_activations=True)


@pytest.mark.parametrize(
    "model, tp, cp, dp, ep, changes",
    [
        ("qwen3.5", 1, 1, 2, 2, {}),
        ("qwen3.5", 1, 1, 4, 2, {}),
        ("nemotron", 2, 1, 2, 2, {}),
        ("qwen3.5", 2, 2, 1, 2, LESS_MEMORY),
        ("nemotron", 1, 2, 2, 4, dict(recompute_activations=True)),
        ("qwen3.5", 1, 1, 4, 2, dict(engine="megatron")),
        pytest.param("nemotron", 2, 2, 2, 2, LESS_MEMORY, marks=pytest.mark.full),
        pytest.param("nemotron", 1, 2, 2, 2, dict(engine="megatron"), marks=pytest.mark.full),
        pytest.param("qwen3.5", 1, 2, 2, 2, {}, marks=pytest.mark.full),
    ],
)
def test_curves(ranks, model, tp, cp, dp, ep, changes):
    """Losses, gradient norms and parameters after clipped steps."""
    run = options(model, cp, ep, **changes)

    def train(rank):
        trainer = tiny.trainer_on(tp, run)
        return tiny.curve(trainer, STEPS), tiny.pieces(trainer), held_out_loss(trainer)

    curves, parameters, held_out = zip(*ranks(train, tp * cp * dp), strict=True)
    curve, wholes, fields, expected = one_rank(model)
    assert (curve[1] > run.clip_grad).any(), "clipping was not active"
    assert all(torch.equal(other, curves[0]) for other in curves)
    assert (curves[0] - curve).abs().max() <= EXACT
    assert set(held_out) == {held_out[0]} and abs(held_out[0] - expected) <= EXACT
    for name, whole in tiny.assembled(parameters, fields, tp, ep).items():
        assert (whole - wholes[name]).abs().max() <= EXACT, name


@pytest.mark.parametrize("tp", (1, pytest.param(2, marks=pytest.mark.full)))
def test_losses_and_biases_of_routers(ranks, tp):
    """Replicas that divide the experts, and replicas that each have all of them."""
    routing = dict(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01, moe_router_enable_expert_bias=True)

    def train(rank, ep):
        trainer = tiny.trainer_on(tp, options("nemotron", 1, ep, **routing))
        return tiny.curve(trainer), dict(trainer.model.named_parameters())["layers.0.mixer.correction"].detach()

    (curve, bias), (expected, its_bias) = (ranks(train, 2 * tp, ep)[0] for ep in (2, 1))
    assert (curve - expected).abs().max() <= EXACT
    assert bias.any() and torch.equal(bias, its_bias)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(engine="deepspeed", deepspeed_config="x", params_dtype="float32"),
            "--engine deepspeed, which knows only",
        ),
        (dict(gradient_mode="auto"), "--gradient-mode auto: SparseFusion"),
        (
            dict(engine="megatron", use_distributed_optimizer=True, params_dtype="float32"),
            "--use-distributed-optimizer",
        ),
        (dict(memory_budget=1.0), "--memory-budget"),
    ],
)
def test_what_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=f"^--expert-model-parallel-size 2 is not implemented for {words}"):
        options("qwen3.5", 1, 2, **changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "2 expert-parallel ranks: this mamba2 model has no experts"),
        (
            dict(hybrid_override_pattern="ME", num_experts=5),
            r"5 experts do not divide over 2 expert-parallel ranks \(5 % 2 = 1\)",
        ),
    ],
)
def test_models_that_cannot_be_divided(tmp_path, changes, words):
    (tmp_path / "text").write_text("some words " * 100)
    given = dict(data=(str(tmp_path / "text"),), out=str(tmp_path / "out"), expert_model_parallel_size=2)
    with pytest.raises(ValueError, match=words):
        RunInputs.read(tiny.options(**given, **changes))


LAYOUTS = {
    "one rank": (1, 1, 1),
    "tp2 ep2": (2, 2, 2),
    "dp4 ep2": (1, 4, 2),
    "dp4 ep4": (1, 4, 4),
    "tp2 dp2": (2, 2, 1),
}


@pytest.mark.parametrize(
    "before, after",
    [
        ("tp2 ep2", "dp4 ep4"),
        pytest.param("one rank", "tp2 ep2", marks=pytest.mark.full),
        pytest.param("dp4 ep2", "tp2 dp2", marks=pytest.mark.full),
        pytest.param("dp4 ep4", "one rank", marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_in_another_layout(ranks, tmp_path, before, after):
    """And its model, saved at the end, is that of one rank."""
    model, half = "qwen3.5", STEPS // 2

    def run(layout, work):
        tp, dp, ep = LAYOUTS[layout]
        return ranks(lambda rank: work(tiny.trainer_on(tp, options(model, 1, ep))), tp * dp)

    def first(trainer):
        tiny.curve(trainer, half)
        Snapshot.of(tmp_path, half, trainer.model, trainer.checkpoint_state(), {}).write()

    def second(trainer):
        trainer.load(tmp_path / f"step-{half:06d}", half)
        curve = tiny.curve(trainer, STEPS, half)
        save(trainer.model, tmp_path / "saved")
        return curve

    run(before, first)
    curve, wholes, fields, _ = one_rank(model)
    for found in run(after, second):
        assert (found - curve[:, half:]).abs().max() <= EXACT
    saved = tensors_in(tmp_path / "saved")
    for field in fields:
        found = field.read(saved[field.hf], 0, 1)
        assert (found - wholes[field.name]).abs().max() <= EXACT, field.name
