"""Training in a DeepSpeed engine, in forked ranks on the CPU. Oracle: torch's engine, with the same weights and data."""

import math

import pytest
import torch
from chosen import by_default
from deepspeed_package import deepspeed

import tiny
from commfabric.foundation.command_line import Failure
from fp32_runs import FP32, MODELS, close, one_rank, run_of
from megatron_ssm import families
from megatron_ssm.checkpoints.training import Snapshot
from megatron_ssm.parallel.groups import initialize
from megatron_ssm.spec.fields import field_of
from megatron_ssm.train.batches import Tokens
from megatron_ssm.train.deepspeed_settings import read_settings
from megatron_ssm.train.pretraining import make_model, make_trainer
from megatron_ssm.train.trainer import evaluate

__all__ = ["deepspeed"]
pytestmark = pytest.mark.usefixtures("deepspeed")  # imported before ranks are forked

SPARSE = dict(gradient_mode="layerwise", gradient_density=0.1)
BF16 = dict(bf16=True, config={"bf16": {"enabled": True}})
SKIPPING = dict(lr_decay_style="constant", lr_warmup_iters=0, max_skipped_steps=1, num_layers=1)


@pytest.mark.parametrize("world, stage", [(2, 0), (3, 2), (2, 3)])
def test_pending_gradients_wait_for_a_gradient(ranks, tmp_path, world, stage):
    """Those of a parameter that has none stay; the others are added once."""
    run = run_of(stage, folder=tmp_path, global_batch_size=6)
    for waiting, frozen in ranks(lambda rank: add_pending_gradients(run), world):
        assert waiting == [frozen]


def add_pending_gradients(run):
    """(names of parameters whose pending gradients are left after two steps, the name of the one without a gradient)."""
    groups = initialize(1)
    config = families.from_dict(run.new_config(tiny.VOCAB, 0))
    model = make_model(run, config, groups, torch.device("cpu"))
    frozen, trained = model.layers[0].mixer.D, model.layers[1].mixer.D
    frozen.requires_grad_(False)
    trainer = make_trainer(model, groups, run, read_settings(run, groups.data_ranks, config.hidden_size))
    names = {parameter: name for name, parameter in trainer.named_parameters()}
    size = math.prod(field_of(trained).shape)
    trainer.pending_gradients = {names[each]: torch.ones(size) for each in (frozen, trained)}
    tiny.curve(trainer, 2)
    return list(trainer.pending_gradients), names[frozen]


@pytest.mark.parametrize(
    "config, line",
    [
        ({"csv_monitor": {"enabled": "perhaps"}}, "enabled Input should be a valid boolean"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": -5}}, "reduce_bucket_size Input should be greater"),
        ({"prescale_gradients": True, "zero_optimization": {"stage": 2}}, "pre-scale gradients is not yet supported"),
    ],
)
def test_what_deepspeed_itself_refuses(ranks, tmp_path, config, line):
    """One line, on every rank."""
    run = run_of(0, folder=tmp_path, global_batch_size=2, config=config)

    def train(rank):
        with pytest.raises(ValueError, match=rf"json: [^\n]*{line}[^\n]*$"):
            tiny.trainer_on(1, run)

    ranks(train, 2)


# Curves


@pytest.mark.parametrize("stage", by_default((0, 1, 3), (0, 1, 2, 3)))
@pytest.mark.parametrize(
    "tp, dp, model",
    [(2, 1, "mamba untied"), (2, 2, "mamba2 groups"),
     *(pytest.param(1, dp, "mamba2", marks=pytest.mark.full) for dp in (2, 4))],
)  # fmt: skip
def test_curves(ranks, tmp_path, tp, dp, model, stage):
    """Clipped steps in micro-batches give the losses and norms of torch's engine."""
    run = run_of(stage, folder=tmp_path, **MODELS[model])
    curves = ranks(lambda rank: tiny.curve(tiny.trainer_on(tp, run)), tp * dp)
    assert all(torch.equal(curve, curves[0]) for curve in curves)
    expected = one_rank(model)[:, : tiny.STEPS]
    assert close(curves[0], expected), (curves[0] - expected).abs().max()


@pytest.mark.parametrize("stage", by_default((1, 3), (0, 1, 2, 3)))
@pytest.mark.parametrize(
    "tp, cp, less_memory",
    [(1, 2, dict(recompute_activations=True)), (2, 1, dict(sequence_parallel=True)),
     pytest.param(2, 2, dict(sequence_parallel=True, recompute_activations=True), marks=pytest.mark.full)],
)  # fmt: skip
def test_context_and_sequence_parallelism(ranks, tmp_path, tp, cp, less_memory, stage):
    run = run_of(stage, folder=tmp_path, context_parallel_size=cp, **less_memory)
    curve = ranks(lambda rank: tiny.curve(tiny.trainer_on(tp, run), 4), tp * cp)[0]
    assert close(curve, one_rank("mamba2")[:, :4])


WHOLE = dict(reduce_scatter=False)
PASSED_ON = [  # (stages of ZeRO, keys of zero_optimization, other keys): values that are not DeepSpeed's own
    ((1, 2, 3), WHOLE, {}),
    ((1, 2, 3), dict(contiguous_gradients=False), {}),
    ((1, 2, 3), dict(contiguous_gradients=False, reduce_scatter=False), {}),
    ((1, 2), dict(overlap_comm=True), {}),
    ((3,), dict(overlap_comm=False), {}),
    ((1, 2), dict(allgather_partitions=False, allgather_bucket_size=100), {}),
    ((1, 2), dict(ignore_unused_parameters=False), {}),
    ((3,), dict(stage3_max_live_parameters=0, stage3_max_reuse_distance=0, stage3_param_persistence_threshold=100), {}),
    ((0, 1), {}, dict(prescale_gradients=True)),
    ((2, 3), WHOLE, dict(prescale_gradients=True)),
    ((0, 1), {}, dict(gradient_predivide_factor=2)),
    ((1, 2), WHOLE, dict(gradient_predivide_factor=2)),
    ((1, 2), WHOLE, dict(gradient_predivide_factor=1.5)),
]


@pytest.mark.parametrize("dp", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", by_default((0, 1, 3), (0, 1, 2, 3)))  # 1 and 2 are one class of DeepSpeed's
def test_keys_that_are_passed_on_change_no_curve(ranks, tmp_path, dp, stage):
    runs = []
    for number, (stages, zero, config) in enumerate(PASSED_ON):
        folder = tmp_path / str(number)
        folder.mkdir()
        runs += [run_of(stage, folder=folder, zero=zero, config=config)] if stage in stages else []
    curves = ranks(lambda rank: [tiny.curve(tiny.trainer_on(1, run), 2) for run in runs], dp)[0]
    assert [curve for curve in curves if not close(curve, one_rank("mamba2")[:, :2])] == []


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tp, dp", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("model", [tiny.ZAMBA, tiny.ZAMBA2_UNTIED, dict(model_type="falcon_mamba", lr=1e-3)])
def test_curves_of_other_families(ranks, tmp_path, tp, dp, model, stage):
    """The losses of torch's engine on the same ranks. Idle parameters are frozen; shared blocks are used several times."""
    run, plain = run_of(stage, folder=tmp_path, **model), run_of("torch", **model)
    ours, torchs = ranks(lambda rank: [tiny.curve(tiny.trainer_on(tp, each))[0] for each in (run, plain)], tp * dp)[0]
    assert close(ours, torchs), (ours - torchs).abs().max()


def with_large_gradients(trainer):
    """The trainer, with gradients of B and C of which several ranks have a copy, so large that the norm shows it."""
    for name, parameter in trainer.model.named_parameters():
        if name.endswith((".B", ".C")):
            parameter.register_hook(lambda gradient: 1000 * gradient)
    return trainer


@pytest.mark.parametrize("tp, dp", [(4, 1), (2, 1), pytest.param(2, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", by_default((2, 3), (0, 1, 2, 3)))
def test_clipping_counts_each_element_once(ranks, tmp_path, tp, dp, stage):
    """With two groups on four ranks. One of these holds no part of the vocabulary."""
    changes, vocab = dict(mamba_num_groups=2, untie_embeddings_and_output_weights=True), 9
    run = run_of(stage, folder=tmp_path, **changes)

    def train(rank):
        trainer = with_large_gradients(tiny.trainer_on(tp, run, vocab))
        return tiny.curve(trainer, 2, vocab=vocab), trainer._engine.get_global_grad_norm()

    oracle = with_large_gradients(tiny.trainer(run_of("torch", **changes, micro_batch_size=4), vocab=vocab))
    whole = tiny.curve(oracle, 2, vocab=vocab)
    for curve, theirs in ranks(train, tp * dp):
        assert torch.allclose(curve, whole, rtol=1e-5, atol=0)
        # DeepSpeed's own norm of the clipped gradient counts copies several times: it is no longer the limit.
        assert stage == 0 or tp == 2 or theirs > 1.01 * run.clip_grad


@pytest.mark.parametrize(
    "stage, tp, dp", [(0, 2, 1), pytest.param(1, 2, 2, marks=pytest.mark.full), (2, 2, 2), (3, 2, 2)]
)
def test_copies_of_parameters_stay_equal(ranks, tmp_path, stage, tp, dp):
    """The partitions of two tensor-parallel ranks do not end at the same element, because their vocabularies differ."""
    run, vocab = run_of(stage, folder=tmp_path), 9

    def train(rank):
        trainer = tiny.rounding_differently(tiny.trainer_on(tp, run, vocab))
        tiny.curve(trainer, 3, vocab=vocab)
        with trainer.whole_parameters():
            return tiny.pieces(trainer), trainer.model.config.fields()

    parameters, fields = zip(*ranks(train, tp * dp), strict=True)
    tiny.assembled(parameters, fields[0], tp)  # asserts it


@pytest.mark.parametrize("tp, dp", [(2, 2), *(pytest.param(1, dp, marks=pytest.mark.full) for dp in (2, 4))])
@pytest.mark.parametrize("stage", by_default((1, 3), (1, 2, 3)))
def test_zero_divides(ranks, tmp_path, tp, dp, stage):
    """A rank updates 1/dp of its part, and ZeRO 3 keeps no more of the parameters between steps."""
    run = run_of(stage, folder=tmp_path)

    def train(rank):
        trainer = tiny.trainer_on(tp, run)
        elements = sum(parameter.numel() for parameter in tiny.trainer_on(tp, run_of("torch")).model.parameters())
        tiny.curve(trainer, 1)
        moments = sum(state["exp_avg"].numel() for state in trainer.optimizer.state.values())
        return elements, moments, sum(parameter.numel() for parameter in trainer.model.parameters())

    for elements, moments, parameters in ranks(train, tp * dp):
        assert moments == pytest.approx(elements / dp, rel=0.05)
        assert parameters == (0 if stage == 3 else elements)


# Checkpoints


@pytest.mark.parametrize(
    "tp, dp", [(2, 2), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((1, 2), (2, 1)))]
)
@pytest.mark.parametrize(
    "first, then",
    [(3, "torch")]
    + [pytest.param(*pair, marks=pytest.mark.full) for pair in [("torch", 1), (1, 0), (0, 2), (2, 3), ("torch", 3)]],
)
def test_checkpoints_of_every_engine(ranks, tmp_path, tp, dp, first, then):
    """A run is continued by another engine, on other ranks where there are several, with the moments."""
    before, after = (run_of(each, folder=tmp_path) if each != "torch" else run_of(each) for each in (first, then))

    def begin(rank):
        trainer = tiny.trainer_on(tp, before)
        tiny.curve(trainer, 3)
        Snapshot.of(tmp_path, 3, trainer.model, trainer.checkpoint_state(), {}).write()

    def go_on(rank):
        trainer = tiny.trainer_on(dp, after)
        trainer.load(tmp_path / "step-000003", 3)
        return tiny.curve(trainer, 6, start=3)

    ranks(begin, tp * dp)
    assert close(ranks(go_on, tp * dp)[0], one_rank("mamba2")[:, 3:6])


@pytest.mark.parametrize("tp, dp", [(2, 2), pytest.param(1, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", by_default((3,), (3, 2, 1, 0)))
@pytest.mark.parametrize("model", [{}, pytest.param(tiny.ZAMBA2_UNTIED, marks=pytest.mark.full)])
def test_resumed_runs_are_bitwise_equal(ranks, tmp_path, tp, dp, stage, model):
    """On the same ranks. Idle parameters (zamba2), which have no moments, are in the checkpoint too."""
    run = run_of(stage, folder=tmp_path, **model)

    def train(rank):
        trainer = tiny.trainer_on(tp, run)
        tiny.curve(trainer, 2)
        Snapshot.of(tmp_path, 2, trainer.model, trainer.checkpoint_state(), {}).write()
        straight = tiny.curve(trainer, 4, start=2)
        again = tiny.trainer_on(tp, run)
        again.load(tmp_path / "step-000002", 2)
        assert torch.equal(tiny.curve(again, 4, start=2), straight)
        with trainer.whole_parameters(), again.whole_parameters():
            assert all(map(torch.equal, tiny.pieces(trainer).values(), tiny.pieces(again).values()))

    ranks(train, tp * dp)


# Evaluation, bf16, and what stops a run


@pytest.mark.full
@pytest.mark.parametrize("tp, dp", [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation(ranks, tmp_path, tp, dp, stage):
    """Between two steps, which it does not change."""
    run, text = run_of(stage, folder=tmp_path), Tokens(tiny.stream().ids[:100], 1000)

    def train(rank):
        trainer = tiny.trainer_on(tp, run)
        before = trainer.evaluate(text)
        curve = tiny.curve(trainer, 2)
        trainer.evaluate(text)
        return before, torch.cat([curve, tiny.curve(trainer, 4, start=2)], 1)

    plain = tiny.trainer(run_of("torch"))
    for nats, curve in ranks(train, tp * dp):
        assert nats == pytest.approx(evaluate(plain.model, text, plain.groups, plain.options), rel=1e-6)
        assert close(curve, one_rank("mamba2")[:, :4])


@pytest.mark.full
@pytest.mark.parametrize("tp, dp", [(1, 2), (2, 2)])
@pytest.mark.parametrize("stage, section, kept", [
    (2, {}, torch.float32), (1, {"torch_autocast": {"enabled": True}, "bf16": {"enabled": False}}, torch.float32),
    (1, {"bf16": {"enabled": "auto"}}, torch.bfloat16), (3, {"bf16": {"enabled": True}}, torch.bfloat16)
])  # fmt: skip
def test_bf16(ranks, tmp_path, tp, dp, stage, section, kept):
    """Autocast is that of torch's engine; in DeepSpeed's own bf16, the parameters that are updated and saved are fp32."""
    run = run_of(stage, folder=tmp_path, bf16=True, config=section)

    def train(rank):
        trainer = tiny.trainer_on(tp, run)
        products = []
        trainer.model.layers[0].mixer.in_proj.register_forward_hook(lambda *hook: products.append(hook[2].dtype))
        losses, autocast = tiny.curve(trainer, 5)[0], tiny.curve(tiny.trainer_on(tp, run_of("torch", bf16=True)), 5)[0]
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {kept} and {*products} == {
            torch.bfloat16
        }
        state = trainer.checkpoint_state().state.values()
        assert {tensor.dtype for each in state for tensor in each.values()} == {torch.float32}
        return losses, autocast

    losses, autocast = ranks(train, tp * dp)[0]
    assert close(losses, autocast, FP32 if kept == torch.float32 else 0.05)
    assert not torch.equal(losses, one_rank("mamba2")[0, :5])


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "stage, changes",
    [(0, {}), (0, SPARSE), (1, SPARSE), (1, BF16), (2, {}), (3, {}), (3, BF16),
     pytest.param(1, {}, marks=pytest.mark.full), pytest.param(2, BF16, marks=pytest.mark.full)],
)  # fmt: skip
def test_a_skipped_step_changes_nothing(ranks, tmp_path, tp, dp, stage, changes):
    """The run is the one whose batches lack that step. One more step that is not finite stops every rank."""
    run = run_of(stage, folder=tmp_path, **SKIPPING, **changes)
    ranks(lambda rank: check_skipped_step(rank, tp, run, 6 if changes is SPARSE else 2), tp * dp)


@pytest.mark.parametrize(
    "dp, changes",
    [pytest.param(2, dict(hidden_size=18), marks=pytest.mark.full), (3, dict(mamba_head_dim=8, global_batch_size=6))],
)
def test_a_skipped_step_with_padded_partitions(ranks, tmp_path, dp, changes):
    """ZeRO 3 divides the 9 elements of D into 5 + 4, and the 4 of the other model into 2 + 2 + 0; padding stays zero."""
    run = run_of(3, folder=tmp_path, **SKIPPING, **changes)
    ranks(lambda rank: check_skipped_step(rank, 1, run, 2), dp)


def check_skipped_step(rank, tp, run, before):
    """Skip a step after `before` others, compare those that follow with another run's, and skip one more than allowed."""
    trainer, other = tiny.trainer_on(tp, run), tiny.trainer_on(tp, run)
    data = tiny.batches(run)
    for step in range(before):
        trainer.step(data, step), other.step(data, step)
    spoiled = [rank == 0]
    trainer.model.layers[0].mixer.D.register_hook(lambda grad: grad * (math.inf if spoiled[0] else 1.0))
    assert trainer.step(data, 6).is_skipped
    spoiled[0] = False
    for step in (7, 8):
        assert trainer.step(data, step) == other.step(data, step)
    ours, others = trainer.checkpoint_state(), other.checkpoint_state()
    pairs = [(ours.state[p], others.state[q]) for p, q in zip(ours.state, others.state, strict=True)]
    assert all(torch.equal(a[name], b[name]) for a, b in pairs for name in b)
    assert trainer._stage == 0 or ours.steps == others.steps == before + 2
    spoiled[0] = rank == 0
    assert trainer.step(data, 9).is_skipped
    with pytest.raises(Failure, match="step 11: loss .*: not finite after 1 skipped steps, so training stops"):
        trainer.step(data, 10)
