"""Routers of experts in training. Oracles: transformers' and Megatron's own load-balancing losses; the run on one rank."""

import functools

import pytest
import torch
from gradients import gradients, shifted
from megatron.core.transformer.moe import moe_utils
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

import megatron_ssm
import tiny
from cases import oracle
from megatron_ssm.layers.experts import Experts
from megatron_ssm.layers.routing import RouterLosses, Routing

__all__ = ["oracle"]
EXACT = 1e-10
LOSSES = dict(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02)


def recorded_logits(model):
    """A list that receives the logits (batch, seq, experts) of each router in a forward pass."""
    found = []
    for module in model.modules():
        if isinstance(module, Experts):
            module.router.register_forward_hook(lambda _, inputs, output: found.append(output))
    return found


def megatron_loss(form, logits, router, coefficient):
    """Megatron's loss of one layer, by its own functions; it calls them so in `moe/router.py`."""
    batch, seq, experts = logits.shape
    flat = logits.flatten(0, 1)
    score_function = "sigmoid" if router.form == "sigmoid" else "softmax"
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(flat, router.chosen, score_function)
    if form == "aux_loss":
        counts, tokens = chosen.sum(0), batch * seq
    else:
        scores, chosen = (t.view(batch, seq, experts).transpose(0, 1).flatten(1) for t in (scores, chosen))
        counts, tokens, coefficient = chosen.sum(0), seq, coefficient / batch
    return moe_utils.switch_load_balancing_loss_func(scores, counts, tokens, router.chosen, experts, coefficient)


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("form", ("aux_loss", "seq_aux_loss", "pooled_aux_loss"))
@pytest.mark.parametrize("name", ("qwen3.5-experts", "nemotron-experts"))
def test_losses_and_their_gradients(name, form, recompute, oracle):
    """In fp32, in which Megatron computes them."""
    if form == "pooled_aux_loss" and name == "nemotron-experts":
        pytest.skip("transformers has no such loss for sigmoid routers")
    inputs, labels = shifted(oracle(name).ids)
    losses = RouterLosses(form, 0.3, 0.02)

    def run(ours):
        model = megatron_ssm.load(oracle(name).directory, recompute=recompute and ours)
        router = next(module.spec.router for module in model.modules() if isinstance(module, Experts))
        if ours:
            model.routing = Routing(losses)
            loss = model.loss(inputs, labels)
        else:
            layers = recorded_logits(model)
            loss = model.loss(inputs, labels)
            if form == "pooled_aux_loss":
                pooled = load_balancing_loss_func(tuple(t.flatten(0, 1) for t in layers), router.experts, router.chosen)
                loss = loss + losses.balance * pooled
            else:
                loss = loss + sum(megatron_loss(form, logits, router, losses.balance) for logits in layers)
            loss = loss + sum(moe_utils.z_loss_func(logits.flatten(0, 1), losses.z) for logits in layers)
        loss.backward()
        return model, loss.detach(), gradients(model)

    model, loss, ours = run(True)
    plain, total, theirs = run(False)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)
    values, loads = model.routing.take(None, 1)
    ours = loss.item() + 0.3 * values["load_balancing_loss"] + 0.02 * values["z_loss"]
    assert ours == pytest.approx(total.item(), rel=1e-6)
    assert all(load.sum() == 3 * inputs.numel() for load in loads.values())  # each token chooses three


# Curves

MODEL = dict(model_type="qwen3_5_moe_text", **LOSSES)
SIGMOID = dict(model_type="nemotron_h", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05, **LOSSES)


@functools.cache
def one_rank(names, micro):
    """(curve, parameters, fields, metrics of the last step) of one rank with these micro-batches."""
    trainer = tiny.trainer(tiny.options(**dict(names), micro_batch_size=micro))
    return *observed(trainer), trainer.model.config.fields()


def observed(trainer):
    """(curve, parameters, what the log says of the routers); the corrections of every step are among the latter."""
    results, corrections = [], []
    for step in range(tiny.STEPS):
        results.append(trainer.step(tiny.batches(trainer.options), step))
        corrections += [value for name, value in tiny.pieces(trainer).items() if name.endswith("correction")]
    curve = torch.tensor([[r.loss, r.grad_norm] for r in results], dtype=torch.float64).T
    return curve, tiny.pieces(trainer), results[-1].more | dict(corrections=torch.cat(corrections or [torch.ones(1)]))


@pytest.mark.parametrize("form", ("aux_loss", "seq_aux_loss", "pooled_aux_loss"))
@pytest.mark.parametrize(
    "tp, cp, dp, changes",
    [
        pytest.param(2, 1, 1, {}, marks=pytest.mark.full),
        (2, 1, 1, dict(sequence_parallel=True, seq_length=11, recompute_activations=True)),
        (1, 2, 1, dict(seq_length=29)),
        (1, 1, 2, {}),
        (2, 2, 1, dict(seq_length=29, sequence_parallel=True)),
        (1, 2, 2, dict(recompute_activations=True)),
    ],
)
@pytest.mark.parametrize("model", (MODEL, SIGMOID), ids=("softmax", "sigmoid"))
def test_curves(ranks, model, tp, cp, dp, changes, form):
    """The balance of a micro-batch is not that of its halves: one rank has the micro-batches of the replicas."""
    run = dict(model, moe_router_load_balancing_type=form, moe_per_layer_logging=True)
    run |= {name: value for name, value in changes.items() if name == "seq_length"}
    options = tiny.options(**run | changes, micro_batch_size=2, context_parallel_size=cp)
    results = ranks(lambda rank: observed(tiny.trainer_on(tp, options)), tp * cp * dp)
    curve, wholes, more, fields = one_rank(tuple(run.items()), 2)
    for mine, _, logged in results:
        torch.testing.assert_close(mine, curve, rtol=0, atol=EXACT)
        assert logged["expert_loads"] == more["expert_loads"]
        assert torch.equal(logged["corrections"], more["corrections"])
        for name in ("load_balancing_loss", "z_loss", "max_expert_load"):
            assert logged[name] == pytest.approx(more[name], rel=1e-9), name
    ours = tiny.assembled([pieces for _, pieces, _ in results], fields, tp)
    assert all((ours[name] - wholes[name]).abs().max() <= EXACT for name in ours)
    assert more["corrections"].any()
