"""Training checkpoints on disks that are full or fail, and files that have changed. Oracles: sizes of files, zlib."""

import errno
import json
import os
import pickle
import re
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

import tiny
from benchmarks.support.launched import disks_work, small_disk
from commfabric.foundation.command_line import Failure
from megatron_ssm.checkpoints import disk
from megatron_ssm.checkpoints.disk import DirectoryLock
from megatron_ssm.checkpoints.folders import find_checkpoints, newest_checkpoint, read_training
from megatron_ssm.checkpoints.shards import ShardReader
from megatron_ssm.checkpoints.training import Snapshot, load_training
from megatron_ssm.train.pending_gradients import PendingFile
from serving import attempt

RUN_SETTINGS = {"vocab_size": tiny.VOCAB}
FULL = "No space left on device"


def options(**changes):
    """The options of a tiny run with one layer, with `changes`."""
    return tiny.options(**{"num_layers": 1, **changes})


def trained(tp, step=1, **changes):
    """A trainer on the calling rank that has done some steps."""
    trainer = tiny.trainer_on(tp, options(**changes))
    tiny.curve(trainer, step)
    return trainer


def save(trainer, directory, step=1, keep=2):
    pending = PendingFile.of(trainer)
    write_pending = pending and pending.write
    Snapshot.of(
        directory, step, trainer.model, trainer.optimizer, RUN_SETTINGS, write_pending=write_pending, keep=keep
    ).write()


# Files that have changed


def flip_bit(path, position):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 2)])
def test_a_flipped_bit_is_found_and_its_file_named(ranks, tmp_path, tp, dp):
    """Anywhere in a file, also where torch would read a wrong number, on a rank that did not write the file."""
    ranks(lambda rank: save(trained(tp), tmp_path), tp * dp)
    (good,) = find_checkpoints(tmp_path)
    copies = {}
    for file in (*sorted(good.glob("*.distcp")), good / ".metadata"):
        for place in (0.001, 0.3, 0.6, 0.9):
            copy = shutil.copytree(good, tmp_path / f"{file.name}-{place}")
            flip_bit(copy / file.name, int(place * file.stat().st_size))
            copies[copy] = file.name

    def load(rank):
        trainer = tiny.trainer_on(tp, options())
        answers = [attempt(load_training, copy, 1, trainer.model, trainer.optimizer) for copy in copies]
        load_training(good, 1, trainer.model, trainer.optimizer)
        return answers

    first, *others = ranks(load, tp * dp)
    assert all(answers == first for answers in others)
    for (kind, line), (copy, name) in zip(first, copies.items(), strict=True):
        assert kind == "DamagedCheckpoint" and "\n" not in line
        numbers = re.fullmatch(
            rf"{copy} is damaged or of another model: (?:its )?{re.escape(name)}(?:, bytes (\d+) to (\d+),)? has the "
            r"CRC-32 ([0-9a-f]{8}), not ([0-9a-f]{8})",
            line,
        )
        assert numbers, line
        begin, end = int(numbers[1] or 0), int(numbers[2] or (good / name).stat().st_size - 1)
        for folder, crc in ((copy, numbers[3]), (good, numbers[4])):
            assert f"{zlib.crc32((folder / name).read_bytes()[begin : end + 1]):08x}" == crc


def test_a_flipped_bit_of_the_description_is_found(tmp_path):
    """A bit of every byte, also of what a run does not compare. Without its name, the checksum counts as what no run has."""
    described = {**RUN_SETTINGS, "text": "ä", "rate": 1e-5}
    trainer = trained(1)
    Snapshot.of(tmp_path, 1, trainer.model, trainer.optimizer, described, decay_steps=20).write()
    file = tmp_path / "step-000001" / "training.json"
    whole = file.read_bytes()
    name = range(whole.index(b"crc32", whole.index(b"metadata_crc32") + 14), len(whole))[: len(b"crc32")]
    same = read_training(file.parent)
    assert newest_checkpoint(tmp_path, described) == (file.parent, 1) and same.decay_steps == 20
    for bit in (8 * byte + byte % 8 for byte in range(len(whole))):
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        file.write_bytes(spoilt)
        kind, line = attempt(newest_checkpoint, tmp_path, described) or ("no error", "")
        if kind == "no error":  # 1E-05 and 1e-05 are the same number
            assert read_training(file.parent) == same, spoilt
        else:
            assert kind == "DamagedCheckpoint" or (kind == "ValueError" and bit // 8 in name), (spoilt, line)


def test_a_checkpoint_without_checksums_is_read(ranks, tmp_path, tp=2):
    """Earlier versions wrote such checkpoints."""
    ranks(lambda rank: save(trained(tp, step=2), tmp_path, 2), tp)
    (path,) = find_checkpoints(tmp_path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for entry in metadata.storage_data.values():
        del entry.crc32
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "training.json").write_text(json.dumps({"step": 2, **RUN_SETTINGS}))

    def load(rank):
        trainer = tiny.trainer_on(tp, options())
        load_training(path, 2, trainer.model, trainer.optimizer)
        return tiny.curve(trainer, 4, start=2)

    straight = tiny.curve(tiny.trainer(options()), 4)[:, 2:]
    for curve in ranks(load, tp):
        assert (curve - straight).abs().max() <= 1e-10


# Disks that cannot be read


@pytest.mark.parametrize("file", ("training.json", ".metadata"))
def test_an_error_of_the_disk_is_no_damage(ranks, tmp_path, monkeypatch, file):
    """Its first bytes are those of memory that is not mapped: EIO."""
    monkeypatch.setattr(disk, "WAITS", (0.01, 0.01))
    trainer = trained(1)
    save(trainer, tmp_path)
    (path,) = find_checkpoints(tmp_path)
    (path / file).unlink()
    (path / file).symlink_to("/proc/self/mem")
    for answer in ranks(lambda rank: attempt(load_training, path, 1, trainer.model, trainer.optimizer), 2):
        assert answer == ("Failure", f"cannot read {path}: Input/output error (tried 3 times)")


@pytest.mark.parametrize("world, failures", [(2, 3), (3, 2)])
def test_a_shard_that_one_rank_cannot_read_for_a_while(ranks, tmp_path, monkeypatch, world, failures):
    """The file handle is stale two times, and the third attempt reads it; or all attempts fail, and so do all ranks."""
    monkeypatch.setattr(disk, "WAITS", (0.01, 0.01))
    good = trained(1, global_batch_size=2 * world)
    save(good, tmp_path)
    (path,) = find_checkpoints(tmp_path)

    def load(rank):
        trainer, left, whole = (
            tiny.trainer_on(1, options(global_batch_size=2 * world)),
            [failures],
            FileSystem.create_stream,
        )

        def create_stream(self, path, mode):
            if left[0]:
                left[0] -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return whole(self, path, mode)

        if rank == world - 1:
            FileSystem.create_stream = create_stream
        answer = attempt(load_training, path, 1, trainer.model, trainer.optimizer)
        return answer, all(map(torch.equal, tiny.pieces(trainer).values(), tiny.pieces(good).values()))

    line = f"cannot read {path}: Stale file handle (tried 3 times)"
    for answer, is_equal in ranks(load, world):
        assert (answer, is_equal) == (None, True) if failures == 2 else answer == ("Failure", line)


MACHINE_ERRORS = {
    "MemoryError": MemoryError(),
    "CUDA out of memory": torch.OutOfMemoryError("CUDA out of memory"),
    "CUDA error: an illegal access": RuntimeError("CUDA error: an illegal access\nCUDA kernel errors might be ..."),
    "DefaultCPUAllocator: can't allocate memory": RuntimeError("DefaultCPUAllocator: can't allocate memory"),
}


@pytest.mark.parametrize(
    "method, line", [("__init__", "MemoryError"), *(("_slice_file", line) for line in MACHINE_ERRORS)]
)
def test_a_lack_of_memory_is_no_damage(ranks, tmp_path, monkeypatch, method, line, world=2):
    """On one rank, while it reads the metadata or an entry."""
    trainer = trained(1)
    save(trainer, tmp_path)
    (path,) = find_checkpoints(tmp_path)

    def load(rank):
        def fail(*_):
            raise MACHINE_ERRORS[line]

        if rank == world - 1:
            monkeypatch.setattr(ShardReader, method, fail)
        return attempt(load_training, path, 1, trainer.model, trainer.optimizer)

    where = " (rank 1)" if method == "__init__" else ""  # DCP names no rank
    assert ranks(load, world) == [("Failure", f"cannot read {path}: {line}{where}")] * world


# Disks that are full


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
@pytest.mark.parametrize("tp, dp, more", [(2, 1, {}), (1, 3, dict(gradient_mode="layerwise", gradient_density=0.05))])
def test_a_full_disk(ranks, tmp_path, tp, dp, more):
    """Every rank says so in the same line; the checkpoints before it stay, and nothing else."""
    with small_disk(tmp_path / "disk", 1500) as disk:

        def run(rank):
            trainer, step = trained(tp, hidden_size=64, global_batch_size=2 * dp, **more), 0
            with pytest.raises(Failure) as error:
                for step in range(1, 9):
                    save(trainer, disk, step, keep=9)
            return str(error.value), step

        ((line, step),) = set(ranks(run, tp * dp))
        assert re.fullmatch(rf"cannot write {disk}/step-{step:06d}: {FULL}( \(rank \d\))?", line)
        assert sorted(os.listdir(disk)) == [f"step-{done:06d}" for done in range(1, step)]


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
def test_a_disk_without_inodes(ranks, tmp_path):
    """The disk has room for more bytes than the checkpoint needs."""
    with small_disk(tmp_path / "disk", 20_000, files=3) as disk:
        answers = ranks(lambda rank: attempt(save, trained(1, global_batch_size=4), disk), 2)
        assert os.listdir(disk) == []
    assert set(answers) == {("Failure", f"cannot write {disk}/step-000001: {FULL}")}


# What a crash of the machine leaves


def test_a_folder_gets_its_name_when_the_disk_has_all_its_files(ranks, tmp_path, world=2):
    """Every file has been synchronized with its last byte, then the folder's list of names, then that of the checkpoints."""

    def run(rank):
        events, sync, rename = [], os.fsync, Path.rename

        def fsync(descriptor):
            status = os.fstat(descriptor)
            events.append((status.st_ino, None if os.path.isdir(descriptor) else status.st_size))
            sync(descriptor)

        def renamed(path, target):
            events.append(target)
            return rename(path, target)

        trainer = trained(1, step=7, global_batch_size=2 * world, gradient_mode="layerwise", gradient_density=0.05)
        os.fsync, Path.rename = fsync, renamed
        save(trainer, tmp_path)
        return events

    all_events = ranks(run, world)
    (path,) = find_checkpoints(tmp_path)
    files = {(file.stat().st_ino, file.stat().st_size) for file in path.iterdir()}
    assert len(files) == (3 if world == 1 else 6)
    before = all_events[0][: all_events[0].index(path)]
    assert files <= {*before, *(event for events in all_events[1:] for event in events)}
    assert before[-1] == (path.stat().st_ino, None)
    assert all_events[0][len(before) :] == [path, (tmp_path.stat().st_ino, None)]


# What killed runs have left


def test_half_checkpoints_of_ended_runs_are_removed(tmp_path):
    """Those of runs that may still be writing are not; nor is anything with another name."""
    trainer = trained(1)
    for name in (".step-000007", ".step-12", ".other"):
        (tmp_path / name).mkdir()
    lock = DirectoryLock(tmp_path)
    with pytest.raises(Failure, match=f"^cannot write {tmp_path}/step-000001: another run is writing to {tmp_path}$"):
        save(trainer, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".other", ".step-000007", ".step-12"]
    lock.release()
    save(trainer, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".other", ".step-12", "step-000001"]
