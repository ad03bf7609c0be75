"""Training checkpoints on disks that are full, and files that have changed there. Oracles: the sizes of a tmpfs, zlib."""

import contextlib
import json
import os
import pickle
import re
import shutil
import subprocess
import zlib

import pytest

import tiny
from megatron_ssm.checkpoints.disk_space import DirectoryLock
from megatron_ssm.checkpoints.folders import find_checkpoints
from megatron_ssm.checkpoints.training import load_training, save_training
from serving import attempt
from sparsefusion.foundation.command_line import Failure

RUN_SETTINGS = {"vocab_size": tiny.VOCAB}


def options(**changes):
    """The options of a tiny run with one layer, with `changes`."""
    return tiny.options(**{"num_layers": 1, **changes})


def trained(tp, step=1, **changes):
    """A trainer on the calling rank that has done some steps."""
    trainer = tiny.trainer_on(tp, options(**changes))
    tiny.curve(trainer, step)
    return trainer


def save(trainer, directory, step=1):
    save_training(directory, step, trainer.model, trainer.optimizer, RUN_SETTINGS)


# Files that have changed


def flip_bit(path, position):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 1), (2, 2)])
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


@pytest.mark.parametrize("tp", (1, 2))
def test_a_checkpoint_without_checksums_is_read(ranks, tmp_path, tp):
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


# Disks that are full


@contextlib.contextmanager
def small_disk(path, kilobytes):
    """A disk of this size, mounted at a path."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", path]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 1), (1, 3)])
def test_a_full_disk(ranks, tmp_path, tp, dp):
    """Every rank says so in the same line; the checkpoints before it stay, and nothing else."""
    with small_disk(tmp_path / "disk", 1000) as disk:

        def run(rank):
            trainer = trained(tp, hidden_size=64, global_batch_size=2 * dp)
            lines = []
            for step in range(1, 9):
                try:
                    save_training(disk, step, trainer.model, trainer.optimizer, RUN_SETTINGS, keep=9)
                except Failure as error:
                    lines.append(str(error))
                    break
            elements = sum(p.numel() for p in trainer.model.parameters()) if tp == 1 else None
            return lines, step, elements

        results = ranks(run, tp * dp)
        assert all(lines == results[0][0] for lines, _, _ in results)
        (line,), step, elements = results[0]
        numbers = re.fullmatch(
            rf"cannot write {disk}/step-{step:06d}: the disk is full \(No space left on device\): the checkpoint needs "
            r"(\d\.\d) MB, and (\d\.\d) MB were free",
            line,
        )
        assert numbers, line
        needed, free = float(numbers[1]), float(numbers[2])
        assert free == pytest.approx(shutil.disk_usage(disk).free / 1e6, abs=0.1) and free < 1.0
        if elements:
            assert needed == pytest.approx(3 * 8 * elements / 1e6, abs=0.1)
        assert sorted(os.listdir(disk)) == [f"step-{done:06d}" for done in range(1, step)]


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
