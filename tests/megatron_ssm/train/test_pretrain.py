"""examples/pretrain.py as its users run it. Oracles: transformers, the run on one rank, the words of the contract."""

import errno
import json
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml
from chosen import by_default
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatron_ssm
import tiny  # noqa: F401  (imports Megatron once, for the forked ranks)
from commfabric.foundation.command_line import run
from hf import save_hf
from megatron_ssm.engine.text import load_tokenizer
from megatron_ssm.layers.families import FAMILIES
from megatron_ssm.train.batches import Batches, tokenize
from megatron_ssm.train.documents import read_documents, split_documents
from megatron_ssm.train.options import Options, parse_options
from megatron_ssm.train.pretraining import pretrain
from megatron_ssm.train.trainer import Trainer
from ranks import run_agent

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "pretrain.py"
KEYS = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s"}
TINY = """--num-layers 2 --hidden-size 16 --mamba-state-dim 4 --mamba-head-dim 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 4 --train-iters 4 --log-interval 1 --params-dtype float64 --device cpu""".split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with three documents in text/."""
    monkeypatch.chdir(tmp_path)
    words = random.Random(0)
    for name in "abc":
        Path("text").mkdir(exist_ok=True)
        text = " ".join(words.choice(("the", "state", "space", "überträgt")) for _ in range(100))
        Path("text", name).write_text(text)
    return tmp_path


def options(*more):
    """Options of a tiny run on text/ into out/, with a log."""
    return parse_options(["--data", "text", "--out", "out", "--log", "log.jsonl", *TINY, *more])


def logged(path="log.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def weights(folder="out"):
    return load_file(Path(folder, "model.safetensors"))


def torchrun(ranks, *arguments):
    """The script under torchrun, one thread per rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*command, "--", SCRIPT, *arguments], capture_output=True, text=True, timeout=120)


# A whole run


def forked(count, *arguments):
    """What the script prints on forked ranks that torchrun's agent starts."""

    def script():
        sys.argv = [str(SCRIPT), *arguments]
        sys.exit(
            runpy.run_path(str(SCRIPT))["main"]()
        )  # as its last lines do by os._exit, which the agent does not notice

    assert run_agent(script, count, Path.cwd())
    assert [Path(f"err-{rank}").read_text() for rank in range(count)] == [""] * count
    return "".join(Path(f"out-{rank}").read_text() for rank in range(count))


def launched(count, *arguments):
    """What the script prints under the command torchrun."""
    done = torchrun(count, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("started", [forked, pytest.param(launched, marks=pytest.mark.full)])
def test_under_torchrun(here, capsys, started):
    """Started on one rank, stopped after 2 of 4 steps, with a log as a killed run leaves it, and resumed on two."""
    pretrain(options("--lr", "1e-2", "--exit-interval", "2"))
    assert "leaving after step 2" in capsys.readouterr().out
    assert not Path("out", "config.json").exists()
    with open("log.jsonl", "a") as log:
        log.write('{"step": 3, "loss": 0.0}\n{"step": 4, "lo')
    Path("run.yaml").write_text(yaml.safe_dump({"tensor-model-parallel-size": 2, "train_iters": 9, "lr": "1e-2"}))
    said = started(2, "--config", "run.yaml", "--data", "text", "--out", "out", "--log", "log.jsonl", "--resume", *TINY)
    assert "2 tensor x 1 data-parallel ranks" in said
    assert "resuming out/checkpoints/step-000002" in said

    pretrain(options("--lr", "1e-2", "--out", "alone", "--log", "alone.jsonl"))
    for ours, alone in zip(logged(), logged("alone.jsonl"), strict=True):
        assert ours.keys() == alone.keys()
        assert {**ours, "tokens_per_s": 0} == pytest.approx({**alone, "tokens_per_s": 0}, abs=1e-10)
    for name, tensor in weights("alone").items():
        assert (weights()[name] - tensor).abs().max() <= 1e-10

    text = "the state 世界 <|endoftext|>"
    ids = AutoTokenizer.from_pretrained("out")(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == [*"the state 世界 ".encode(), 256]
    theirs = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)(ids).logits
    assert (megatron_ssm.load("out")(ids) - theirs).abs().max() <= 5e-5


@pytest.mark.full
@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize("family", ("mamba", "falcon_mamba", "zamba", "zamba2"))
def test_every_family(ranks, here, family, tp):
    """The losses of several ranks are those of one; transformers loads the result and gives the same logits."""
    flags = ["--model-type", family, "--shared-blocks", "2", "--hybrid-interval", "1", "--ffn-hidden-size", "24"]

    def train(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp)}
        pretrain(options("--tensor-model-parallel-size", str(tp), *flags))

    ranks(train, tp)
    pretrain(options("--out", "alone", "--log", "alone.jsonl", *flags))
    losses, alone = ([line["loss"] for line in logged(path)] for path in ("log.jsonl", "alone.jsonl"))
    assert losses == pytest.approx(alone, abs=1e-10)
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)(ids).logits
        assert (megatron_ssm.load("out")(ids) - theirs).abs().max() <= 5e-5


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.from_options])
def test_a_model_of_default_options(here, family):
    """transformers loads it, gives the same logits and generates the same tokens."""
    sizes = "--hidden-size 16 --mamba-state-dim 4 --mamba-head-dim 4 --seq-length 16 --micro-batch-size 1"
    rest = "--global-batch-size 2 --train-iters 2 --device cpu --data text --out out --model-type"
    more = ["--hybrid-override-pattern", "M*-"] if family == "nemotron_h" else []
    pretrain(parse_options([*sizes.split(), *rest.split(), family, *more]))
    theirs = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert (megatron_ssm.load("out")(ids) - theirs(ids).logits).abs().max() <= 5e-5
    tokens = theirs.double().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5)
    assert tokens.tolist() == megatron_ssm.load("out", dtype=torch.float64).generate(ids, max_new_tokens=5).tolist()
    assert tokens.shape == (2, 15)


def test_a_new_model_of_a_config_json(here):
    """--model-config takes every field from the file; --init-from is for a model that exists."""
    pretrain(options())
    pretrain(options("--model-config", "out/config.json", "--out", "again", "--hidden-size", "99"))
    assert all(torch.equal(tensor, weights()[name]) for name, tensor in weights("again").items())
    with pytest.raises(ValueError, match="--model-config is for a new model"):
        replace(options(), model_config="out/config.json", init_from="out")


@pytest.mark.parametrize("tp, dp", [pytest.param(1, 2, marks=pytest.mark.full), (2, 2)])
def test_replicas_write_one_log_and_one_model(ranks, here, tp, dp):
    def train(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp * dp)}
        pretrain(options("--tensor-model-parallel-size", str(tp)))

    ranks(train, tp * dp)
    pretrain(options("--out", "alone", "--log", "alone.jsonl"))
    losses, alone = ([line["loss"] for line in logged(path)] for path in ("log.jsonl", "alone.jsonl"))
    assert losses == pytest.approx(alone, abs=1e-10)
    for name, tensor in weights("alone").items():
        assert (weights()[name] - tensor).abs().max() <= 1e-10


@pytest.mark.full
@pytest.mark.parametrize("tp, cp", [(1, 3), pytest.param(2, 2, marks=pytest.mark.full)])
def test_a_run_goes_on_with_other_context_ranks(ranks, here, tp, cp):
    """A step on tensor x context ranks, in less memory, then one on one rank, and the last and the model as at first."""
    steps = "--train-iters", "3"

    def train(*more):
        def run(rank):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp * cp)}
            sizes = "--tensor-model-parallel-size", str(tp), "--context-parallel-size", str(cp)
            pretrain(options(*sizes, *steps, "--sequence-parallel", "--recompute-activations", *more))

        ranks(run, tp * cp)

    train("--exit-interval", "1")
    pretrain(options(*steps, "--resume", "--exit-interval", "1"))
    train("--resume")
    pretrain(options(*steps, "--out", "alone", "--log", "alone.jsonl"))
    losses, alone = ([line["loss"] for line in logged(path)] for path in ("log.jsonl", "alone.jsonl"))
    assert losses == pytest.approx(alone, abs=1e-10) and len(losses) == 3
    for name, tensor in weights("alone").items():
        assert (weights()[name] - tensor).abs().max() <= 1e-10


def test_one_command_begins_a_run_and_continues_it(here):
    """With --resume auto, also from YAML; --keep says how many checkpoints remain."""
    often = "--save-interval", "1", "--keep", "3"
    pretrain(options("--resume", "auto", "--exit-interval", "2", *often))
    assert sorted(path.name for path in Path("out/checkpoints").iterdir()) == ["step-000001", "step-000002"]
    Path("run.yaml").write_text("resume: auto")
    pretrain(options("--config", "run.yaml", *often))
    assert sorted(path.name for path in Path("out/checkpoints").iterdir()) == [f"step-00000{n}" for n in (2, 3, 4)]
    pretrain(options("--resume", "auto", *often))  # has done all its steps
    pretrain(options("--out", "straight", "--log", "straight.jsonl"))
    assert [line["loss"] for line in logged()] == [line["loss"] for line in logged("straight.jsonl")]
    for name, tensor in weights("straight").items():
        assert torch.equal(weights()[name], tensor)


@pytest.mark.full
@pytest.mark.parametrize("dp", [2, pytest.param(3, marks=pytest.mark.full)])
def test_sparse_gradients_are_resumed_bitwise(ranks, here, dp):
    """A checkpoint holds the gradients that have not been sent; fewer replicas, and a dense run, resume from it too."""
    sparse = ["--gradient-mode", "layerwise", "--gradient-density", "0.05", "--global-batch-size", "6"]
    sparse += ["--train-iters", "9", "--gradient-density-warmup", "3"]

    def train(count, *more):
        def run(rank):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
            pretrain(options(*sparse, *more))

        ranks(run, count)

    train(dp, "--out", "straight", "--log", "straight.jsonl")
    train(dp, "--exit-interval", "7")
    pending = [*Path("out").glob("checkpoints/*7/pending-tensor-0-of-1-replica-*.pt")]
    assert len(pending) == dp
    shutil.copytree("out", "elsewhere")
    train(dp, "--resume")
    for name, tensor in weights("straight").items():
        assert torch.equal(weights()[name], tensor)
    for count, more in ((dp - 1, ()), (1, ("--gradient-mode", "dense"))):
        shutil.copytree("elsewhere", "again", dirs_exist_ok=True)
        train(count, "--out", "again", "--log", "again.jsonl", "--resume", *more)
        assert logged("again.jsonl")[-1]["loss"] == pytest.approx(logged("straight.jsonl")[-1]["loss"], abs=0.2)
        shutil.rmtree("again")


def test_the_log_has_the_contracts_keys(here):
    pretrain(options("--log-interval", "2", "--lr-warmup-iters", "2", "--lr", "0.5", "--eval-interval", "3"))
    lines = logged()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # 3 is logged because it is evaluated
    assert [line["lr"] for line in lines] == [0.25, 0.5, 0.5, 0.25]
    assert [line["tokens"] for line in lines] == [64, 128, 192, 256]
    assert ["held_out_nats_per_byte" in line for line in lines] == [False, False, True, True]
    assert all(KEYS <= set(line) and line["tokens_per_s"] > 0 for line in lines)


def test_a_second_run_reports_that_it_overwrites(here, capsys):
    pretrain(options())
    assert "; writing out\n" in capsys.readouterr().out
    before, lines = weights(), logged()
    pretrain(options())
    assert "; overwriting out; its checkpoints replace those in out/checkpoints.old\n" in capsys.readouterr().out
    assert [line["loss"] for line in logged()] == [line["loss"] for line in lines]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights().items())
    assert os.listdir("out/checkpoints") == os.listdir("out/checkpoints.old") == ["step-000004"]
    pretrain(options("--train-iters", "3", "--save-interval", "1"))
    assert sorted(os.listdir("out/checkpoints")) == ["step-000002", "step-000003"]
    Path("out/checkpoints").rename("elsewhere")
    pretrain(options("--train-iters", "1"))
    assert "; overwriting out\n" in capsys.readouterr().out
    assert os.listdir("out/checkpoints.old") == ["step-000004"]  # no new checkpoints replace it


@pytest.mark.parametrize("world", by_default((2,), (2, 4)))
def test_only_rank_0_reads_the_folders_that_it_renames(ranks, here, monkeypatch, world):
    """A rank that is late would find a folder and then not read it."""
    pretrain(options())

    def read_late(directory):
        raise FileNotFoundError(directory)

    def overwrite(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        if rank:
            monkeypatch.setattr("megatron_ssm.train.pretraining.find_checkpoints", read_late)
        pretrain(options("--train-iters", "1"))

    ranks(overwrite, world)
    assert os.listdir("out/checkpoints.old") == ["step-000004"]


def killed(monkeypatch, at, *more):
    """A run that ends in step `at` as if it were killed."""

    class Killed(BaseException):
        pass

    def step(self, batches, step, whole=Trainer.step):
        if step + 1 == at:
            raise Killed
        return whole(self, batches, step)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Trainer, "step", step)
        pretrain(options(*more))


def test_a_killed_run_is_resumed_from_where_it_saved(here, monkeypatch, capsys):
    killed(monkeypatch, 4, "--save-interval", "2")
    pretrain(options("--resume"))
    assert "resuming out/checkpoints/step-000002" in capsys.readouterr().out
    resumed = weights()
    pretrain(options("--out", "alone"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights("alone").items())
    assert Options().save_interval > 0


def test_a_new_run_that_is_killed_leaves_no_checkpoint_of_an_earlier_run_to_resume(here, monkeypatch, capsys):
    pretrain(options("--lr", "1e-2"))
    killed(monkeypatch, 2)
    capsys.readouterr()
    found = refused(capsys, "--data", "text", "--out", "out", *TINY, "--resume")
    assert found == "nothing to resume: out/checkpoints holds no checkpoint"
    assert os.listdir("out/checkpoints.old") == ["step-000004"]


@pytest.mark.full
@pytest.mark.parametrize(
    "before, after, line",
    [
        ("", "--train-iters 6", "learning rate now decays over 6 steps, was 4\n"),
        ("--lr-decay-iters 8", "--train-iters 6 --lr-decay-iters 8", ""),
        ("--lr-decay-style constant", "--lr-decay-style constant --train-iters 6", ""),
    ],
)
def test_a_changed_length_of_the_decay_is_reported(here, capsys, before, after, line):
    pretrain(options("--exit-interval", "2", *before.split()))
    capsys.readouterr()
    pretrain(options("--resume", *after.split()))
    out = capsys.readouterr().out
    assert line in out and ("decays over" in out) == bool(line)


def test_a_full_disk_ends_with_1_and_one_line(here, capsys, monkeypatch):
    """Approximately: rank 0 cannot rename what it has written."""

    def refuse(path, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", refuse)
    assert run("pretrain.py", lambda: pretrain(options())) == 1
    line = "pretrain.py: cannot write out/checkpoints/step-000004: No space left on device\n"
    assert capsys.readouterr().err == line


def test_old_checkpoints_that_cannot_be_set_aside(here, capsys):
    pretrain(options())
    Path("out/checkpoints.old").touch()
    capsys.readouterr()
    assert run("pretrain.py", lambda: pretrain(options())) == 1
    line = "pretrain.py: cannot rename out/checkpoints to out/checkpoints.old: Not a directory\n"
    assert capsys.readouterr().err == line
    assert os.listdir("out/checkpoints") == ["step-000004"]


def test_resuming_a_finished_run_writes_the_model_again(here, capsys):
    pretrain(options())
    before, lines = weights(), logged()
    Path("out", "model.safetensors").unlink()
    pretrain(options("--resume"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights().items())
    assert logged() == lines


def test_one_document_is_trained_on_whole(here, capsys):
    pretrain(options("--data", "text/a"))
    size = Path("text/a").stat().st_size
    assert f"{size:,} bytes of text, nothing held out: one document" in capsys.readouterr().out
    assert [set(line) for line in logged()] == [KEYS] * 4


def test_held_out_text_of_its_own(here, capsys):
    pretrain(options("--data", "text/a", "--valid-data-path", "text/b", "text/c"))
    size = sum(Path("text", name).stat().st_size for name in "bc")
    assert f"{size:,} held out" in capsys.readouterr().out


# Tokenizers and models from elsewhere


def train_tokenizer(folder, text, **config):
    """A byte-level BPE tokenizer in `folder` that truncates texts to 8 tokens by default."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.enable_truncation(8)
    Path(folder).mkdir(exist_ok=True)
    tokenizer.save(str(Path(folder, "tokenizer.json")))
    Path(folder, "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", **config})
    )


@pytest.mark.parametrize("named", ("bpe", "bpe/tokenizer.json"))
def test_a_real_tokenizer_is_used_and_copied(here, named):
    text = Path("text/a").read_text()
    train_tokenizer("bpe", text, model_max_length=77)
    Path("out").mkdir()
    Path("out", "generation_config.json").write_text('{"eos_token_id": 5}')  # of an earlier run with other ids
    pretrain(options("--tokenizer-model", named, "--data", "text/a"))
    tokenizer = load_tokenizer("bpe")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert Path("out", name).read_bytes() == Path("bpe", name).read_bytes()
    assert not Path("out", "generation_config.json").exists()
    config = json.loads(Path("out", "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() > 257
    assert config["eos_token_id"] == tokenizer.token_to_id("<end>") == 0
    loaded = AutoTokenizer.from_pretrained("out")
    assert loaded.eos_token == "<end>" and loaded.decode(loaded(text[:30]).input_ids) == text[:30]
    agreed = json.loads(Path("out/checkpoints/step-000004/training.json").read_text())
    tokenizer.no_truncation()
    assert agreed["training_tokens"] == len(tokenizer.encode(text).ids) + 1


FROM = ("--init-from", "start", "--tokenizer-model", "byte", "--params-dtype", "float32")


@pytest.mark.parametrize("family", by_default(("mamba2",), ("mamba", "mamba2")))
def test_init_from_continues_a_model(here, family):
    """The first loss is the one that transformers computes; with lr 0 the model is saved unchanged."""
    theirs = save_hf("start", family, vocab_size=260, tie_word_embeddings=False)
    run = options(*FROM, "--lr", "0")
    pretrain(run)
    text = tokenize(split_documents(read_documents(["text"]), run.held_out, run.seed)[0], Bytes(), 256)
    inputs, labels = Batches(text, run.seq_length, run.global_batch_size, run.seed).batch(0)
    with torch.no_grad():
        loss = F.cross_entropy(theirs(inputs).logits.flatten(0, 1), labels.flatten()).item()
    assert logged()[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert all(torch.equal(tensor, weights("start")[name]) for name, tensor in weights().items())
    pretrain(options(*FROM, "--lr", "1e-3"))
    assert not any(torch.equal(tensor, weights("start")[name]) for name, tensor in weights().items())


class Bytes:
    """UTF-8 as a tokenizer."""

    def encode_batch(self, texts, add_special_tokens):
        return [SimpleNamespace(ids=list(text.encode())) for text in texts]


def test_init_from_uses_the_models_tokenizer(here):
    """Also if the output replaces the model."""
    save_hf("start", "mamba2", vocab_size=290)
    train_tokenizer("start", Path("text/a").read_text())
    before = Path("start", "tokenizer.json").read_bytes()
    pretrain(options("--init-from", "start", "--out", "start"))
    assert Path("start", "tokenizer.json").read_bytes() == before
    assert json.loads(Path("start/config.json").read_text())["vocab_size"] == 290


# Options


def test_the_command_line_overrides_the_yaml_file_and_that_the_defaults(here):
    lines = "data: text, out: out, lr: 3e-4, train-iters: 7, bf16: true, resume: yes, seq_length: 5"
    Path("run.yaml").write_text(lines.replace(", ", "\n") + "\nvalid_data_path: [a, b]")
    read = parse_options(["--config", "run.yaml", "--seq-length", "9", "--no-resume", "--data", "x", "y"])
    assert read == Options(data=("x", "y"), out="out", lr=3e-4, train_iters=7, bf16=True, resume="", seq_length=9,
                           valid_data_path=("a", "b"))  # fmt: skip


def test_the_help_says_which_options_need_cuda():
    """Not the whole engine megatron, which runs on CPUs, too."""
    needing = [option.name for option in fields(Options) if "CUDA" in option.metadata["help"]]
    assert needing == ["use_distributed_optimizer"]


def refused(capsys, *arguments):
    """The one line on stderr of a command that ends with 2."""
    try:
        parsed = parse_options(list(arguments))
        code = run("pretrain.py", lambda: pretrain(parsed))
    except SystemExit as leave:
        code = leave.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("pretrain.py: ") and len(err.splitlines()) == 1
    return err[len("pretrain.py: ") : -1]


@pytest.mark.parametrize(
    "line, message",
    [
        ("--hidden-sise 3", "unknown argument --hidden-sise (did you mean --hidden-size?)"),
        ("--async-save false", "unknown argument false: --async-save takes no value"),
        ("--hidden 3", "unknown argument --hidden (did you mean --hidden-size?)"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        ("--out out", "--data is required"),
        ("--data text", "--out is required"),
        ("--data text --out out --context-parallel-size 0", "--context-parallel-size 0 must be at least 1"),
        ("--data text --out out --save-interval -1", "--save-interval -1 must be at least 0"),
        ("--data text --out out --clip-grad -0.5", "--clip-grad -0.5 must be at least 0"),
        ("--data text --out out --lr nan", "--lr nan must be at least 0"),
        ("--data text --out out --lr inf", "--lr inf must be at least 0 and finite"),
        (f"--data text --out out --train-iters {10**30}", f"--train-iters {10**30} must be at least 1 and below 2^31"),
        ("--data text --out out --adam-beta2 1.0", "--adam-beta2 1.0 must be at least 0 and below 1"),
        ("--data text --out out --lr 0.1 --min-lr 0.2", "--min-lr 0.2 is above --lr 0.1"),
        ("--data text --out out --train-iters 1 --lr-warmup-iters 100 --lr-decay-iters 100",
         "--lr-warmup-iters 100 is not below --lr-decay-iters 100"),
        ("--data text --out out --train-iters 1 --bf16 --params-dtype float64",
         "--bf16 does not compute with float64 parameters: --params-dtype float32"),
        ("--data text --out out --gradient-density 1.5", "--gradient-density 1.5 must be above 0 and at most 1"),
        ("--data text --out out --seed 18446744073709551616", "--seed 18446744073709551616 is not a 64-bit integer"),
        *[(f"--data text --out out --train-iters 1 --model-type {family} {more}",
           f"--model-type {family} needs the shared block in at least {least} blocks; {found}")
          for family, least, more, found in (
              ("zamba", 2, "--num-layers 5 --hybrid-interval 3", "--num-layers 5 with --hybrid-interval 3 has it in 1"),
              ("zamba2", 1, "--hybrid-interval 3", "--num-layers 2 with --hybrid-interval 3 has it in 0"),
          )],
        ("--data text --out out --train-iters 1 --model-type gpt",
         "model type 'gpt' is not supported (supported: mamba, falcon_mamba, mamba2, zamba, zamba2, nemotron_h, "
         "granitemoehybrid, bamba, falcon_h1, jamba, qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text, qwen3_next, "
         "olmo_hybrid)"),
        *[(f"--data text --out out --train-iters 1 --hybrid-override-pattern ME --num-experts 4 {more}", message)
          for more, message in (
              ("--moe-router-topk 5", "--moe-router-topk 5 is more than --num-experts 4"),
              ("--moe-router-num-groups 2 --moe-router-group-topk 3",
               "--moe-router-group-topk 3 is more than --moe-router-num-groups 2"),
          )],
        ("--config none.yaml", "cannot read --config none.yaml: No such file or directory"),
        ("--config text", "cannot read --config text: Is a directory"),
    ],
)  # fmt: skip
def test_wrong_flags(here, capsys, line, message):
    assert refused(capsys, *line.split()) == message


@pytest.mark.parametrize(
    "text, message",
    [
        ("hiden_size: 3", "run.yaml: unknown option hiden_size (did you mean hidden_size?)"),
        ("save: out", "run.yaml: save is a flag of Megatron or DeepSpeed; here: --out"),
        ("fp16: true", "run.yaml: fp16 is a flag of Megatron or DeepSpeed; here: refused: use --bf16"),
        ("lr: fast", "run.yaml: lr: 'fast' is not a number"),
        ("seed: 0x1" + "0" * 5000 + "\ndata: x\nout: y", f"--seed 0x1{'0' * 57}... is not a 64-bit integer"),
        ("train-iters: 2.5", "run.yaml: train-iters: 2.5 is not a whole number"),
        ("train-iters: true", "run.yaml: train-iters: True is not a whole number"),
        ("bf16: 1", "run.yaml: bf16: 1 is not true or false"),
        ("log:", "run.yaml: log: None is not text"),
        ("data: [a, [b]]", "run.yaml: data: ['b'] is not text"),
        ("device: gpu", "run.yaml: device: 'gpu' is not one of cpu, cuda"),
        ("[1, 2]", "run.yaml holds no options"),
        ("a: b: c", "run.yaml is not YAML: mapping values are not allowed here"),
        ("seed: 2024-99-99", "run.yaml is not YAML: "),
        ("[" * 100_000, "run.yaml is not YAML: "),
    ],
)
def test_wrong_yaml(here, capsys, text, message):
    Path("run.yaml").write_text(text)
    assert refused(capsys, "--config", "run.yaml").startswith(message)


SHAPED = "--hidden-size, --mamba-state-dim, --mamba-head-dim"  # by TINY


@pytest.mark.parametrize("world", (1, 2))
def test_ignored_options_are_said(ranks, here, capfd, world):
    """Not those that have one, nor those that are not given."""

    def said(*more):
        def train(rank):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
            pretrain(options("--train-iters", "1", *more))

        ranks(train, world)
        return [line for line in capfd.readouterr().out.splitlines() if line.startswith("ignored: ")]

    assert said("--min-lr", "1e-4", "--lr-decay-iters", "9") == []
    sparse = "--gradient-mode", "layerwise", "--gradient-density", "0.5"
    alone = ["ignored: --gradient-mode, --gradient-density (no other rank has gradients to average)"]
    constant = "--lr-decay-style", "constant", "--min-lr", "1e-4", "--lora-targets", "in_proj", "x_proj"
    assert sorted(said(*constant, *sparse)) == [
        *(alone if world == 1 else []),
        "ignored: --lora-targets (there is no --lora-rank)",
        "ignored: --min-lr (--lr-decay-style is constant)",
    ]
    dense = "--gradient-mode is dense" if world == 2 else "no other rank has gradients to average"
    shape = f"ignored: {SHAPED} (--model-config says the shape of the model)"
    assert sorted(said("--gradient-density", "0.5", "--model-config", "out/config.json", "--out", "again")) == [
        f"ignored: --gradient-density ({dense})",
        shape,
    ]
    adapters = "--init-from", "out", "--out", "next", "--lora-rank", "2", "--lora-alpha", "2"
    assert said(*adapters) == [shape.replace("--model-config", "--init-from")]


def readme_commands():
    """The words of each command of the README that runs the script."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if "examples/pretrain.py" in line]


def test_the_commands_of_the_readme_would_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert readme_commands()
    for words in readme_commands():
        script = words.index("examples/pretrain.py")
        launcher = " ".join(words[:script]).replace("=", " ").split()
        ranks = int(launcher[launcher.index("--nproc-per-node") + 1]) if "--nproc-per-node" in launcher else 1
        read = parse_options(words[script + 1 :])
        assert ranks % read.tensor_model_parallel_size == 0, words
        assert read.accumulation(ranks // read.tensor_model_parallel_size) >= 1, words


# Errors before training begins


def latin():
    Path("text/d").write_bytes(b"caf\xe9")


def short():
    Path("text/a").write_text("short")


def file_instead_of_a_folder():
    Path("file").write_text("")


def file_instead_of_checkpoints():
    Path("out").mkdir()
    Path("out/checkpoints").touch()


def small_model():
    save_hf("start", "mamba", vocab_size=100)


def nothing():
    pass


@pytest.mark.parametrize(
    "prepare, launched, line, message",
    [
        (nothing, 1, "--data none", "cannot read none: No such file or directory"),
        (latin, 1, "", "text/d is not UTF-8: byte 0xe9 at byte offset 3"),
        (short, 1, "--data text/a",
         "the training data has 6 tokens, and one sequence of 16 with its last label needs 17"),
        (file_instead_of_a_folder, 1, "--out file/out", "cannot write to --out file/out: Not a directory"),
        (file_instead_of_checkpoints, 1, "", "cannot write to --out out/checkpoints: File exists"),
        (file_instead_of_a_folder, 1, "--log file/log", "cannot write to --log file/log: File exists"),
        (nothing, 1, "--log text", "cannot write to --log text: Is a directory"),
        (nothing, 1, "--resume", "nothing to resume: out/checkpoints holds no checkpoint"),
        (nothing, 3, "--tensor-model-parallel-size 2",
         "3 ranks do not divide over replicas of 2 tensor-parallel ranks (3 % 2 = 1)"),
        (nothing, 3, "--expert-model-parallel-size 2",
         "3 ranks / 1 tensor-parallel ranks are not a multiple of 2 expert-parallel ranks (3 % 2 = 1)"),
        (nothing, 1, "--mamba-head-dim 5", "6 heads of 5 are 30 channels, not expand * hidden_size = 32"),
        (nothing, 3, "",
         "--global-batch-size 4 is not a multiple of --micro-batch-size 1 x 3 data-parallel ranks (4 % 3 = 1)"),
        (nothing, 1, "--held-out 1.5", "the held-out share is 1.5, not between 0 and 1"),
        (nothing, 1, "--tokenizer-model none", "no tokenizer: none/tokenizer.json does not exist"),
        (nothing, 1, "--init-from none", "no tokenizer: none/tokenizer.json does not exist"),
        (small_model, 1, "--init-from start --tokenizer-model byte",
         "the tokenizer is larger than the model: 257 ids, vocab_size 100"),
    ],
)  # fmt: skip
def test_wrong_input(here, capsys, monkeypatch, prepare, launched, line, message):
    """Alone; with several launched ranks, what follows from the options is found before the ranks are joined."""
    prepare()
    capsys.readouterr()
    monkeypatch.setenv("WORLD_SIZE", str(launched))
    assert refused(capsys, "--data", "text", "--out", "out", *TINY, *line.split()) == message


@pytest.mark.parametrize(
    "line, message",
    [
        ("--global-batch-size 8", "it has global_batch_size=4, this run 8"),
        ("--seq-length 8", "it has seq_length=16, this run 8"),
        ("--seed 1", "it has seed=1234, this run 1"),
        ("--num-layers 3", "it has num_layers=2, this run 3"),
        ("--params-dtype float32", "it has params_dtype='float64', this run 'float32'"),
        ("--data text/a text/b", "it has training_t"),
    ],
)
def test_another_run_is_not_resumed(here, capsys, line, message):
    pretrain(options("--train-iters", "1"))
    capsys.readouterr()
    found = refused(capsys, "--data", "text", "--out", "out", *TINY, "--resume", *line.split())
    assert found.startswith(f"cannot resume from out/checkpoints/step-000001: {message}")


def test_a_run_that_has_more_steps_is_not_resumed(here, capsys):
    pretrain(options("--train-iters", "3"))
    capsys.readouterr()
    found = refused(capsys, "--data", "text", "--out", "out", *TINY, "--resume", "--train-iters", "2")
    assert found == "out/checkpoints/step-000003 has done 3 steps, more than --train-iters 2"


def test_a_loss_that_is_not_finite_ends_with_1_and_one_line(here, capsys):
    assert run("pretrain.py", lambda: pretrain(options("--lr", "1e200", "--max-skipped-steps", "0"))) == 1
    err = capsys.readouterr().err
    assert err.startswith("pretrain.py: step 2: loss nan, ") and len(err.splitlines()) == 1
    assert [line["step"] for line in logged()] == [1]


def test_parameters_that_are_not_finite_are_not_saved(here, capsys):
    """The only step is applied and overflows them; the next one is skipped, and with it the run would end."""
    overflow = "--lr", "1e200", "--params-dtype", "float32"
    assert run("pretrain.py", lambda: pretrain(options(*overflow, "--train-iters", "2"))) == 1
    line = "pretrain.py: step 2: parameters are not finite, so they are not saved; earlier checkpoints remain\n"
    assert capsys.readouterr().err == line and not Path("out/config.json").exists()


@pytest.mark.parametrize("interval, steps", [("0", 3), ("2", 2)])
def test_a_run_that_skips_all_of_its_steps_fails(here, capsys, interval, steps):
    """It overflows in its first forward pass."""
    pretrain(options("--train-iters", "1", "--params-dtype", "float32"))
    model = {name: tensor * 1e30 for name, tensor in weights().items()}
    save_file(model, "out/model.safetensors", metadata={"format": "pt"})
    flags = "--init-from", "out", "--out", "next", "--params-dtype", "float32", "--train-iters", "3"
    assert run("pretrain.py", lambda: pretrain(options(*flags, "--exit-interval", interval))) == 1
    line = f"pretrain.py: step {steps}: all steps of this run were skipped ({steps}), so nothing is saved\n"
    assert capsys.readouterr().err == line
    assert not Path("next/config.json").exists() and not list(Path("next/checkpoints").glob("step-*"))


# In a process of its own


def script(*arguments, **environment):
    """The script alone: (exit code, stdout, stderr)."""
    command, environment = [sys.executable, SCRIPT, *arguments], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_an_error_is_all_that_the_script_prints(here):
    code, out, err = script("--data", "none", "--out", "out")
    assert (code, out, err) == (2, "", "pretrain.py: cannot read none: No such file or directory\n")


def test_tasks_of_a_launcher_that_are_no_ranks(here):
    """Each of two processes would train alone."""
    code, out, err = script("--data", "none", "--out", "out", OMPI_COMM_WORLD_SIZE="2")
    assert (code, out) == (2, "") and err.startswith("pretrain.py: there are 2 ranks (")
    assert err.count("\n") == 1 and "RANK is not set" in err


@pytest.mark.full
def test_other_ranks_are_silent(here):
    assert script("--data", "none", "--global-batch-size", "3", RANK="1", WORLD_SIZE="2") == (2, "", "")


def test_an_error_on_all_ranks_is_printed_once(here):
    """torchrun adds its own report of the exit codes."""
    done = torchrun(2, "--no-such-flag")
    assert done.stderr.count("pretrain.py: ") == 1
    assert "pretrain.py: unknown argument --no-such-flag" in done.stderr


@pytest.mark.parametrize("arguments", (["--help"], ["--no-such-flag"], ["--config", "none.yaml"]))
def test_help_and_wrong_flags_import_no_torch(here, arguments):
    program = "import runpy, sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); " + (
        f"sys.argv = {['pretrain.py', *arguments]}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if arguments == ["--help"] else 2)
    assert done.stdout.splitlines()[-1] == "False"
