"""DeepSpeed's own checkpoints, in and out. Oracles: DeepSpeed, which loads ours and joins its own; torch's engine."""

import json
import os
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from chosen import by_default
from deepspeed_package import deepspeed

import megatron_ssm
import tiny
from benchmarks.support.launched import disks_work, small_disk
from commfabric.foundation.command_line import Failure
from commfabric.foundation.command_line import run as run_command
from fp32_runs import FP32, close, one_rank, run_of
from hf import save_hf, tensors_in
from megatron_ssm import families
from megatron_ssm.checkpoints.convert import convert
from megatron_ssm.checkpoints.deepspeed_files import read_deepspeed
from megatron_ssm.checkpoints.training import MOMENTS
from megatron_ssm.model.adapters import add_lora
from megatron_ssm.parallel.groups import initialize
from megatron_ssm.train.deepspeed_settings import read_settings
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pretraining import make_model, make_trainer, pretrain
from megatron_ssm.train.saving import checkpoint_to_resume
from megatron_ssm.train.trainer import SequenceLoss
from serving import attempt

__all__ = ["deepspeed"]
pytestmark = pytest.mark.usefixtures("deepspeed")  # imported before ranks are forked


def saved(tp, run, folder, steps=3):
    """A trainer in DeepSpeed's engine that has done some steps, and written DeepSpeed's checkpoint to FOLDER/deepspeed."""
    trainer = tiny.trainer_on(tp, run)
    tiny.curve(trainer, steps)
    trainer.write_own_format(folder, steps)
    return trainer


@pytest.mark.parametrize(
    "tp, dp", [(2, 2), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((1, 2), (2, 1)))]
)
@pytest.mark.parametrize("stage", by_default((0, 3), (0, 1, 2, 3)))
def test_deepspeed_loads_what_is_written(ranks, tmp_path, tp, dp, stage):
    """And goes on with the bitwise same curve."""
    run = run_of(stage, folder=tmp_path, save_deepspeed=True)

    def train(rank):
        straight = tiny.curve(saved(tp, run, tmp_path), 6, start=3)
        again = tiny.trainer_on(tp, run)
        again._engine.load_checkpoint(str(tmp_path / "deepspeed"))
        assert torch.equal(tiny.curve(again, 6, start=3), straight) and again._engine.global_steps == 6

    ranks(train, tp * dp)


@pytest.mark.parametrize(
    "tp, dp", [(2, 2), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((1, 2), (2, 1)))]
)
@pytest.mark.parametrize(
    "first, then",
    [
        pytest.param(0, "torch", marks=pytest.mark.full),
        pytest.param(1, 3, marks=pytest.mark.full),
        (2, "torch"),
        (3, 0),
    ],
)
def test_any_engine_goes_on(ranks, tmp_path, tp, dp, first, then):
    """On other ranks where there are several, with the moments."""
    before = run_of(first, folder=tmp_path, save_deepspeed=True, mamba_num_groups=2)
    after = run_of(then, **({} if then == "torch" else dict(folder=tmp_path)), mamba_num_groups=2)

    def go_on(rank):
        trainer = tiny.trainer_on(dp, after)
        trainer.load(tmp_path / "deepspeed", 3)
        return tiny.curve(trainer, 6, start=3)

    ranks(lambda rank: saved(tp, before, tmp_path) and None, tp * dp)
    assert close(ranks(go_on, tp * dp)[0], one_rank("mamba2 groups")[:, 3:6])


def test_ranks_that_resume_from_different_runs(ranks, tmp_path, monkeypatch, world=2):
    """Each has its own disk, with a folder of the same name and step."""
    for seed in (7, 8):
        (tmp_path / str(seed)).mkdir()
        run = run_of(1, folder=tmp_path, save_deepspeed=True, seed=seed, global_batch_size=world)
        ranks(lambda rank, run, folder: saved(1, run, folder) and None, world, run, tmp_path / str(seed))

    def load(rank):
        trainer = tiny.trainer_on(1, run_of("torch", global_batch_size=world))
        monkeypatch.chdir(tmp_path / ("8" if rank else "7"))
        differs = attempt(trainer.load, Path("deepspeed"), 3)
        return differs, attempt(trainer.load, tmp_path / "7" / "deepspeed", 3)

    for differs, same in ranks(load, world):
        assert differs[0] == "ValueError" and "rank 1 got 'deepspeed with files of CRC-32 " in differs[1]
        assert same is None


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", by_default((3,), (0, 1, 3)))
def test_frozen_parameters(ranks, tmp_path, tp, dp, stage):
    """Adapters beside frozen weights, and a hybrid's idle parameters."""
    run = run_of(stage, folder=tmp_path, save_deepspeed=True, **tiny.ZAMBA2_UNTIED)

    def adapted():
        groups, config = initialize(tp, "cpu"), families.from_dict(run.new_config(tiny.VOCAB, 0))
        model = make_model(run, config, groups, torch.device("cpu"))
        add_lora(model, 2, 4.0, ("in_proj",))
        return make_trainer(model, groups, run, read_settings(run, groups.data_ranks, config.hidden_size))

    def train(rank):
        trainer = adapted()
        tiny.curve(trainer, 1)
        trainer.write_own_format(tmp_path, 1)
        straight, again = tiny.curve(trainer, 2, start=1), adapted()
        again.load(tmp_path / "deepspeed", 1)
        assert torch.equal(tiny.curve(again, 2, start=1), straight)

    ranks(train, tp * dp)


# Weights


@pytest.mark.parametrize(
    "tp, dp", [(2, 2), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((1, 2), (2, 1)))]
)
@pytest.mark.parametrize("stage", by_default((1, 3), (0, 1, 2, 3)))
def test_conversion_to_hugging_face(ranks, tmp_path, tp, dp, stage):
    """The tensors of `megatron_ssm.save`, and of DeepSpeed's tool, which knows one model-parallel rank."""
    run = run_of(stage, folder=tmp_path, save_deepspeed=True, mamba_num_groups=2)

    def train(rank):
        trainer = saved(tp, run, tmp_path)
        with trainer.whole_parameters():
            megatron_ssm.save(trainer.model, tmp_path / "expected")

    ranks(train, tp * dp)
    rows = convert(tmp_path / "deepspeed", tmp_path / "found")
    found, expected = tensors_in(tmp_path / "found"), tensors_in(tmp_path / "expected")
    assert found.keys() == expected.keys() and {row.target for row in rows} == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "found" / "config.json").is_file()
    if tp == 1 and stage:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        theirs = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "deepspeed"))
        ours = read_deepspeed(tmp_path / "deepspeed").parts[0]
        assert all(
            torch.equal(ours[name]["model"], tensor) for name, tensor in theirs.items() if torch.is_tensor(tensor)
        )


def engine_of(module, stage, rank, world):
    """DeepSpeed's engine as in a loop of its users: one group of parameters, with padding between them in ZeRO 2."""
    import deepspeed

    os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    deepspeed.init_distributed("gloo")
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "parameter_alignment": stage == 2}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


@pytest.mark.parametrize("world", by_default((2,), (1, 2)))
@pytest.mark.parametrize("stage", (0, 2, 3))
def test_a_loop_of_ones_own(ranks, tmp_path, monkeypatch, deepspeed, world, stage):
    """Our model in it: the run that goes on has DeepSpeed's parameters and moments."""
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", {})  # so that it compiles nothing
    sizes = dict(hidden_size=24, mamba_head_dim=8)  # vectors of 6 elements, which ZeRO 2 pads

    def train(rank):
        theirs, ours = (tiny.trainer_on(1, run_of("torch", **sizes)) for _ in range(2))
        engine = engine_of(SequenceLoss(theirs.model), stage, rank, world)
        ids = torch.arange(13).view(1, 13) + rank
        engine.backward(engine(ids[:, :-1], ids[:, 1:]))
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        ours.load(tmp_path, 1)
        for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([q]) if stage == 3 else torch.no_grad():
                assert torch.equal(p, q)
            for name in MOMENTS:
                read = deepspeed.utils.safe_get_full_optimizer_state
                expected = read(q, name) if stage else engine.optimizer.state[q][name]
                assert expected.any() and torch.equal(ours.optimizer.state[p][name], expected.view_as(p))
            assert int(ours.optimizer.state[p]["step"]) == 1

    ranks(train, world)


@pytest.mark.full
@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("stage", (0, 2, 3))
def test_a_model_of_transformers(ranks, tmp_path, monkeypatch, deepspeed, world, stage):
    """Trained by DeepSpeed without us; as in the folders of transformers' Trainer, config.json lies above the checkpoint."""
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", {})  # so that it compiles nothing
    model = save_hf(tmp_path / "start", "mamba2", tie_word_embeddings=True, hidden_size=24, num_heads=6)

    def train(rank):
        engine = engine_of(model, stage, rank, world)
        ids = torch.arange(8).view(1, 8) + rank
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(str(tmp_path / "trained"))
        with deepspeed.zero.GatheredParameters(list(model.parameters())) if stage == 3 else torch.no_grad():
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = ranks(train, world)[0]
    shutil.copy(tmp_path / "start" / "config.json", tmp_path / "trained")
    convert(tmp_path / "trained", tmp_path / "found")
    found = tensors_in(tmp_path / "found")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert any(not torch.equal(found[name], tensor) for name, tensor in tensors_in(tmp_path / "start").items())


# What is refused


class Runs:
    """Unpickling this would run a command."""

    def __reduce__(self):
        return os.system, ("touch it-ran",)


class TakesAttribute:
    """Unpickling this would take the attribute of a class that a file may name."""

    def __reduce__(self):
        return getattr, (torch.Size, "count")


def change(path, **more):
    """Add contents to a file of DeepSpeed's."""
    contents = torch.load(path, weights_only=False)
    torch.save(contents | more, path)


def remove(path, name):
    """Remove contents from a file of DeepSpeed's."""
    contents = torch.load(path, weights_only=False)
    del contents[name]
    torch.save(contents, path)


def flip_a_bit(path):
    """In the first value of the largest tensor of a file of DeepSpeed's."""
    with zipfile.ZipFile(path) as file:
        largest = max(file.infolist(), key=lambda entry: entry.file_size)
        value = file.read(largest)[:32]
    content = bytearray(path.read_bytes())
    content[content.index(value, largest.header_offset)] ^= 1
    path.write_bytes(content)


def names_in_latest(text):
    return lambda folder: (folder / "latest").write_text(text)


def in_step(name, action):
    return lambda folder: action(folder / "global_step2" / name)


MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
BROKEN = {
    "cannot read .*model_states.pt: it holds an object of posix.system": in_step(MODEL, lambda p: change(p, more=Runs())),
    "cannot read .*model_states.pt: it calls getattr\\(<class 'torch.Size'>, 'count'\\), which is not a member of":
        in_step(MODEL, lambda p: change(p, more=TakesAttribute())),
    "cannot read .*optim_states.pt: ": in_step(OPTIMIZER, lambda p: os.truncate(p, p.stat().st_size // 2)),
    "cannot read .*optim_states.pt: it is damaged: .*/data/[0-9]+ does not have its checksum":
        in_step(OPTIMIZER, flip_a_bit),
    "lacks files: .* the optimizer states of 1 of 2 replicas": in_step(OPTIMIZER, Path.unlink),
    "lacks files: it holds the model states of 1 of 2 ranks": in_step(MODEL, lambda p: change(p, mp_world_size=2)),
    "latest names '../elsewhere', which is not a folder next to it": names_in_latest("../elsewhere"),
    "is damaged, or not of an AdamW in DeepSpeed 0.19 \\(KeyError: 'param_shapes'\\)":
        in_step(MODEL, lambda path: remove(path, "param_shapes")),
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory, ranks):
    """A checkpoint of two replicas with ZeRO 2."""
    folder = tmp_path_factory.mktemp("written")
    run = run_of(2, folder=folder, save_deepspeed=True)
    ranks(lambda rank: saved(1, run, folder, 2) and None, 2)
    return folder / "deepspeed"


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
def test_conversion_to_a_full_disk(written, tmp_path):
    """One line, and nothing of it remains."""
    with small_disk(tmp_path / "disk", 8) as disk:
        with pytest.raises(Failure, match=rf"^cannot save to {disk}/out: .*No space left on device"):
            convert(written, disk / "out")
        assert os.listdir(disk) == []


def test_files_as_python_3_11_2_writes_them(written, tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle the member of an Enum as getattr(class, name)."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    shutil.copytree(written, tmp_path / "deepspeed")
    (file,) = (tmp_path / "deepspeed").glob(f"*/{OPTIMIZER}")
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)))
    change(file)
    assert "builtins.getattr" in torch.serialization.get_unsafe_globals_in_checkpoint(file)
    found, expected = (read_deepspeed(folder).parts[0] for folder in (tmp_path / "deepspeed", written))
    assert all(torch.equal(found[name]["exp_avg"], each["exp_avg"]) for name, each in expected.items())


@pytest.mark.parametrize("message", BROKEN)
def test_broken_files(ranks, tmp_path, monkeypatch, written, message, world=2):
    """One error on every rank, and nothing that a file says is run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(written, "broken")
    BROKEN[message](Path("broken"))

    def load(rank):
        trainer = tiny.trainer_on(1, run_of("torch", global_batch_size=6))
        with pytest.raises(ValueError, match=message) as error:
            trainer.load(Path("broken"), 2)
        return str(error.value)

    errors = ranks(load, world)
    assert len(set(errors)) == 1 and "\n" not in errors[0] and errors[0].startswith("cannot resume from broken: ")
    with pytest.raises(ValueError, match=message):
        convert("broken")
    assert not Path("it-ran").exists()


OTHERS = {
    r"it has no layers\.2\.": dict(num_layers=3),
    r"layers\.1\..* is .* on rank 0 of 1; this model does not have it": dict(num_layers=1),
    r"embeddings\.weight is \(61, 16\) on rank 0 of 1; this model has \(61, 32\)": dict(hidden_size=32),
}


@pytest.mark.parametrize("message", OTHERS)
def test_another_model(ranks, written, message, world=2):
    def load(rank):
        with pytest.raises(ValueError, match=f"^cannot resume from .*: {message}"):
            tiny.trainer_on(1, run_of("torch", **OTHERS[message])).load(written, 2)

    ranks(load, world)


def test_an_unknown_order_of_moments(ranks, tmp_path, world=2):
    """With ZeRO 0, of a loop that is not ours: the weights can be converted."""
    run = run_of(0, folder=tmp_path, save_deepspeed=True)

    def load(rank):
        saved(1, run, tmp_path, 2)
        torch.distributed.barrier()
        if rank == 0:
            remove(tmp_path / "deepspeed" / "global_step2" / MODEL, "parameter_names")
        torch.distributed.barrier()
        with pytest.raises(ValueError, match="DeepSpeed does not say which parameters .*; begin with the weights: "):
            tiny.trainer_on(1, run_of("torch")).load(tmp_path / "deepspeed", 2)

    ranks(load, world)
    assert convert(tmp_path / "deepspeed")


# Whole runs

TINY = """--num-layers 2 --hidden-size 16 --mamba-state-dim 4 --mamba-head-dim 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 4 --train-iters 4 --log-interval 1 --device cpu --data text""".split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = random.Random(0)
    Path("text").mkdir()
    for name in "abc":
        Path("text", name).write_text(" ".join(words.choice(("the", "state", "space")) for _ in range(100)))
    Path("zero.json").write_text('{"zero_optimization": {"stage": 1}}')


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_a_run_goes_on_from_deepspeeds_folder(ranks, here, capfd, tp, dp):
    """Its learning rate and data go on too; checkpoints of an earlier run in --out are set aside. A line says what is not
    compared.
    """

    def run(*more):
        def on_rank(rank):
            os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(tp * dp), LOCAL_RANK=str(rank))
            pretrain(parse_options([*TINY, "--tensor-model-parallel-size", str(tp), *more]))

        ranks(on_rank, tp * dp)

    engine = ["--engine", "deepspeed", "--deepspeed-config", "zero.json", "--save-deepspeed"]
    run("--out", "straight", "--log", "straight.jsonl")
    run("--out", "theirs", "--log", "log.jsonl", *engine, "--exit-interval", "2")
    assert Path("theirs/deepspeed/latest").read_text() == "global_step2"
    run("--out", "out", "--train-iters", "1")
    run("--out", "out", "--log", "log.jsonl", "--resume", "theirs/deepspeed")
    lines = [Path(name).read_text().splitlines() for name in ("log.jsonl", "straight.jsonl")]
    ours, straight = ([json.loads(line)["loss"] for line in each] for each in lines)
    assert ours == pytest.approx(straight, abs=FP32) and len(ours) == 4
    assert [path.name for path in Path("out/checkpoints.old").iterdir()] == ["step-000001"]
    said = "theirs/deepspeed does not record the seed, batch sizes, sequence length and text of its run"
    assert capfd.readouterr().out.count(said) == 1


@pytest.mark.parametrize("tp, dp", [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_a_run_was_killed_while_it_replaced_the_folder(ranks, tmp_path, tp, dp):
    """The folder of before is left under another name: --resume takes it, and the next run renames it before it writes."""
    run = run_of(1, folder=tmp_path, save_deepspeed=True)
    folder, old = tmp_path / "deepspeed", tmp_path / "deepspeed.old"

    def cannot_write(*_):
        raise OSError("no room")

    def write(rank):
        trainer = saved(tp, run, tmp_path, 2)
        if rank == 0:
            folder.rename(old)
        torch.distributed.barrier()
        found = checkpoint_to_resume(str(folder), tmp_path / "checkpoints", {}, 9)
        torch.distributed.barrier()
        trainer._save_checkpoint = cannot_write
        with pytest.raises(Failure, match="no room"):
            trainer.write_own_format(tmp_path, 3)
        return found

    assert ranks(write, tp * dp) == [(old, 2)] * (tp * dp)
    assert not old.exists() and checkpoint_to_resume(str(folder), tmp_path / "checkpoints", {}, 9) == (folder, 2)


def test_a_folder_without_a_checkpoint(here, capsys):
    options = parse_options([*TINY, "--out", "out", "--resume", "text"])
    assert run_command("pretrain.py", lambda: pretrain(options)) == 2
    line = "--resume text is neither newest nor auto, nor a folder with a checkpoint of DeepSpeed's"
    assert line in capsys.readouterr().err


def test_the_option_needs_deepspeed():
    with pytest.raises(ValueError, match="^--save-deepspeed needs --engine deepspeed, not torch$"):
        tiny.options(save_deepspeed=True)
