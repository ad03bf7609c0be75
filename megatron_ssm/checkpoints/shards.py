"""Reads and writes the files of a training checkpoint through torch.distributed.checkpoint (DCP), with checksums.

Each entry of a file (a tensor, or this rank's part of one) has a CRC-32, which is next to its offset in `.metadata`. A
rank that reads an entry verifies it first. DCP and torch write checksums too, but do not verify them. Checkpoints without
checksums, of earlier versions, can be read.
"""

import io
import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path, PurePath
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .disk import read_with_retries
from .folders import read_intact

PIECE = 1 << 20  # bytes that are read at once to compute a checksum


class ShardWriter(dcp.FileSystemWriter):
    """DCP's writer, but it records checksums, and reports the error of the disk where torch reports a consequence."""

    def __init__(self, path: str | Path):
        super().__init__(path, sync_files=False)  # DCP would sync before the last bytes are written; `new_file` syncs
        self.fs = self._files = _Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file. OSError if that fails."""
        written = super().write_data(plan, planner)
        for result in written.value():
            entry = result.storage_data
            entry.crc32 = self._files.checksums[entry.relative_path][entry.offset]
        return written


class _Files(FileSystem):
    """The files that DCP writes, with their checksums: {file: {offset: CRC-32 of the entry at this offset}}."""

    def __init__(self) -> None:
        self.checksums: dict[str, dict[int, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        """An open file; a new one is a `new_file`."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with new_file(path) as file:
            self.checksums[Path(path).name] = file.checksums
            yield file


@contextmanager
def new_file(path: str | os.PathLike) -> Iterator["_ChecksummedFile"]:
    """A new file, which is on the disk when the context ends.

    A RuntimeError of torch that is due to a failed write becomes the OSError of that write.
    """
    with _ChecksummedFile(path) as file:
        try:
            yield file
        except RuntimeError as error:
            raise file.error or error from None


class _ChecksummedFile(io.BufferedWriter):
    """A new file of entries. DCP calls `tell` before it writes an entry, so an entry begins at each position returned.

    Attributes:
        checksums: {offset: CRC-32 of the entry at this offset}.
        error: The error of a failed write.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__(io.FileIO(path, "wb"))
        self.checksums: dict[int, int] = {}
        self.error: OSError | None = None
        self._start = 0

    def tell(self) -> int:
        """The position, at which a new entry may begin."""
        self._start = super().tell()
        return self._start

    def write(self, data: Any) -> int:
        """Write bytes of the current entry."""
        self.checksums[self._start] = zlib.crc32(data, self.checksums.get(self._start, 0))
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise

    def close(self) -> None:
        """Write all bytes to the disk, so that they survive a crash of the machine, and close the file."""
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()


def open_shards(path: str | Path, metadata_crc32: int | None) -> "ShardReader":
    """A reader of this checkpoint; errors as `read_intact`. metadata_crc32: The checksum of `.metadata` (None: unknown)."""
    return read_intact(lambda: ShardReader(path, metadata_crc32), Path(path))


class ShardReader(dcp.FileSystemReader):
    """DCP's reader, but it unpickles the metadata with a list of permitted classes, and verifies sizes and checksums.

    The constructor raises an error if the metadata cannot be read or has another checksum, or if a file that it names is
    missing or shorter than the metadata says. `read_data` raises ValueError if an entry has another checksum.
    """

    def __init__(self, path: str | Path, metadata_crc32: int | None):
        super().__init__(path)
        data = (Path(path) / ".metadata").read_bytes()
        self.metadata_crc32 = zlib.crc32(data)
        _check("its .metadata", self.metadata_crc32, metadata_crc32)
        self.metadata: Metadata = _Unpickler(io.BytesIO(data)).load()
        for entry in self.metadata.storage_data.values():
            size, wanted = (Path(path) / entry.relative_path).stat().st_size, entry.offset + entry.length
            if size < wanted:
                raise ValueError(f"{entry.relative_path} has {size} bytes, not {wanted}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return read_with_retries(lambda: super(ShardReader, self).read_data(plan, planner), self.path)

    def _slice_file(self, file: IO[bytes], entry: Any) -> IO[bytes]:
        """The bytes of an entry, whose checksum is verified before torch reads them."""
        file.seek(entry.offset)
        checksum, left = 0, entry.length
        while left and (piece := file.read(min(left, PIECE))):
            checksum, left = zlib.crc32(piece, checksum), left - len(piece)
        name = f"{entry.relative_path}, bytes {entry.offset} to {entry.offset + entry.length - 1},"
        _check(name, checksum, getattr(entry, "crc32", None))
        return super()._slice_file(file, entry)


def _check(name: str, checksum: int, expected: int | None) -> None:
    if expected is not None and checksum != expected:
        raise ValueError(f"{name} has the CRC-32 {checksum:08x}, not {expected:08x}")


# The classes that metadata may name. BytesStorageMetadata is not among them: DCP would unpickle the bytes of such an entry.
_PERMITTED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float64", "float32", "bfloat16", "float16", "uint8"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Loads the records that describe the tensors of a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        """The class, if it is permitted; UnpicklingError otherwise."""
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePath  # the folder where it was written; Python 3.13 names another module
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if name not in _PERMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}")
        return super().find_class(module, name)


def enum_member(owner: object, name: str) -> object:
    """The member `name` of an Enum, which Python 3.11.0 to 3.11.3 pickle as getattr(class, name).

    Restricted readers put this function in place of getattr. ValueError if it is called with anything else.
    """
    if (
        isinstance(owner, EnumMeta)
        and isinstance(name, str)
        and isinstance(found := owner.__members__.get(name), owner)
    ):
        return found
    raise ValueError(f"it calls getattr({owner!r}, {name!r}), which is not a member of a permitted Enum")
