"""Models whose block outputs are reduced in fewer bytes. Oracles: the exact model, and the bits of the other ranks."""

import json
import os
import re
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from programs import completed

import megatron_ssm
import tiny  # noqa: F401  (imports Megatron once, for the forked ranks)
from cases import CASES, oracle
from commfabric.foundation.command_line import run
from hf import SMALL, save_hf
from megatron_ssm import families
from megatron_ssm.cli import main as __main__
from megatron_ssm.engine.text import write_byte_tokenizer
from megatron_ssm.model.memory import sizes_of
from megatron_ssm.parallel import ranks as sums
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.spec.sizes import Workload
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pretraining import pretrain
from sparsefusion import all_reduce

__all__ = ["oracle"]

HIDDEN = SMALL["hidden_size"]
LOSSY = ("fp16", "bf16", "int8")
# Bounds on the relative error of the logits, ||difference|| / ||logits of the exact model||.
BOUNDS = {"fp16": 3e-3, "bf16": 2e-2, "int8": 6e-2}
AMPLIFICATION = {"zamba2": 3}  # how much more these models amplify rounding errors
# These cover each kind of mixer and both kinds of shared block.
FEW = ("mamba", "falcon", "mamba2-1-group", "mamba2-2-groups", "zamba-2-heads-biases", "zamba2-1-group")
worlds = pytest.mark.parametrize("tp", (2, 4))
# No bound holds for models with experts: where rounding makes a router choose another expert, its output differs entirely.
MODELS = [name for name in CASES if "expert" not in name]
models = pytest.mark.parametrize("name", by_default(FEW, MODELS))


def bound(name, format):
    """The bound on the relative error of a model's logits."""
    return BOUNDS[format] * AMPLIFICATION.get(CASES[name][0], 1)


def block_outputs(config):
    """How many block outputs a model reduces: one per unit, and two (attention, MLP) per use of a shared block."""
    return sum(1 + 2 * (unit.side is not None) for _, unit in config.units)


def relative(got, exact):
    """||got - exact|| / ||exact||."""
    return ((got - exact).double().norm() / exact.double().norm()).item()


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    """Keep the measurements of `auto` short."""
    monkeypatch.setattr("commfabric.reduction.quantized.AUTO_SIZES", [2048, 65536])
    monkeypatch.setattr("commfabric.fabric.measurement.BUDGET_S", 0.0)


# Logits


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
@models
def test_logits(ranks, tp, name, oracle):
    """Logits are bitwise equal on all ranks, and close but not equal to the exact model's. "callable" sums exactly.

    They are compared with transformers' logits in float64: its own error in fp32 is close to the tolerance.
    """
    source, ids = oracle(name).directory, oracle(name).ids

    @torch.no_grad()
    def logits(rank):
        exact = megatron_ssm.load(source, dist.group.WORLD)
        formats = {format: format for format in ("fp32", *LOSSY, "auto")}
        formats["callable"] = lambda tensor, group: exact.ranks.all_reduce_exact(tensor, group)
        formats["native"] = partial(all_reduce, format="fp16", algorithm="native")
        return {key: megatron_ssm.load(source, dist.group.WORLD, reduce=each)(ids) for key, each in formats.items()}

    first, *others = ranks(logits, tp)
    for key, tensor in first.items():
        assert all(other[key].view(torch.int32).equal(tensor.view(torch.int32)) for other in others), key
    exact = first["fp32"]
    assert (exact - oracle(name).exact).abs().max() <= oracle(name).tolerance
    torch.testing.assert_close(first["callable"], exact, rtol=0, atol=oracle(name).tolerance)
    for format in LOSSY:
        assert 0 < relative(first[format], exact) <= bound(name, format), format
    assert relative(first["int8"], exact) > relative(first["bf16"], exact) > relative(first["fp16"], exact)
    assert relative(first["auto"], exact) <= bound(name, "int8")
    assert 0 < relative(first["native"], exact) <= 2 * bound(name, "fp16")


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_a_model_in_float64(ranks, tp, oracle):
    """With "fp32" its sums stay float64; the other formats round as usual."""
    source, ids = oracle("mamba2-1-group", torch.float64).directory, oracle("mamba2-1-group").ids

    @torch.no_grad()
    def logits(rank):
        load = partial(megatron_ssm.load, source, dist.group.WORLD, dtype=torch.float64)
        return {format: load(reduce=format)(ids) for format in ("fp32", *LOSSY)}

    exact = oracle("mamba2-1-group", torch.float64).whole
    for found in ranks(logits, tp):
        assert all(tensor.dtype == torch.float64 for tensor in found.values())
        assert (found["fp32"] - exact).abs().max() <= 1e-10
        for format in LOSSY:
            assert 1e-6 < relative(found[format], exact) <= BOUNDS[format], format


# Which sums are rounded


@worlds
@models
def test_only_block_outputs_are_rounded(ranks, tp, name, oracle):
    """All other sums are exact: those of x_proj, the embedding and the norms' squares, and all of backward."""
    source, ids = oracle(name).directory, oracle(name).ids

    def shapes(rank):
        rounded, beside, exact = [], [], []
        reduce, sum_exactly = sums.all_reduce, Ranks.all_reduce_exact

        def reducing(tensor, group, format, counter, **keywords):
            assert format == "int8"
            rounded.append(tuple(tensor.shape))
            if "exact" in keywords:
                beside.append(tuple(keywords["exact"].shape))
            return reduce(tensor, group, format, counter=counter, **keywords)

        def summing(self, tensor, group):
            exact.append(tuple(tensor.shape))
            return sum_exactly(self, tensor, group)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sums, "all_reduce", reducing)
            patch.setattr(Ranks, "all_reduce_exact", summing)
            model = megatron_ssm.load(source, dist.group.WORLD, reduce="int8", shared_memory=False)
            loss = model.local_logits(ids)[..., :1].sum()
            forward = list(rounded), list(beside), list(exact)
            loss.backward()
        return *forward, len(rounded)

    batch_shape = tuple(ids.shape)
    config = families.read(source)
    sizes = [each for each, _ in sizes_of(config, Workload(tp))]
    inner, has_columns = {width for each in sizes for width in each.inner}, any(each.columns for each in sizes)
    for rounded, beside, exact, in_all in ranks(shapes, tp):
        assert {shape[:2] for shape in rounded} == {batch_shape} and in_all == len(rounded) == block_outputs(config)
        assert set(beside) <= {(*batch_shape, 1)} and bool(beside) == has_columns
        assert exact[0] == (*batch_shape, HIDDEN) and exact.count((*batch_shape, HIDDEN)) == 1  # the embedding
        assert {shape[-1] for shape in exact[1:]} == inner


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_sums_of_squares_are_exact(ranks, tp, oracle):
    """In Mamba-2 with one group, the first block, whose input is exact, has the sums of squares of the exact model."""
    case = oracle("mamba2-1-group")

    @torch.no_grad()
    def first_squares(rank):
        found, load = [], partial(megatron_ssm.load, case.directory, dist.group.WORLD, shared_memory=False)
        for format in ("fp32", *LOSSY):
            squares, reduce = [], sums.all_reduce

            def recording(*arguments, reduce=reduce, squares=squares, **keywords):
                total, column = reduce(*arguments, **keywords)
                squares.append(column)
                return total, column

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sums, "all_reduce", recording)
                load(reduce=format).local_logits(case.ids)
            found.append(squares[0])
        return found

    for exact, *others in ranks(first_squares, tp):
        for squares in others:
            torch.testing.assert_close(squares, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_auto_measures_when_the_model_is_loaded(ranks, tp, oracle, monkeypatch):
    """It measures once for each group; later calls and loads measure nothing."""
    from commfabric.reduction import quantized

    source, ids = oracle("mamba").directory, oracle("mamba").ids
    measured, measure = [], quantized.measure
    monkeypatch.setattr(quantized, "measure", lambda *given, **named: measured.append(1) or measure(*given, **named))

    @torch.no_grad()
    def times(rank):
        found = []
        for _ in range(2):
            model = megatron_ssm.load(source, dist.group.WORLD, reduce="auto", shared_memory=False)
            found.append(len(measured))
            model(ids)
            found.append(len(measured))
        alone = megatron_ssm.load(source, reduce="auto")
        alone(ids)
        return [*found, len(measured)]

    assert ranks(times, tp) == [[1] * 5] * tp


def test_unknown_formats(oracle):
    for wrong in ("fp8", "FP16", None, 16):
        with pytest.raises(
            ValueError, match=f"reduce={wrong!r} is neither one of fp32, fp16, bf16, int8, auto nor a callable"
        ):
            megatron_ssm.load(oracle("mamba").directory, reduce=wrong)


@pytest.mark.parametrize("format", (*LOSSY, "auto"))
def test_one_rank_rounds_nothing(format, oracle):
    case = oracle("mamba2-1-group")
    with torch.no_grad():
        exact = megatron_ssm.load(case.directory)(case.ids)
        assert torch.equal(megatron_ssm.load(case.directory, reduce=format)(case.ids), exact)


# Tokens


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize(
    "name", ("mamba2-1-group", *(pytest.param(n, marks=pytest.mark.full) for n in FEW[:2] + FEW[3:]))
)
def test_tokens(ranks, tp, name, oracle):
    """Tokens are equal on all ranks; greedy ones are the exact model's as long as its choices have a clear margin."""
    source, prompt = oracle(name).directory, oracle(name).ids[:, :10]
    new = 8

    def tokens(rank):
        found = {}
        for format in ("fp32", *LOSSY, "auto"):
            model = megatron_ssm.load(source, dist.group.WORLD, reduce=format)
            found[format] = [megatron_ssm.generate(model, prompt, max_new_tokens=new)]
            if format == "int8":
                found[format] += [megatron_ssm.generate(model, prompt, max_new_tokens=new, temperature=1.0, seed=3)]
        return found

    first, *others = ranks(tokens, tp)
    for other in others:
        assert all(torch.equal(a, b) for format in first for a, b in zip(first[format], other[format], strict=True))
    exact = first["fp32"][0]
    with torch.no_grad():
        logits = oracle(name).logits(torch.cat([prompt, exact], 1))[:, prompt.shape[1] - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    assert exact.shape == (2, new) and torch.equal(logits.argmax(-1), exact)
    for format in LOSSY:
        clear = (best - second) > 4 * BOUNDS[format] * logits.abs().max()
        certain = clear.long().cumprod(-1).bool()  # up to the first choice without a clear margin
        assert torch.equal(first[format][0][certain], exact[certain])
        assert format != "fp16" or certain.any()


# Training


@worlds
@pytest.mark.parametrize(
    "name", ("mamba", "mamba2-1-group", *(pytest.param(n, marks=pytest.mark.full) for n in FEW[3:]))
)
def test_gradients(ranks, tp, name, oracle):
    """After a rounded forward pass, gradients are close to the exact ones, and replicated gradients are bitwise equal on
    all ranks. Backward is exact, so an exact callable gives exact gradients."""
    source, ids = oracle(name).directory, oracle(name).ids

    def step(rank):
        found = {}
        exactly = Ranks.of(dist.group.WORLD).all_reduce_exact
        for key, format in {"fp32": "fp32", "callable": exactly, **{each: each for each in LOSSY}}.items():
            model = megatron_ssm.load(source, dist.group.WORLD, reduce=format)
            loss = model.loss(ids[:, :-1], ids[:, 1:])
            loss.backward()
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found[key] = loss.detach(), torch.cat([grad.flatten() for grad in grads.values()]), grads["norm_f.weight"]
        return found

    results = ranks(step, tp)
    for found in results:
        loss, grads, _ = found["fp32"]
        assert relative(found["callable"][1], grads) <= 1e-5
        for format in LOSSY:
            rounded_loss, rounded, whole = found[format]
            assert rounded.isfinite().all() and 0 < relative(rounded, grads) <= 4 * bound(name, format), format
            assert (rounded_loss - loss).abs() <= 3 * BOUNDS[format], format
            assert torch.equal(rounded_loss, results[0][format][0]) and torch.equal(whole, results[0][format][2])


TRAIN = """--num-layers 2 --hidden-size 16 --mamba-state-dim 4 --mamba-head-dim 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 4 --train-iters 6 --log-interval 1 --lr 1e-2 --device cpu --data text.txt""".split()


@pytest.mark.full
@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("format", ("int8", pytest.param("fp16", marks=pytest.mark.full)))
def test_pretraining(ranks, tp, format, tmp_path, monkeypatch):
    """With `--reduce`, the losses are close but not equal to those of the exact run."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the state space model " * 60)

    def train(rank, reduce):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp)}
        files = ["--out", reduce, "--log", f"{reduce}.jsonl", "--reduce", reduce]
        pretrain(parse_options([*TRAIN, *files, "--tensor-model-parallel-size", str(tp)]))

    ranks(train, tp, "fp32")
    ranks(train, tp, format)
    exact, rounded = (
        [json.loads(line)["loss"] for line in Path(f"{reduce}.jsonl").read_text().splitlines()]
        for reduce in ("fp32", format)
    )
    assert len(rounded) == 6 and rounded != exact and rounded == pytest.approx(exact, abs=0.02)
    assert rounded[-1] < rounded[0] - 0.1
    assert megatron_ssm.load(format)(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


# Command lines


@cache
def json_report(directory, *flags):
    """The report of `generate --json` on two local ranks; asserts that stderr names only the kernels."""
    command = ["generate", "--model", directory, "--prompt", "abc", "--tp", "2"]
    done = completed([*command, "--ignore-eos", "--max-new-tokens", "6", "--json", *flags])
    line = rb"(all-reduce among 2 ranks: .*\n)?megatron-ssm: kernels .*\n"  # the first line if auto measures
    assert done.returncode == 0 and re.fullmatch(line, done.stderr), done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    save_hf(directory, "mamba2", vocab_size=300, num_hidden_layers=2)
    write_byte_tokenizer(directory)
    return directory


@pytest.mark.parametrize("format,block_output", [
    ("int8", 128 + 4 + 4),  # a padded block with its scale, and the sum of squares
    pytest.param("fp16", 2 * HIDDEN + 4, marks=pytest.mark.full),
    pytest.param("bf16", 2 * HIDDEN + 4, marks=pytest.mark.full),
    pytest.param("fp32", 4 * HIDDEN + 4, marks=pytest.mark.full),
])  # fmt: skip
def test_generate_reports_format_and_bytes(directory, format, block_output):
    """The bytes are those of the embedding, each layer's block output, and the greedy choice (a value and an id)."""
    report = json_report(directory, "--reduce", format)
    assert (report["reduce"], report["tp"], len(report["tokens"])) == (format, 2, 6)
    assert report["bytes_sent_per_token"] == 4 * HIDDEN + 2 * block_output + 4 * 2


@pytest.mark.full
def test_generate_with_auto(directory):
    report = json_report(directory, "--reduce", "auto")
    assert report["reduce"] == "auto" and report["bytes_sent_per_token"] > 4 * HIDDEN


def test_command_lines_with_unknown_formats(capsys):
    with pytest.raises(SystemExit) as left:
        __main__.parser().parse_args(["generate", "--model", "x", "--prompt", "y", "--reduce", "nonsense"])
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    assert "argument --reduce: invalid choice: 'nonsense' (choose from" in err

    with pytest.raises((SystemExit, ValueError)) as left:
        assert run("pretrain", lambda: parse_options([*TRAIN, "--out", "x", "--reduce", "nonsense"])) == 2
        raise SystemExit(2)
    assert left.value.code == 2 and "nonsense" in capsys.readouterr().err


@pytest.mark.full
@worlds
def test_two_shot_in_a_model(ranks, tp, oracle):
    """The prompt is so long that more than two ranks use the two-round all-reduce."""
    source = oracle("mamba2-1-group").directory
    ids = torch.randint(61, (2, 600), generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def logits(rank):
        found, calls = {}, {}
        for format in ("fp32", *LOSSY):
            model = megatron_ssm.load(source, dist.group.WORLD, reduce=format, shared_memory=False)
            found[format] = model(ids)
            calls[format] = model.counter.calls["all_to_all"]
        return found, calls

    (first, calls), *others = ranks(logits, tp)
    assert calls == {format: 4 * (tp > 2 and format != "fp32") for format in ("fp32", *LOSSY)}
    for format in LOSSY:
        assert all(torch.equal(other[format], first[format]) for other, _ in others)
        assert 0 < relative(first[format], first["fp32"]) <= BOUNDS[format]
