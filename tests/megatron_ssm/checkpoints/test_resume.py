"""Resumable checkpoints. Oracles: a run that was never interrupted, and torch's own reader of such checkpoints."""

import errno
import functools
import json
import os
import pickle
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from chosen import by_default
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import tiny
from commfabric.foundation.command_line import Failure
from megatron_ssm.checkpoints.folders import find_checkpoints, newest_checkpoint, rename_to_damaged, rename_to_old
from megatron_ssm.checkpoints.training import MOMENTS, Snapshot, load_training

EXACT = 1e-10
HALF = tiny.STEPS // 2
MODELS = {
    "mamba": dict(model_type="mamba"),
    "mamba2": {},
    "mamba2 untied": dict(untie_embeddings_and_output_weights=True),
    "mamba2 groups": dict(mamba_num_groups=2),
    "mamba2 groups untied": dict(mamba_num_groups=2, untie_embeddings_and_output_weights=True),
    "zamba": tiny.ZAMBA,
    "zamba2 untied": tiny.ZAMBA2_UNTIED,
}
RUN_SETTINGS = {"global_batch_size": 4, "vocab_size": tiny.VOCAB}


def options(**changes):
    """The options of a tiny run with one layer, with `changes`."""
    return tiny.options(**{"num_layers": 1, **changes})


def training_state(trainer):
    """{name: tensor} of this rank's parameters, both moments and the optimizer's step counts."""
    state = trainer.optimizer.state
    held = {name: {"model": p.detach().clone(), **state[p]} for name, p in trainer.model.named_parameters()}
    return {f"{kind}.{name}": tensor for name, kinds in held.items() for kind, tensor in kinds.items()}


def save_after(trainer, step, directory, vocab=tiny.VOCAB):
    """Train to a step and save a checkpoint; returns the curve up to it."""
    curve = tiny.curve(trainer, step, vocab=vocab)
    Snapshot.of(directory, step, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
    return curve


def resume(trainer, directory):
    """Fill a trainer's parameters with NaN, then load the newest checkpoint; returns its step."""
    path, step = newest_checkpoint(directory, RUN_SETTINGS)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(float("nan"))
    load_training(path, step, trainer.model, trainer.optimizer)
    return step


def assert_same(ours, theirs):
    """Assert that all entries are bitwise equal."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


# The same layout: bitwise


@pytest.mark.parametrize("model", by_default(("mamba2 untied",), ("mamba", "mamba2 untied", "zamba2 untied")))
def test_resuming_on_one_rank_is_bitwise(tmp_path, model):
    run = options(**MODELS[model])
    uninterrupted = tiny.trainer(run)
    save_after(uninterrupted, HALF, tmp_path)
    rest = tiny.curve(uninterrupted, start=HALF)
    resumed = tiny.trainer(run)
    assert resume(resumed, tmp_path) == HALF
    assert torch.equal(tiny.curve(resumed, start=HALF), rest)
    assert_same(training_state(resumed), training_state(uninterrupted))


def check_bitwise(ranks, tmp_path, tp, dp, model):
    """Train half of the steps, save, and train the others; repeat these from the checkpoint in new processes."""
    run = options(**MODELS[model], global_batch_size=2 * dp)

    def uninterrupted(rank):
        trainer = tiny.trainer_on(tp, run)
        save_after(trainer, HALF, tmp_path)
        return tiny.curve(trainer, start=HALF), training_state(trainer)

    def resumed(rank):
        trainer = tiny.trainer_on(tp, run)
        assert resume(trainer, tmp_path) == HALF
        return tiny.curve(trainer, start=HALF), training_state(trainer)

    for (curve, ours), (other, theirs) in zip(ranks(uninterrupted, tp * dp), ranks(resumed, tp * dp), strict=True):
        assert torch.equal(curve, other)
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    "tp, dp, model",
    [
        (2, 1, "mamba2 groups untied"),
        (1, 2, "mamba2"),
        (2, 2, "mamba"),
        pytest.param(1, 3, "mamba2 untied", marks=pytest.mark.full),
        pytest.param(2, 1, "zamba2 untied", marks=pytest.mark.full),
    ],
)
def test_resuming_is_bitwise(ranks, tmp_path, tp, dp, model):
    check_bitwise(ranks, tmp_path, tp, dp, model)


@pytest.mark.full
@pytest.mark.parametrize("tp, dp", [(2, 1), (1, 2), (2, 2), (4, 1), (4, 2), (1, 3), (2, 3), (1, 4)])
@pytest.mark.parametrize("model", MODELS)
def test_resuming_is_bitwise_in_every_layout(ranks, tmp_path, tp, dp, model):
    check_bitwise(ranks, tmp_path, tp, dp, model)


def test_the_random_state_comes_back(ranks, tmp_path, tp=2):
    def save(rank):
        trainer = tiny.trainer_on(tp, options())
        torch.manual_seed(5)
        save_after(trainer, 1, tmp_path)
        return torch.rand(3)

    def load(rank):
        resume(tiny.trainer_on(tp, options()), tmp_path)
        return torch.rand(3)

    for before, after in zip(ranks(save, tp), ranks(load, tp), strict=True):
        assert torch.equal(before, after)


# Another layout


@functools.cache
def one_rank_curve(model, vocab):
    """The oracle: the curve on one rank, with the whole batch in one micro batch."""
    return tiny.curve(tiny.trainer(options(**MODELS[model], micro_batch_size=4), vocab=vocab), vocab=vocab)


def check_another_layout(ranks, directory, before, tp, dp, model, vocab):
    """Train half of the steps in the layout `before`, save, and the rest as tp x dp: the curve must be that of one rank."""
    run = options(**MODELS[model])

    def start(rank):
        return save_after(tiny.trainer_on(before[0], run, vocab), HALF, directory, vocab)

    def end(rank):
        trainer = tiny.trainer_on(tp, run, vocab)
        return tiny.curve(trainer, start=resume(trainer, directory), vocab=vocab)

    first, second = ranks(start, before[0] * before[1]), ranks(end, tp * dp)
    for half, curve in zip((first, second), one_rank_curve(model, vocab).split(HALF, dim=1), strict=True):
        assert all(torch.equal(other, half[0]) for other in half)
        assert (half[0] - curve).abs().max() <= EXACT


@pytest.mark.parametrize(
    "before, tp, dp, model, vocab",
    [
        ((2, 1), 1, 1, "mamba2 groups", 61),
        pytest.param((2, 1), 4, 1, "mamba2 groups untied", 61, marks=pytest.mark.full),
        ((2, 1), 4, 1, "mamba", 9),  # 5 + 4 rows of the vocabulary, then 3 + 3 + 3 + 0
        ((4, 1), 2, 2, "mamba2 untied", 9),
        pytest.param((2, 1), 4, 1, "zamba", 61, marks=pytest.mark.full),
        pytest.param((1, 1), 2, 1, "zamba2 untied", 9, marks=pytest.mark.full),
    ],
)
def test_another_layout(ranks, tmp_path, before, tp, dp, model, vocab):
    check_another_layout(ranks, tmp_path, before, tp, dp, model, vocab)


@pytest.mark.full
@pytest.mark.parametrize("before", [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("model", ("mamba", "mamba2", "mamba2 groups untied"))
def test_every_other_layout(ranks, tmp_path, before, tp, dp, model):
    check_another_layout(ranks, tmp_path, before, tp, dp, model, vocab=9)


# What a checkpoint holds


@pytest.mark.parametrize(
    "tp, dp, model, vocab",
    [
        (2, 2, "mamba", 61),
        pytest.param(4, 1, "mamba2 groups", 61, marks=pytest.mark.full),
        (4, 1, "mamba2 untied", 2),
        (2, 1, "zamba2 untied", 61),
        pytest.param(4, 1, "zamba", 61, marks=pytest.mark.full),
    ],
)
def test_entries_are_whole_and_unpadded(ranks, tmp_path, tp, dp, model, vocab):
    """Each field and moment has one entry of its whole shape; each element is written once; torch reads them."""
    run = options(**MODELS[model])
    fields = [parameter.field for parameter in tiny.trainer(run, vocab=vocab).model.parameters()]

    def save(rank):
        trainer = tiny.trainer_on(tp, run, vocab)
        save_after(trainer, 2, tmp_path, vocab)
        return training_state(trainer)

    held = ranks(save, tp * dp)
    entries = dcp.FileSystemReader(tmp_path / "step-000002").read_metadata().state_dict_metadata
    kinds = ("model", *MOMENTS)
    shapes = {
        f"{kind}.{f.name}": f.shape for kind in kinds for f in fields if kind == "model" or ".idle." not in f.name
    }
    assert {name: tuple(entry.size) for name, entry in entries.items() if name != "rng"} == shapes
    for name, shape in shapes.items():
        written = torch.zeros(shape)
        for chunk in entries[name].chunks:
            written[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert (written == 1).all(), name

    read = {name: torch.full(shape, float("nan"), dtype=torch.float64) for name, shape in shapes.items()}
    dcp.load(read, checkpoint_id=tmp_path / "step-000002", no_dist=True)
    for kind in kinds:
        names = [field.name for field in fields if f"{kind}.{field.name}" in shapes]
        pieces = [{name: rank[f"{kind}.{name}"] for name in names} for rank in held]
        for name, whole in tiny.assembled(pieces, fields, tp).items():
            assert torch.equal(read[f"{kind}.{name}"], whole), name


def test_old_checkpoints_are_removed(tmp_path):
    trainer = tiny.trainer(options())
    tiny.curve(trainer, 1)

    def names(step):
        Snapshot.of(tmp_path, step, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
        return sorted(os.listdir(tmp_path), key=lambda name: int(name[5:]))

    assert names(999_999) == ["step-999999"]
    assert names(999_999) == ["step-999999"]
    assert names(1_000_000) == ["step-999999", "step-1000000"]
    assert names(1_000_001) == ["step-1000000", "step-1000001"]
    assert names(5) == ["step-000005", "step-1000001"]  # the newly written one is kept


@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
def test_an_old_checkpoint_that_cannot_be_removed(ranks, tmp_path, monkeypatch, caplog, world):
    """As if a file of it were open on another machine. Rank 0 says so, and a later save removes what is left."""
    rmtree, run = shutil.rmtree, options(global_batch_size=2 * world)

    def refuse(path, ignore_errors=False, **more):
        if Path(path).name != ".step-000001":
            rmtree(path, ignore_errors, **more)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    def save(rank, *steps):
        trainer = tiny.trainer_on(1, run)
        tiny.curve(trainer, 1)
        for step in steps:
            Snapshot.of(tmp_path, step, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
        return [record.message for record in caplog.records if record.name == "megatron_ssm"]

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        said = ranks(save, world, 1, 2, 3)
    line = f"cannot remove the old checkpoint {tmp_path / 'step-000001'}: Directory not empty"
    assert said == [[line], *[[]] * (world - 1)]
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    ranks(save, world, 4)
    assert sorted(os.listdir(tmp_path)) == ["step-000003", "step-000004"]


def test_checkpoints_are_set_aside(tmp_path):
    directory, old = tmp_path / "checkpoints", tmp_path / "checkpoints.old"
    for name in ("first", "second"):
        (directory / "step-000001").mkdir(parents=True)
        (directory / "step-000001" / "training.json").write_text(name)
        rename_to_old(directory)
        assert not directory.exists()
        assert (old / "step-000001" / "training.json").read_text() == name
    directory.mkdir()
    rename_to_old(directory)
    assert directory.exists() and find_checkpoints(old)


def test_files_with_the_names_of_folders_are_replaced(tmp_path):
    """A link that has the name of a checkpoint is removed too, and the folder that it names remains."""
    trainer, elsewhere = tiny.trainer(options()), tmp_path / "elsewhere"
    tiny.curve(trainer, 1)
    elsewhere.mkdir()
    (tmp_path / "step-000001").touch()
    (tmp_path / "step-000002").symlink_to(elsewhere)
    (tmp_path / "step-000001.damaged").touch()
    for step in (1, 2):
        Snapshot.of(tmp_path, step, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
    assert find_checkpoints(tmp_path) == [tmp_path / "step-000001", tmp_path / "step-000002"] and elsewhere.is_dir()
    rename_to_damaged(tmp_path / "step-000001")
    assert (tmp_path / "step-000001.damaged" / "training.json").is_file()


# What cannot be written


def in_the_way(directory):
    directory.touch()


def refuse_to_rename(path, target):
    raise OSError(errno.EROFS, "Read-only file system")


def no_final_name(directory):
    """In this process, which is a fork."""
    Path.rename = refuse_to_rename


def no_room_on_this_rank(directory):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("tp, dp", [(2, 1), (1, 2)])
@pytest.mark.parametrize("spoil", (in_the_way, no_final_name, no_room_on_this_rank))
def test_what_one_rank_cannot_write_ends_every_rank(ranks, tmp_path, tp, dp, spoil):
    """Rank 0 cannot create or rename the folder, or the file of the last rank is too large."""
    directory = tmp_path / "checkpoints"

    def save(rank):
        trainer = tiny.trainer_on(tp, options(hidden_size=32))
        tiny.curve(trainer, 1)
        if rank == (tp * dp - 1 if spoil is no_room_on_this_rank else 0):
            spoil(directory)
        with pytest.raises(Failure) as error:
            Snapshot.of(directory, 1, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
        return str(error.value)

    lines = ranks(save, tp * dp)
    assert len(set(lines)) == 1
    assert lines[0].startswith(f"cannot write {directory}/step-000001: ") and len(lines[0].splitlines()) == 1
    assert find_checkpoints(directory) == []


@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
def test_ranks_that_do_not_share_the_directory(ranks, tmp_path, world):
    """As if each had its own disk: each rank writes its file, and rank 0 finds only its own."""

    def save(rank):
        trainer = tiny.trainer_on(1, options(global_batch_size=2 * world))
        tiny.curve(trainer, 1)
        with pytest.raises(Failure) as error:
            Snapshot.of(tmp_path / str(rank), 1, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
        return str(error.value)

    lines = ranks(save, world)
    assert all("rank 0 does not find all ranks' files" in line and "_0.distcp" in line for line in lines)
    assert len({line.partition(": ")[2] for line in lines}) == 1
    assert all(os.listdir(tmp_path / str(rank)) == [] for rank in range(world))


def test_an_interrupted_removal_leaves_no_checkpoint(tmp_path, monkeypatch):
    """A run ends after it has removed one file of an old checkpoint. The next run removes the rest."""
    trainer = tiny.trainer(options())
    tiny.curve(trainer, 1)

    def remove_one_file(path, **options):
        next(path.glob("*.distcp")).unlink()
        raise SystemExit

    for step in (1, 2):
        Snapshot.of(tmp_path, step, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", lambda path, **options: path.exists() and remove_one_file(path))
        Snapshot.of(tmp_path, 3, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    Snapshot.of(tmp_path, 4, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
    assert sorted(os.listdir(tmp_path)) == ["step-000003", "step-000004"]


# What cannot be resumed


def test_an_interrupted_checkpoint_is_not_found(tmp_path, monkeypatch):
    trainer = tiny.trainer(options())
    tiny.curve(trainer, 1)
    with (
        monkeypatch.context() as patch,
        pytest.raises(Failure),
    ):  # the tensors are written, and the folder is not renamed
        patch.setattr(Path, "rename", refuse_to_rename)
        Snapshot.of(tmp_path, 1, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
    assert os.listdir(tmp_path) == []
    assert find_checkpoints(tmp_path) == []
    with pytest.raises(ValueError, match=f"^nothing to resume: {tmp_path} holds no checkpoint$"):
        newest_checkpoint(tmp_path, RUN_SETTINGS)
    Snapshot.of(tmp_path, 1, trainer.model, trainer.optimizer, RUN_SETTINGS).write()
    assert os.listdir(tmp_path) == ["step-000001"]
    resumed = tiny.trainer(options())
    resume(resumed, tmp_path)
    assert_same(training_state(resumed), training_state(trainer))


def test_folders_that_are_no_checkpoints(tmp_path):
    for name in ("step-1", "step-000001", "step-000002x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000002x" / "training.json").write_text('{"step": 2}')
    assert find_checkpoints(tmp_path) == find_checkpoints(tmp_path / "missing") == []
    with pytest.raises(ValueError, match=r"holds no checkpoint \(step-000001: no training.json\)$"):
        newest_checkpoint(tmp_path, RUN_SETTINGS)


@pytest.mark.parametrize(
    "text",
    (
        "", "[1]", "7", "{}", '{"step": "x"}', '{"step": null}', '{"step": 2}', '{"step": 1, "decay_steps": null}',
        "[" * 100_000,
    ),
)  # fmt: skip
def test_a_damaged_training_json(tmp_path, text):
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "training.json").write_text(text)
    with pytest.raises(ValueError, match="step-000001/training.json is damaged: "):
        newest_checkpoint(tmp_path, RUN_SETTINGS)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "training.json").write_text(json.dumps({"step": 1, **RUN_SETTINGS}))
    assert newest_checkpoint(tmp_path, RUN_SETTINGS) == (tmp_path / "step-000001", 1)
    for wanted in ({**RUN_SETTINGS, "global_batch_size": 8}, {**RUN_SETTINGS, "new": 1}, {"vocab_size": tiny.VOCAB}):
        with pytest.raises(ValueError, match=r"cannot resume from .*step-000001: it has \w+=\S+, this run \S+$"):
            newest_checkpoint(tmp_path, wanted)


def test_a_checkpoint_of_a_version_that_named_sizes_otherwise(tmp_path):
    """What both name is compared, and LoRA, which only runs with it name."""
    common = {"family": "mamba2", "vocab_size": tiny.VOCAB, "seed": 5}
    old, new = common | {"conv_kernel": 4, "heads": 8}, common | {"layers.0.mixer.heads": 8}
    (tmp_path / "step-000001").mkdir()
    for lora in ({}, {"lora_rank": 2}):
        (tmp_path / "step-000001" / "training.json").write_text(json.dumps({"step": 1, **old, **lora}))
        assert newest_checkpoint(tmp_path, new | lora) == (tmp_path / "step-000001", 1)
        for wanted in (new | lora | {"seed": 6}, new | lora | {"family": "mamba"}, new | {"lora_rank": 3}):
            with pytest.raises(ValueError, match=r"cannot resume from .*step-000001: it has \w+=\S+, this run \S+$"):
                newest_checkpoint(tmp_path, wanted)


def truncate(path):
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def spoil(path):
    """Overwrite a file with zeros of the same size."""
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE = {
    "every shard cut": lambda path: [truncate(file) for file in path.glob("*.distcp")],
    "a shard cut": lambda path: truncate(max(path.glob("*.distcp"))),
    "a shard spoilt": lambda path: spoil(max(path.glob("*.distcp"))),
    "a shard missing": lambda path: max(path.glob("*.distcp")).unlink(),
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "metadata cut": lambda path: truncate(path / ".metadata"),
    "metadata spoilt": lambda path: spoil(path / ".metadata"),
    "metadata garbage": lambda path: (path / ".metadata").write_bytes(b"\x80\x05garbage"),
    "metadata of something else": lambda path: (path / ".metadata").write_bytes(pickle.dumps([1, 2])),
    "metadata empty": lambda path: (path / ".metadata").write_bytes(b""),
}


def refusals(trainer, paths):
    """The messages of the ValueErrors, one line each, that the checkpoints raise on this rank."""
    lines = []
    for path in paths:
        with pytest.raises(ValueError) as error:
            load_training(path, 2, trainer.model, trainer.optimizer)
        line = str(error.value)
        assert line.startswith(f"{path} is damaged or of another model: ") and len(line.splitlines()) == 1
        lines.append(line)
    return lines


@pytest.mark.parametrize("tp, dp", [pytest.param(2, 1, marks=pytest.mark.full), (1, 2)])
def test_damaged_checkpoints_are_refused_by_every_rank(ranks, tmp_path, tp, dp):
    ranks(lambda rank: save_after(tiny.trainer_on(tp, options()), 2, tmp_path), tp * dp)
    for name, damage in DAMAGE.items():
        damage(shutil.copytree(tmp_path / "step-000002", tmp_path / name))
    paths = [tmp_path / name for name in DAMAGE]
    for lines in ranks(lambda rank: refusals(tiny.trainer_on(tp, options()), paths), tp * dp):
        assert len(lines) == len(DAMAGE)
        # Truncated shards are found by their size, without reading them.
        assert all(re.search(r"\.distcp has \d+ bytes, not \d+$", line) for line in lines[:2])


def test_a_checkpoint_of_another_step_is_refused_by_every_rank(ranks, tmp_path, tp=2):
    """For instance a copy under the name of another step."""
    ranks(lambda rank: save_after(tiny.trainer_on(tp, options()), 1, tmp_path), tp)
    for lines in ranks(lambda rank: refusals(tiny.trainer_on(tp, options()), [tmp_path / "step-000001"]), tp):
        assert lines[0].endswith("/training.json is damaged: it records step 1, not step 2")


def test_another_model_is_refused_by_every_rank(ranks, tmp_path, tp=2):
    save_after(tiny.trainer(options()), 2, tmp_path)
    changes = (dict(hidden_size=32), dict(num_layers=3), dict(model_type="mamba"))

    def refused(rank):
        trainers = [tiny.trainer_on(tp, options(**change)) for change in changes]
        return [refusals(trainer, [tmp_path / "step-000002"]) for trainer in trainers]

    for lines in ranks(refused, tp):
        assert len(lines) == 3


# A pickle is a program


FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def call(module, name, argument):
    """A pickle that calls module.name(argument) when it is loaded."""
    return b"\x80\x04c%s\n%s\n(V%s\ntR." % (module.encode(), name.encode(), str(argument).encode())


PATHLIB = "pathlib._local" if sys.version_info[:2] == (3, 13) else "pathlib"


@pytest.mark.parametrize("module, name", [("os", "mkdir"), (FILESYSTEM, "os.mkdir"), (PATHLIB, "os.mkdir")])
def test_metadata_that_calls_something_is_refused_unexecuted(tmp_path, module, name):
    created = tmp_path / "made"
    pickle.loads(call(module, name, created))  # the attack works when it is unpickled
    created.rmdir()
    (tmp_path / ".metadata").write_bytes(call(module, name, created))
    assert f"its metadata names {module}.{name}" in refusals(tiny.trainer(options()), [tmp_path])[0]
    assert not created.exists()


@pytest.mark.parametrize("name", ("Path", "FileSystem", "_split_by_size_and_type", "os", "pickle.loads"))
def test_metadata_may_name_only_record_classes(tmp_path, name):
    """Neither imports nor functions of DCP's module are allowed."""
    (tmp_path / ".metadata").write_bytes(call(FILESYSTEM, name, 1))
    assert refusals(tiny.trainer(options()), [tmp_path])[0].endswith(f"its metadata names {FILESYSTEM}.{name}")


def test_metadata_as_python_3_11_2_writes_it(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle the member of an Enum as getattr(class, name)."""
    with monkeypatch.context() as patch:
        patch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)))
        before = tiny.trainer(options())
        save_after(before, 1, tmp_path)
    assert b"getattr" in (tmp_path / "step-000001" / ".metadata").read_bytes()
    after = tiny.trainer(options())
    assert resume(after, tmp_path) == 1
    assert torch.equal(tiny.curve(after, 2, start=1), tiny.curve(before, 2, start=1))


@pytest.mark.parametrize(
    "owner, name", [(("torch", "Size"), "count"), ((_MEM_FORMAT_ENCODING.__module__, "_MEM_FORMAT_ENCODING"), "mro")]
)
def test_metadata_may_call_getattr_for_nothing_else(tmp_path, owner, name):
    data = b"\x80\x04cbuiltins\ngetattr\n(c%s\n%s\nV%s\ntR." % (*(part.encode() for part in owner), name.encode())
    assert callable(pickle.loads(data))
    (tmp_path / ".metadata").write_bytes(data)
    line = refusals(tiny.trainer(options()), [tmp_path])[0]
    assert re.search(
        rf"it calls getattr\(<.*{owner[1]}.*>, '{name}'\), which is not a member of a permitted Enum$", line
    )


def test_metadata_that_cannot_be_read_back(tmp_path, monkeypatch):
    """The error of a checkpoint that is written says so; it does not say that files are missing."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (os.getenv, ("HOME",)))
    with pytest.raises(Failure, match=r"step-000001: it cannot be read back \(its metadata names os.getenv\)$"):
        save_after(tiny.trainer(options()), 1, tmp_path)
    assert find_checkpoints(tmp_path) == []


def test_entries_of_bytes_are_refused(tmp_path):
    """torch would unpickle their contents."""
    trainer = tiny.trainer(options())
    tiny.curve(trainer, 1)
    created = tmp_path / "made"

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(created),)

    entries = {f"model.{name}": parameter.detach() for name, parameter in trainer.model.named_parameters()}
    dcp.save({**entries, "rng": Attack()}, checkpoint_id=tmp_path / "step-000001", no_dist=True)
    dcp.load({"rng": None}, checkpoint_id=tmp_path / "step-000001", no_dist=True)  # torch runs the attack
    created.rmdir()
    assert refusals(trainer, [tmp_path / "step-000001"])[0].endswith(".BytesStorageMetadata")
    assert not created.exists()
