"""Training on several ranks. Oracles: the 1-rank run, and that against torch's AdamW, clip_grad_norm_ and DDP."""

import functools
import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import tiny
from commfabric.foundation.command_line import Failure
from megatron_ssm.parallel.groups import initialize
from megatron_ssm.train.batches import Tokens, windows
from megatron_ssm.train.options import Options
from megatron_ssm.train.trainer import adamw, clip_gradients, evaluate, grad_norm, learning_rate

EXACT = 1e-10
MODELS = {
    "mamba": dict(model_type="mamba"),
    "mamba untied": dict(model_type="mamba", untie_embeddings_and_output_weights=True),
    "mamba2": {},
    "mamba2 untied": dict(untie_embeddings_and_output_weights=True),
    "mamba2 groups": dict(mamba_num_groups=2),
    "mamba2 groups untied": dict(mamba_num_groups=2, untie_embeddings_and_output_weights=True),
    "falcon": dict(model_type="falcon_mamba", lr=1e-3),  # the norm of its one dt is nearly a sign: errors grow
    "zamba": tiny.ZAMBA,
    "zamba2": tiny.ZAMBA2,
    "zamba2 untied": tiny.ZAMBA2_UNTIED,
    "nemotron": tiny.NEMOTRON,
    **{name: dict(model_type=name) for name in tiny.RAW},
}


def largest(a, b):
    """The largest difference of two tensors, infinite if one is not finite."""
    return (a - b).abs().nan_to_num(math.inf).max().item()


# Curves


@functools.cache
def one_rank(model):
    """The oracle for all layouts: (curve, final parameters, fields) of the run on one rank with the whole batch at once."""
    trainer = tiny.trainer(tiny.options(**MODELS[model], micro_batch_size=4))
    return tiny.curve(trainer), tiny.pieces(trainer), trainer.model.config.fields()


def check_curves(ranks, tp, dp, model, micro):
    """Assert that the steps in this layout give the losses, gradient norms and parameters of one rank, on every rank."""
    run = tiny.options(**MODELS[model], micro_batch_size=micro)

    def train(rank):
        trainer = tiny.trainer_on(tp, run)
        return tiny.curve(trainer), tiny.pieces(trainer)

    curves, parameters = zip(*ranks(train, tp * dp), strict=True)
    curve, wholes, fields = one_rank(model)
    assert (curve[1] > run.clip_grad).all(), "clipping was not active"
    assert all(torch.equal(other, curves[0]) for other in curves)
    assert largest(curves[0], curve) <= EXACT
    for name, whole in tiny.assembled(parameters, fields, tp).items():
        assert largest(whole, wholes[name]) <= EXACT, name


@pytest.mark.parametrize(
    "tp, dp, model, micro",
    [
        (1, 2, "mamba2", 1),
        pytest.param(2, 1, "mamba untied", 1, marks=pytest.mark.full),
        (2, 2, "mamba2 groups", 2),
        pytest.param(4, 1, "mamba2 groups untied", 4, marks=pytest.mark.full),
        pytest.param(2, 1, "zamba2 untied", 4, marks=pytest.mark.full),
        pytest.param(2, 2, "mamba2", 1, marks=pytest.mark.full),
        pytest.param(2, 2, "zamba2", 2, marks=pytest.mark.full),
        pytest.param(4, 1, "zamba", 4, marks=pytest.mark.full),
        (2, 2, "nemotron", 2),
        (2, 1, "falcon_h1", 4),
        pytest.param(2, 2, "granitemoehybrid", 2, marks=pytest.mark.full),
        pytest.param(4, 1, "bamba", 4, marks=pytest.mark.full),
        pytest.param(2, 2, "jamba", 1, marks=pytest.mark.full),
        (2, 2, "qwen3_5_text", 2),
        pytest.param(2, 1, "olmo_hybrid", 4, marks=pytest.mark.full),
    ],
)
def test_curves(ranks, tp, dp, model, micro):
    check_curves(ranks, tp, dp, model, micro)


@pytest.mark.parametrize(
    "tp, dp, model",
    [(4, 1, "mamba2 groups"), pytest.param(3, 1, "falcon", marks=pytest.mark.full), (2, 2, "zamba2 untied")],
)
def test_copies_of_parameters_stay_equal(ranks, tp, dp, model):
    """Bit for bit, although each rank computes slightly different gradients of them."""
    run = tiny.options(**MODELS[model] | (dict(hidden_size=12) if tp == 3 else {}))

    def train(rank):
        trainer = tiny.rounding_differently(tiny.trainer_on(tp, run))
        tiny.curve(trainer, 3)
        return tiny.pieces(trainer), trainer.model.config.fields()

    parameters, fields = zip(*ranks(train, tp * dp), strict=True)
    tiny.assembled(parameters, fields[0], tp)  # asserts it


@pytest.mark.full
@pytest.mark.parametrize("tp, dp", [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("micro", (1, 2))
def test_every_curve(ranks, tp, dp, model, micro):
    check_curves(ranks, tp, dp, model, micro)


def plain_curve(model, module, run, rank=0, ranks=1, steps=10):
    """A training loop in plain torch: (2, steps), the loss and the gradient norm of each step."""
    decays = [p for name, p in model.named_parameters() if not re.search(NO_DECAY, name)]
    others = [p for name, p in model.named_parameters() if re.search(NO_DECAY, name)]
    groups = [dict(params=decays, weight_decay=run.weight_decay), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=run.lr, betas=(run.adam_beta1, run.adam_beta2), foreach=False)
    warmup = run.lr_warmup_iters
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (s + 1) / warmup if s < warmup else math.cos((s - warmup) / (20 - warmup) * math.pi / 2) ** 2,
    )
    rows, results = tiny.batches(run), []
    for step in range(steps):
        inputs, labels = rows.batch(step, rank, ranks)
        loss = F.cross_entropy(module(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip_grad)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        results.append([loss.item(), norm.item()])
    return torch.tensor(results, dtype=torch.float64).T


def check_against_torch(model):
    """Assert that a run on one rank equals torch's own loop over the model's logits."""
    run = tiny.options(**MODELS[model])
    plain = tiny.trainer(run).model
    trainer = tiny.trainer(run)
    assert largest(tiny.curve(trainer, 10), plain_curve(plain, plain, run)) <= EXACT
    for ours, theirs in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        assert largest(ours, theirs) <= EXACT


@pytest.mark.parametrize("model", ("mamba", "mamba2 groups untied", "zamba2 untied"))
def test_one_rank_against_torch(model):
    check_against_torch(model)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_against_torch_in_every_model(model):
    check_against_torch(model)


@pytest.mark.parametrize("dp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_data_parallel_against_torchs_ddp(ranks, dp):
    run = tiny.options(micro_batch_size=1)

    def train(rank):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # DDP warns about deprecated arguments
            ours = tiny.curve(tiny.trainer_on(1, run), 5)[1]
        model = tiny.trainer(run).model
        plain = plain_curve(model, DistributedDataParallel(model), run, rank, dp, 5)[1]
        return ours, plain

    for ours, plain in ranks(train, dp):
        assert largest(ours, plain) <= EXACT


@pytest.mark.parametrize("tp, dp", [(2, 3), (4, 2)])
def test_consecutive_ranks_split_a_replica(ranks, tp, dp):
    def groups(rank):
        groups = initialize(tp)
        tensor = [rank] if groups.tensor is None else dist.get_process_group_ranks(groups.tensor)
        return tensor, dist.get_process_group_ranks(groups.data), groups.data_rank, groups.data_ranks

    for rank, (tensor, data, data_rank, data_ranks) in enumerate(ranks(groups, tp * dp)):
        assert tensor == list(range(rank // tp * tp, rank // tp * tp + tp))
        assert data == list(range(rank % tp, tp * dp, tp))
        assert (data_rank, data_ranks) == (rank // tp, dp)


# Clipping


def gradients(trainer):
    """The model, with the gradient of one batch on its parameters."""
    trainer.model.loss(*tiny.batches(trainer.options, trainer.model.config.vocab_size).batch(0)).backward()
    return trainer.model


@pytest.mark.parametrize(
    "tp, model, vocab",
    [
        (2, "mamba", 61),
        (2, "mamba2 groups", 61),
        (4, "mamba", 9),  # 3 + 3 + 3 + 0
        (4, "mamba2 untied", 9),
        (4, "mamba2 groups", 61),
        (4, "mamba2 groups untied", 2),  # 1 + 1 + 0 + 0
        (2, "zamba2 untied", 61),
        (4, "zamba", 9),
    ],
)
def test_clipping_counts_each_element_once(ranks, tp, model, vocab):
    run = tiny.options(**MODELS[model])
    oracle = gradients(tiny.trainer(run, vocab=vocab))
    norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), run.clip_grad)

    def clip(rank):
        model = gradients(tiny.trainer_on(tp, run, vocab))
        naive = sum(p.grad.square().sum() for p in model.parameters() if p.requires_grad)
        dist.all_reduce(naive)
        norm = grad_norm(model)
        clip_gradients(model, norm, run.clip_grad)
        return norm, naive.sqrt(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    norms, naive, clipped = zip(*ranks(clip, tp), strict=True)
    assert all(abs(ours / norm - 1) <= 1e-12 for ours in norms)
    assert naive[0] / norm > 1 + 1e-6  # a sum over the ranks counts shared elements several times
    wholes = tiny.assembled(clipped, oracle.config.fields(), tp)
    assert wholes.keys() == {name for name, parameter in oracle.named_parameters() if parameter.requires_grad}
    for name, whole in wholes.items():
        assert largest(whole, oracle.get_parameter(name).grad) <= 1e-12, name


@pytest.mark.parametrize("limit", (0.0, 1e3))
def test_gradients_below_the_limit_are_not_clipped(limit):
    model = gradients(tiny.trainer(tiny.options()))
    before = [parameter.grad.clone() for parameter in model.parameters()]
    clip_gradients(model, grad_norm(model), limit)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


# The optimizer

NO_DECAY = r"A_log|\.D$|norm|bias"


@pytest.mark.parametrize("model", MODELS)
def test_only_matrices_have_weight_decay(model):
    trainer = tiny.trainer(tiny.options(**MODELS[model]))
    names = {parameter: name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    decayed, others = adamw(trainer.model, tiny.options(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    marked = {parameter for parameter in names if getattr(parameter, "_no_weight_decay", False)}
    assert marked == {*others["params"]}
    assert all(not re.search(NO_DECAY, names.pop(parameter)) for parameter in decayed["params"])
    assert all(re.search(NO_DECAY, names.pop(parameter)) for parameter in others["params"])
    assert not names


def rates(**changes):
    """The learning rates of a run."""
    run = Options(**{**dict(lr=1.0, train_iters=8, lr_warmup_iters=4, min_lr=0.0), **changes})
    return [learning_rate(run, step) for step in range(run.train_iters)]


def test_learning_rates_by_hand():
    half = math.sqrt(0.5)
    warm = [0.25, 0.5, 0.75, 1.0]
    assert rates() == pytest.approx(warm + [1.0, (1 + half) / 2, 0.5, (1 - half) / 2])
    assert rates(lr_decay_style="linear") == pytest.approx(warm + [1.0, 0.75, 0.5, 0.25])
    assert rates(lr_decay_style="linear", min_lr=0.5) == pytest.approx(warm + [1.0, 0.875, 0.75, 0.625])
    assert rates(lr_decay_style="linear", lr_decay_iters=6) == pytest.approx(warm + [1.0, 0.5, 0.0, 0.0])
    assert rates(lr_decay_style="constant", lr_decay_iters=6) == warm + [1.0] * 4
    assert rates(lr_warmup_iters=0, lr_decay_style="linear", train_iters=4) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(lr_warmup_iters=8, train_iters=8) == pytest.approx([k / 8 for k in range(1, 9)])


def test_learning_rates_against_torchs_schedules():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 10, 1.0, 9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=1e-4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [10])
    theirs = []
    for _ in range(50):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(lr=3e-3, train_iters=50, lr_warmup_iters=10, min_lr=1e-4) == pytest.approx(theirs, rel=1e-6)


# bf16


@pytest.mark.parametrize(
    "tp, model",
    [
        pytest.param(2, "mamba2", marks=pytest.mark.full),
        pytest.param(4, "mamba", marks=pytest.mark.full),
        (2, "zamba2"),
        (1, "zamba"),
    ],
)
def test_bf16_autocast(ranks, tp, model):
    run = dict(MODELS[model], params_dtype="float32", micro_batch_size=4)

    def train(rank):
        trainer = tiny.trainer_on(tp, tiny.options(**run, bf16=True))
        products = []
        trainer.model.layers[0].mixer.in_proj.register_forward_hook(lambda *hook: products.append(hook[2].dtype))
        losses = tiny.curve(trainer, 5)[0]
        cache = trainer.model.new_cache(1)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            trainer.model(torch.zeros(1, 5, dtype=torch.int64), cache=cache)
        moments = {state.dtype for held in trainer.optimizer.state.values() for state in held.values()}
        parameters = {parameter.dtype for parameter in trainer.model.parameters()}
        states = {name: t.dtype for state in cache.states.values() for name, t in state.fixed.items()}
        return losses, set(products), parameters | moments, {states["state"]}

    exact = tiny.curve(tiny.trainer(tiny.options(**run)), 5)[0]
    for losses, products, kept, states in ranks(train, tp):
        assert products == {torch.bfloat16}
        assert kept == states == {torch.float32}
        assert 0 < largest(losses, exact) <= 0.05  # of losses about 4


# What stops a run


def make_loss_nan(trainer):
    """Put NaN into one parameter of this rank."""
    with torch.no_grad():
        trainer.model.layers[0].mixer.D[0] = math.nan


def make_gradient_infinite(trainer):
    """Make the gradient of one parameter of this rank infinite; the loss stays finite."""
    trainer.model.layers[0].mixer.D.register_hook(lambda gradient: gradient * math.inf)


@pytest.mark.parametrize(
    "tp, dp, spoil",
    [(2, 1, make_gradient_infinite), (1, 2, make_loss_nan), (2, 2, make_loss_nan), (2, 2, make_gradient_infinite)],
)
def test_a_non_finite_step_stops_every_rank(ranks, tp, dp, spoil):
    """NaN or Inf appears on the last rank alone, from the third step on; the run may skip none, or two."""

    def train(rank):
        lines = []
        for skipped in (0, 2):
            trainer = tiny.trainer_on(tp, tiny.options(max_skipped_steps=skipped))
            tiny.curve(trainer, 2)
            if rank == tp * dp - 1:
                spoil(trainer)
            with pytest.raises(Failure) as failure:
                tiny.curve(trainer, start=2)
            lines.append(str(failure.value))
        return tuple(lines)

    (lines,) = set(ranks(train, tp * dp))
    for line, step, after in zip(lines, (3, 5), ("", " after 2 skipped steps"), strict=True):
        problem = rf"step {step}: loss \S+, gradient norm (nan|inf): not finite{after}, so training stops"
        assert re.fullmatch(problem, line)
        assert ("loss nan" in line) == (spoil is make_loss_nan)


@pytest.mark.parametrize("tp, dp", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("mode", ("dense", "layerwise"))
def test_a_skipped_step_changes_nothing(ranks, tp, dp, mode):
    """The run is the one whose batches lack that step: parameters, moments, step counts, residuals."""
    run = tiny.options(gradient_mode=mode, gradient_density=0.1, lr_decay_style="constant", lr_warmup_iters=0)

    def train(rank):
        trainer, other = tiny.trainer_on(tp, run), tiny.trainer_on(tp, run)
        data = tiny.batches(run)
        for step in range(5):
            result = trainer.step(data, step)
            other.step(data, step)
        handle = trainer.model.layers[0].mixer.D.register_hook(lambda grad: grad * (math.inf if rank == 0 else 1.0))
        result = trainer.step(data, 5)
        handle.remove()
        assert result.is_skipped and not math.isfinite(result.grad_norm)
        for step in (6, 7):
            assert trainer.step(data, step) == other.step(data, step)
        pairs = list(zip(trainer.model.parameters(), other.model.parameters(), strict=True))
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        states = [(trainer.optimizer.state[ours], other.optimizer.state[theirs]) for ours, theirs in pairs]
        return all(torch.equal(ours[name], theirs[name]) for ours, theirs in states for name in theirs)

    assert all(ranks(train, tp * dp))


# Evaluation


def held_out(tokens):
    """A stream of `tokens` tokens, as if from 1000 bytes of text."""
    return Tokens(tiny.stream().ids[:tokens], 1000)


@functools.cache
def plain_nats(tokens):
    """Nats per byte by a loop over the windows and torch's cross-entropy."""
    model = tiny.trainer(tiny.options()).model
    inputs, labels = windows(held_out(tokens), tiny.RUN["seq_length"])
    with torch.no_grad():
        logits = torch.cat([model(window[None])[0] for window in inputs])
    return F.cross_entropy(logits, labels.flatten(), reduction="sum").item() / 1000


def nats(trainer):
    """The results of `evaluate` for streams of 9 windows, of 2 windows and of 1 window, with the last one not full."""
    runs = [tiny.options(micro_batch_size=micro) for micro in (1, 2)]
    return {
        (tokens, run.micro_batch_size): evaluate(trainer.model, held_out(tokens), trainer.groups, run)
        for run in runs
        for tokens in (100, 14, 2)
    }


@pytest.mark.parametrize("tp, dp", [(1, 2), (1, 3), (2, 1), (2, 2)])
def test_evaluation(ranks, tp, dp):
    results = ranks(lambda rank: nats(tiny.trainer_on(tp, tiny.options(global_batch_size=12))), tp * dp)
    assert all(result == results[0] for result in results)
    for (tokens, micro), ours in results[0].items():
        assert abs(ours - plain_nats(tokens)) <= 1e-12, (tokens, micro)


def test_evaluation_on_one_rank():
    for (tokens, micro), ours in nats(tiny.trainer(tiny.options())).items():
        assert abs(ours - plain_nats(tokens)) <= 1e-12, (tokens, micro)
