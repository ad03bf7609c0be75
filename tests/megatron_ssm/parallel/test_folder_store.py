"""The heartbeat's store in a folder. Oracle: torch's FileStore, called alike."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_ssm.parallel.folder_store import FolderStore


def test_every_call_does_what_torch_does(tmp_path):
    (tmp_path / "folder").mkdir()

    def results(store):
        yield store.check(["beats 0"])
        yield store.add("beats 0", 0)
        yield store.add("beats 0", 1)
        yield store.add("beats 0", 1 << 40)
        yield store.add("beats 0", 0)
        store.set("process 0", "process 7 on a host")
        yield store.check(["process 0"]), store.check(["process 0", "process 1"]), store.get("process 0")
        store.set("process 0", "another")
        yield store.get("process 0")

    assert list(results(FolderStore(tmp_path / "folder"))) == list(results(dist.FileStore(str(tmp_path / "file"), 1)))


@pytest.mark.parametrize("world", (2, 4))
def test_one_rank_writes_first(ranks, tmp_path, world):
    """All ranks then read the same value, and no other file is left."""

    def run(rank):
        store = FolderStore(tmp_path)
        dist.barrier()
        store.compare_set("lost", "", f"from {rank}" * 100)
        return store.get("lost").decode()

    found = ranks(run, world)
    assert len(set(found)) == 1 and found[0] in [f"from {rank}" * 100 for rank in range(world)]
    assert [path.name for path in tmp_path.iterdir()] == ["lost"]


def test_a_reader_never_sees_half_a_value(tmp_path):
    store = FolderStore(tmp_path)
    values = [character * 5000 for character in "ab"]
    store.set("key", values[0])
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [store.set("key", values[number % 2]) for number in range(200)])
        while not writing.done():
            assert store.get("key").decode() in values
        writing.result()


def test_a_folder_that_is_gone(tmp_path):
    store = FolderStore(tmp_path / "gone")
    for call in (lambda: store.set("key", ""), lambda: store.get("key"), lambda: store.compare_set("key", "", "")):
        with pytest.raises(RuntimeError, match="gone.*: No such file or directory"):
            call()
