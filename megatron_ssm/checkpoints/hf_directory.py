"""The files of a Hugging Face directory: weights found and checked against a configuration, or written completely."""

import itertools
import json
import math
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from commfabric.foundation.command_line import first_line
from commfabric.foundation.json_files import read_json
from megatron_ssm.spec.fields import hf_shapes
from megatron_ssm.spec.reader import QUANTIZATION
from megatron_ssm.spec.stack import Stack

from .disk import HiddenFolder, os_errors_as

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NUMBERED_WEIGHTS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")  # the files that an index names
FILE_BYTES = 4 * 10**9  # the largest file that is written, unless a single tensor is larger
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
COMPARED_ROWS = 1024  # rows of two copies of a tensor that are read and compared at once
_LAYER = re.compile(r"\blayers\.([0-9]{1,9})\.")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The files that `Writer` copies from the directory a model was loaded from.
COMPANION_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "tokenizer.model.v3", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


# Reading


def open_tensors(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """{name: safetensors slice} of every tensor in the directory. The files are closed with `stack`.

    If there are no safetensors, pytorch_model.bin is read, or the files of its index; its tensors are `StoredTensor`s.

    Opening compares each file's header with the file's size, so that no size is used before it is checked. ValueError or
    FileNotFoundError, naming the file, if one is missing, truncated or damaged.
    """
    paths = weight_files(directory)
    if not paths:
        raise FileNotFoundError(f"{directory} holds neither {WEIGHTS} nor {INDEX} nor {BIN} nor {BIN_INDEX}")
    tensors: dict[str, Any] = {}
    for path in paths:
        tensors |= open_safetensors(path, stack) if path.suffix == ".safetensors" else read_bin(path)
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files with the weights of a model, safetensors before others; none if there are no weights.

    FileNotFoundError for a file that an index names and that does not exist, ValueError for a wrong index.
    """
    for single, index in ((WEIGHTS, INDEX), (BIN, BIN_INDEX)):
        if (directory / single).is_file():
            return [directory / single]
        if (directory / index).is_file():
            return _files_in_index(directory / index, Path(single).suffix)
    return []


def open_safetensors(path: Path, stack: ExitStack) -> dict[str, Any]:
    """{name: slice} of one file, which is closed with `stack`. ValueError if it is damaged."""
    with os_errors_as(f"{path} is not a complete safetensors file", ValueError):
        file = stack.enter_context(safe_open(path, framework="pt"))
    return {key: file.get_slice(key) for key in file.keys()}


class StoredTensor:
    """A tensor that is mapped from a pytorch_model.bin, with the methods of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return next(name for name, dtype in FLOATS.items() if dtype is self._tensor.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def stored_bytes(tensor: Any) -> int:
    return math.prod(tensor.get_shape()) * FLOATS[tensor.get_dtype()].itemsize


def read_bin(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a pytorch_model.bin, mapped from the file; the unpickler runs no code of the file.

    ValueError, naming the file, for anything but a complete file of floating-point tensors that are each stored in full.
    """
    try:
        tensors = {**torch.load(path, map_location="cpu", mmap=True, weights_only=True)}
    except Exception as error:  # a damaged or foreign pickle may raise anything
        raise ValueError(f"{path} is not a complete file of tensors ({first_line(error)})") from None
    for name, tensor in tensors.items():
        is_strided = torch.is_tensor(tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
        # A file with fewer elements than the tensor has would make a copy that is larger than the file.
        if not is_strided or tensor.dtype not in FLOATS.values() or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise ValueError(f"{path}: {name} is not a floating-point tensor that is stored in full")
    return {name: StoredTensor(tensor) for name, tensor in tensors.items()}


def _files_in_index(path: Path, suffix: str) -> list[Path]:
    """The files with this suffix that an index names; ValueError unless they are all in its directory."""
    try:
        names = sorted(set(read_json(path)["weight_map"].values()))
        is_valid = all(Path(name).name == name and name.endswith(suffix) for name in names)
    except (ValueError, KeyError, AttributeError, TypeError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"{path} is not an index of {suffix} files in its directory")
    for name in names:
        if not (path.parent / name).is_file():
            raise FileNotFoundError(f"{path.parent / name} is named in {path.name} but does not exist")
    return [path.parent / name for name in names]


class CutElsewhere:
    """Rows of the concatenation of several stored tensors, from row `start` on, with the methods of a safetensors slice."""

    def __init__(self, parts: list[Any], start: int, shape: tuple[int, ...]):
        self._parts, self._start, self._shape = parts, start, shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._parts[0].get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = torch.cat([part[:] for part in self._parts])
        return whole[self._start : self._start + self._shape[0]][index]


class Merged:
    """Matrices of experts that are stored one by one, as one safetensors slice (experts, rows, columns).

    parts: for each expert, the tensors whose rows are concatenated; all have the same shape.
    """

    def __init__(self, parts: list[list[Any]]):
        self.parts = parts

    def get_shape(self) -> list[int]:
        rows, *rest = self.parts[0][0].get_shape()
        return [len(self.parts), len(self.parts[0]) * rows, *rest]

    def get_dtype(self) -> str:
        return self.parts[0][0].get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, rows, *rest = index
        length = self.parts[0][0].get_shape()[0]
        which, start = divmod(rows.start, length)
        within = slice(start, start + rows.stop - rows.start)
        assert within.stop <= length, "the rows are those of one of the tensors"
        return torch.stack([each[which][(within, *rest)] for each in self.parts[first]])

    def matrix(self, index: int, rows: slice) -> tuple[Any, slice]:
        """The stored tensor that contains `rows` of expert `index`, and the position of the rows in it."""
        which, start = divmod(rows.start, self.parts[0][0].get_shape()[0])
        return self.parts[index][which], slice(start, start + rows.stop - rows.start)


def _merge(config: Stack, tensors: dict[str, Any], directory: str | Path) -> None:
    """In `tensors`, replace the matrices of experts that are stored one by one by a `Merged` for each field."""
    for field in config.fields():
        if not field.apart:
            continue
        spellings = [list(config.names_in_files(name)) for name in field.apart]
        indices = range(field.shape[0])
        chosen = next(
            (i for i, name in enumerate(spellings[0]) if any(name.format(index) in tensors for index in indices)), None
        )
        if chosen is None:
            continue
        names = [[each[chosen].format(index) for each in spellings] for index in indices]
        if missing := [name for each in names for name in each if name not in tensors]:
            rest = f"; it lacks {len(missing)} matrices of experts" if len(missing) > 1 else ""
            raise ValueError(f"{directory} has no tensor {missing[0]}{rest}")
        whole = list(config.names_in_files(field.hf))[chosen]
        tensors[whole] = Merged([[tensors.pop(name) for name in each] for each in names])


def _recut(config: Stack, tensors: dict[str, Any]) -> dict[str, CutElsewhere]:
    """{name: tensor} of the tensors of `Stack.recut` whose files divide the rows in another way."""
    found: dict[str, CutElsewhere] = {}
    shapes = hf_shapes(config.fields())
    for names in config.recut:
        parts = [tensors[name] for name in names if name in tensors]
        rows = [part.get_shape()[0] for part in parts]
        wanted = [shapes[name][0] for name in names]
        if len(parts) == len(names) and rows != wanted and sum(rows) == sum(wanted):
            starts = itertools.accumulate(wanted, initial=0)
            found |= {
                name: CutElsewhere(parts, start, shapes[name]) for name, start in zip(names, starts, strict=False)
            }
    return found


def match_tensors(config: Stack, tensors: dict[str, Any], directory: str | Path) -> dict[str, str]:
    """{Hugging Face name: name in these files}, after checking that every tensor has its shape and a floating-point dtype.

    Tensors whose rows the files divide differently, and experts that are stored one by one, are replaced in `tensors`.

    Raises:
        ValueError: A tensor is missing, has another shape or dtype, or is not part of such a model; or copies of a tied
            tensor differ.
    """
    if config.recut:
        tensors |= _recut(config, tensors)
    stored = {int(number[1]) for name in tensors if (number := _LAYER.search(name))}
    absent = [layer for layer in range(config.num_layers) if layer not in stored]
    if absent:  # no need to list the tensors of as many layers as config.json may say
        config = config.with_layers(range(absent[0] + 1))
    _merge(config, tensors, directory)
    shapes = hf_shapes(config.fields())
    spellings = {hf: list(config.names_in_files(hf)) for hf in shapes}
    names = {hf: next((n for n in spellings[hf] if n in tensors), "") for hf in shapes}
    if missing := [hf for hf, name in names.items() if not name]:
        rest = f"; it lacks {len(missing)} tensors" if len(missing) > 1 else ""
        rest = f"; it lacks {len(absent)} whole layers" if absent else rest
        raise ValueError(f"{directory} has no tensor {missing[0]} {shapes[missing[0]]}{rest}")
    for hf, name in names.items():
        found = tuple(tensors[name].get_shape())
        if found != shapes[hf]:
            raise ValueError(f"{directory}: {name} is {found}, its configuration says {shapes[hf]}")
        if tensors[name].get_dtype() not in (*FLOATS, *QUANTIZATION):
            raise ValueError(f"{directory}: {name} is {tensors[name].get_dtype()}, not one of {', '.join(FLOATS)}")
        _check_copies(tensors, name, set(spellings[hf]) & set(tensors), directory)
    unused = sorted(set(tensors) - {name for known in spellings.values() for name in known})
    skipped = tuple(prefix for prefix, _ in config.skipped)
    unused = [name for name in unused if not name.startswith(skipped)]
    if unused:
        raise ValueError(
            f"{directory} has {len(unused)} tensors that a {config.family} model does not use, such as {unused[0]}"
        )
    return names


def has_draft_head(config: Stack, tensors: Iterable[str]) -> bool:
    return config.draft_head is not None and any(name.startswith(config.draft_head.hf) for name in tensors)


def left_out_note(config: Stack, tensors: Iterable[str]) -> str:
    """One line about tensors in files that the model knows and does not use; empty if there are none."""
    counts = Counter(what for name in tensors for prefix, what in config.skipped if name.startswith(prefix))
    found = ", ".join(f"{what} ({count} tensors)" for what, count in counts.items())
    return f"left out of the checkpoint: {found}" if found else ""


def _check_copies(tensors: dict[str, Any], name: str, copies: set[str], directory: str | Path) -> None:
    """ValueError if the files hold several copies of a tensor that is one in the model, and they differ."""
    for other in sorted(copies - {name}):
        first, second = tensors[name], tensors[other]
        rows = range(0, first.get_shape()[0], COMPARED_ROWS)
        equal = first.get_shape() == second.get_shape() and first.get_dtype() == second.get_dtype()
        if not equal or not all(torch.equal(*(t[i : i + COMPARED_ROWS] for t in (first, second))) for i in rows):
            raise ValueError(f"{directory}: {name} and {other} differ, but its configuration makes them one")


# Writing


def file_plan(sizes: dict[str, int], file_bytes: int) -> dict[str, list[str]]:
    """{file: its tensors}, from {tensor: its bytes}: filled in order up to `file_bytes` (a larger tensor: alone)."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if files[-1] and filled + nbytes > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += nbytes
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


class Writer:
    """Writes a Hugging Face directory: the files are written into a hidden folder, and then moved into place together.

    The hidden folder has mode 0700, so other users of the machine cannot change its files; hidden folders that killed
    writers have left are removed. The files get the permissions that the process's umask gives to new files.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._hidden: HiddenFolder | None = None

    @property
    def hidden(self) -> Path:
        assert self._hidden is not None, "`open` makes the hidden folder"
        return self._hidden.path

    def attempt(self, step: Callable[..., object], *arguments: Any) -> str | None:
        """Run a step; an error is returned as one line of text, and removes the hidden folder."""
        try:
            step(*arguments)
        except Exception as error:  # of any kind: the other ranks must learn of it
            self.abandon()
            return f"cannot save to {self.directory}: {first_line(error)}"
        return None

    def abandon(self) -> None:
        """Remove the hidden folder with its files."""
        if self._hidden is not None:
            self._hidden.remove()
            self._hidden = None

    def open(self) -> None:
        self._hidden = HiddenFolder(self.directory)

    def write(self, name: str, tensors: dict[str, torch.Tensor], copied: dict[str, Any] | None = None) -> None:
        """Write a file of tensors, and of the slice objects `copied`."""
        tensors = tensors | {name: tensor[:] for name, tensor in (copied or {}).items()}
        path = self.hidden / name
        path.touch()
        permissions = stat.S_IMODE(path.stat().st_mode)
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(permissions)  # safetensors makes its files with mode 0600, whatever the umask is

    def close(
        self, config: dict[str, Any], source: Path | None, weight_map: dict[str, str], companions: tuple[str, ...] = ()
    ) -> None:
        """Write the index and config.json, copy COMPANION_FILES from `source`, move all into place, remove older weights.

        weight_map: {tensor: its file}, written as an index if there are several files. companions: more files to copy.
        """
        files = set(weight_map.values())
        if len(files) > 1:
            size = sum((self.hidden / name).stat().st_size for name in files)
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (self.hidden / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        (self.hidden / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in COMPANION_FILES + companions:
            if source is not None and (source / name).is_file():
                shutil.copyfile(source / name, self.hidden / name)
        self._move_into_place()
        self.abandon()  # all files have left it

    def _move_into_place(self) -> None:
        """Move the files into the directory, and remove the weights of an earlier model.

        If this is interrupted, the directory never holds a mixture of both models' weights that `open_tensors` accepts: the
        file with which reading begins is moved last, and the earlier ones are removed before weights of several files are.
        """
        new = set(os.listdir(self.hidden))
        if INDEX in new:
            for name in (WEIGHTS, INDEX):
                (self.directory / name).unlink(missing_ok=True)
        for name in sorted(new, key=lambda name: name in (WEIGHTS, INDEX)):
            os.replace(self.hidden / name, self.directory / name)
        remove_weights(self.directory, kept=new)


def remove_weights(directory: Path, kept: Collection[str] = ()) -> None:
    """Remove the weights of a model, and their index, except the files with the names in `kept`."""
    for name in set(os.listdir(directory)) - set(kept):
        if name in (WEIGHTS, INDEX) or NUMBERED_WEIGHTS.fullmatch(name):
            (directory / name).unlink(missing_ok=True)
