"""Checkpoints that only one rank cannot read or write. Oracle: all ranks raise the same line, and none hangs."""

import re
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist

import megatron_ssm
import tiny
from hf import edit_config, in_two_files, save_hf
from megatron_ssm.checkpoints.agreement import run_on_every_rank
from megatron_ssm.checkpoints.folders import find_checkpoints
from megatron_ssm.checkpoints.training import Snapshot, load_training
from serving import attempt
from shared import references_kept
from sparsefusion.foundation.command_line import Failure


def truncate(path):
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_second_file(directory):
    in_two_files(directory)
    truncate(directory / "model-00002-of-00002.safetensors")


# name: (how the copy of one rank is damaged, what the error says)
DAMAGED_COPIES = {
    "no directory": (shutil.rmtree, "is not a directory"),
    "no configuration": (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
    "configuration truncated": (lambda d: truncate(d / "config.json"), "config.json is not JSON"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "weights truncated": (lambda d: truncate(d / "model.safetensors"), "is not a complete safetensors file"),
    "one of two files truncated": (damage_second_file, "model-00002-of-00002.safetensors is not a complete"),
    "another vocabulary": (lambda d: edit_config(d, vocab_size=60), "its configuration says"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A directory with a valid model."""
    directory = tmp_path_factory.mktemp("good")
    save_hf(directory, "mamba2", num_hidden_layers=2, n_groups=2)
    return directory


def copies_for_ranks(good, tmp_path, damage, damaged_rank, world):
    """A copy of the directory for each rank, as if each had its own disk; one copy is damaged."""
    copies = [shutil.copytree(good, tmp_path / str(rank)) for rank in range(world)]
    damage(copies[damaged_rank])
    return copies


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("name", DAMAGED_COPIES)
def test_load_fails_on_every_rank(ranks, world, name, good, tmp_path):
    damage, words = DAMAGED_COPIES[name]
    copies = copies_for_ranks(good, tmp_path, damage, world - 1, world)

    def run(rank):
        answer = attempt(megatron_ssm.load, copies[rank], dist.group.WORLD)
        return answer, attempt(megatron_ssm.load, good, dist.group.WORLD)

    (first, then), *others = ranks(run, world, timeout=20)
    assert first is not None and first[0] == "ValueError", first
    assert words in first[1] and f"(rank {world - 1})" in first[1] and "\n" not in first[1]
    assert then is None and all(other == (first, then) for other in others)


@pytest.mark.parametrize("tp, dp", [(2, 2), (1, 2)])
def test_load_fails_on_every_replica(ranks, tp, dp, good, tmp_path):
    copies = copies_for_ranks(good, tmp_path, lambda d: truncate(d / "model.safetensors"), 0, tp * dp)

    def run(rank):
        tensor = [dist.new_group(range(i * tp, (i + 1) * tp)) for i in range(dp)][rank // tp]
        data = [dist.new_group(range(i, tp * dp, tp)) for i in range(tp)][rank % tp]
        return attempt(megatron_ssm.load, copies[rank], tensor, data_group=data)

    first, *others = ranks(run, tp * dp, timeout=20)
    assert first is not None and first[0] == "ValueError" and "is not a complete safetensors file" in first[1]
    assert all(other == first for other in others)


@pytest.mark.parametrize("world", (2, 3))
def test_ranks_that_load_different_models(ranks, world, good, tmp_path):
    """Each directory is valid on its own."""
    other = tmp_path / "other"
    save_hf(other, "mamba2", num_hidden_layers=1, n_groups=1, num_heads=12, hidden_size=48)
    good_for_all = tmp_path / "good"
    save_hf(good_for_all, "mamba2", num_hidden_layers=2, n_groups=1, num_heads=12, hidden_size=48)

    def run(rank):
        return attempt(megatron_ssm.load, other if rank else good_for_all, dist.group.WORLD)

    first, *others = ranks(run, world, timeout=20)
    assert first is not None and first[0] == "ValueError" and "num_layers=1" in first[1], first
    assert all(answer == first for answer in others)


@pytest.mark.parametrize("world", (2, 4))
def test_ranks_with_different_arguments_of_load(ranks, world, good):
    changes = [dict(dtype=torch.bfloat16), dict(reduce="fp16"), dict(weights="int8"), dict(dtype="float32")]

    def run(rank):
        return [attempt(megatron_ssm.load, good, dist.group.WORLD, **(change if rank else {})) for change in changes]

    first, *others = ranks(run, world, timeout=20)
    assert all(answer is not None and answer[0] == "ValueError" for answer in first)
    assert all(answers == first for answers in others)


@pytest.mark.parametrize("world", (2, 4))
def test_a_tensor_that_one_rank_cannot_read(ranks, world, good, monkeypatch):
    """The files are opened without an error, but a later read fails, as on a disk that is disconnected."""
    from megatron_ssm.checkpoints import hf

    read_original = hf._read

    def run(rank):
        def read(parameter, tensor, ranks):
            if rank == world - 1 and parameter.field.name == "norm_f.weight":
                raise OSError("Input/output error")
            read_original(parameter, tensor, ranks)

        with monkeypatch.context() as patch:
            patch.setattr(hf, "_read", read)
            return attempt(megatron_ssm.load, good, dist.group.WORLD)

    first, *others = ranks(run, world, timeout=20)
    assert first == ("ValueError", f"Input/output error (rank {world - 1})")
    assert all(answer == first for answer in others)


@pytest.mark.parametrize("world", (2, 4))
def test_ranks_with_different_arguments_of_save(ranks, world, good, tmp_path):
    def run(rank):
        model = megatron_ssm.load(good, dist.group.WORLD)
        answers = [
            attempt(megatron_ssm.save, model, tmp_path / "out", size if rank else 10**9) for size in (1000, "big")
        ]
        megatron_ssm.save(model, tmp_path / "out")
        return answers

    first, *others = ranks(run, world, timeout=20)
    assert all(answer is not None and answer[0] == "ValueError" for answer in first)
    assert all(answers == first for answers in others)


# Training checkpoints


@pytest.mark.parametrize("world", (2, 3))
def test_a_training_checkpoint_that_one_rank_cannot_read(ranks, world, tmp_path):
    """The metadata is missing, or a file is truncated. Afterwards all ranks resume from a valid checkpoint."""
    trainer = tiny.trainer(tiny.options(num_layers=1))
    tiny.curve(trainer, 1)
    Snapshot.of(tmp_path / "good", 1, trainer.model, trainer.optimizer, {}).write()
    (good,) = find_checkpoints(tmp_path / "good")
    copies = [shutil.copytree(good, tmp_path / name) for name in ("first", "second")]
    (copies[0] / ".metadata").unlink()
    truncate(max(copies[1].glob("*.distcp")))

    def run(rank):
        trainer = tiny.trainer_on(1, tiny.options(num_layers=1, global_batch_size=2 * world))
        answers = []
        for copy in copies:
            here = tmp_path / f"{copy.name}-here"  # the same name on every rank, and another file on the last one
            if rank == 0:
                here.symlink_to(good)
            dist.barrier()
            path = PathOfRank(here, copy if rank == world - 1 else good)
            answers.append(attempt(load_training, path, 1, trainer.model, trainer.optimizer))
        load_training(good, 1, trainer.model, trainer.optimizer)
        return answers

    first, *others = ranks(run, world, timeout=30)
    for answer, words in zip(first, (".metadata", "distcp has"), strict=True):
        assert answer is not None and answer[0] == "DamagedCheckpoint", answer
        assert words in answer[1] and "\n" not in answer[1], answer
    assert all(answers == first for answers in others)


class PathOfRank:
    """A path with the same name on every rank but its own target on each, as if each had its own disk."""

    def __init__(self, name, target):
        self.name, self.target = name, target

    def __fspath__(self):
        return str(self.target)

    def __str__(self):
        return str(self.name)


@pytest.mark.parametrize("world", (2, 3))
def test_ranks_that_resume_from_different_steps(ranks, world, tmp_path):
    """This happens if a rank does not see the newest checkpoint yet."""
    trainer = tiny.trainer(tiny.options(num_layers=1))
    for step in (1, 2):
        tiny.curve(trainer, 1)
        Snapshot.of(tmp_path, step, trainer.model, trainer.optimizer, {}).write()
    older, newer = find_checkpoints(tmp_path)

    def run(rank):
        trainer = tiny.trainer_on(1, tiny.options(num_layers=1, global_batch_size=2 * world))
        return attempt(load_training, newer if rank else older, 2 if rank else 1, trainer.model, trainer.optimizer)

    answers = ranks(run, world, timeout=20)
    assert all(answer is not None and answer[0] == "ValueError" for answer in answers)
    assert all("step-000001" in message and "step-000002" in message for _, message in answers)


@pytest.mark.parametrize("world", (2, 3))
def test_ranks_that_resume_from_different_runs(ranks, world, tmp_path):
    """Each has its own disk, with a checkpoint of the same step. All are intact, so none is set aside."""
    for seed in (7, 8):
        trainer = tiny.trainer(tiny.options(num_layers=1, seed=seed))
        tiny.curve(trainer, 1)
        Snapshot.of(tmp_path / str(seed), 1, trainer.model, trainer.optimizer, {}).write()
    ours, theirs = (find_checkpoints(tmp_path / str(seed))[0] for seed in (7, 8))

    def run(rank):
        trainer = tiny.trainer_on(1, tiny.options(num_layers=1, global_batch_size=2 * world))
        paths = (theirs if rank else ours), ours
        return [attempt(load_training, path, 1, trainer.model, trainer.optimizer) for path in paths]

    for differs, same in ranks(run, world, timeout=20):
        assert differs[0] == "ValueError" and same is None
        assert re.fullmatch(
            r"the ranks differ: step-000001 with .* on rank 0, step-000001 with .* on another", differs[1]
        )


@pytest.mark.parametrize("world", (2, 3))
def test_an_unexpected_error_of_one_rank_ends_all(ranks, world):
    """It is raised unchanged where it occurred, and as a Failure of one line elsewhere."""

    def run(rank):
        def action():
            if rank == 1:
                raise ZeroDivisionError("a bug")

        return attempt(run_on_every_rank, action, "cannot write")

    answers = ranks(run, world, timeout=20)
    assert answers[1] == ("ZeroDivisionError", "a bug")
    assert all(answer == (Failure.__name__, "cannot write: a bug") for answer in answers[:1] + answers[2:])


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("kind", (ZeroDivisionError, OSError))
def test_errors_do_not_keep_the_group(ranks, world, kind):
    def run(rank):
        group = dist.group.WORLD

        def action():
            assert group is not None
            if rank == 1:
                raise kind("a bug")

        return references_kept(partial(run_on_every_rank, action, "cannot write", group=group))

    assert ranks(run, world) == [0] * world


@pytest.mark.parametrize("world", (2, 3))
def test_a_rank_that_is_no_member_of_the_group(ranks, world, good):
    """torch.distributed.new_group gives such a rank a number. The members can use the group meanwhile."""

    def run(rank):
        group = dist.new_group([0])
        error = attempt(megatron_ssm.load, good, group), attempt(megatron_ssm.load, good, None, data_group=group)
        return [each and each[0] for each in error] if rank == 0 else error

    member, *others = ranks(run, world)
    assert not any(member)
    for kind, message in sum(others, ()):
        assert kind == "ValueError" and "is no process group that this rank is a member of" in message
