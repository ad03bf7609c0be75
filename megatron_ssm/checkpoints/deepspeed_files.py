"""DeepSpeed's own checkpoints, as `engine.save_checkpoint` writes them: read for any number of ranks, without DeepSpeed.

A checkpoint is a folder with files of each model-parallel rank, which are our tensor-parallel ranks, and of its replicas:

| ZeRO | trained parameters in fp32, and AdamW's moments | frozen parameters |
|---|---|---|
| 0 | in the model states: parameters by name, moments in the optimizer's order | by name in the model states |
| 1, 2 | in the optimizer states: a flat tensor of each group, of which each replica has a part | likewise |
| 3 | in the optimizer states: flat tensors, in which each replica has a part of every parameter | parts in model states |

torch.load(weights_only=True) reads them. Objects of DeepSpeed's classes, which hold settings, become `Placeholder`s, so no
code of a file or of DeepSpeed runs; a file with objects of other classes is refused.

Source: deepspeed/utils/zero_to_fp32.py of DeepSpeed 0.19, which joins the parameters but loads any pickled object.
"""

import math
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from commfabric.collectives.agreement import together
from commfabric.foundation.command_line import first_line
from megatron_ssm.model.model import Model
from megatron_ssm.spec.fields import Field, field_of, hf_shapes
from megatron_ssm.spec.stack import Stack

from .disk import in_one_line
from .shards import enum_member
from .training import MOMENTS, GatheredState, load_training, state_to_fill

MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
NAMES = "parameter_names"  # what our checkpoints with ZeRO 0 say in addition: the parameters in the optimizer's order

Part = dict[str, dict[str, torch.Tensor]]  # {parameter: {"model", "exp_avg", "exp_avg_sq": tensor}}


class Placeholder:
    """Replaces an object of one of DeepSpeed's classes."""

    def __new__(cls, *_: object) -> "Placeholder":
        return super().__new__(cls)


def _enum_member(owner: object, name: str) -> object:
    return Placeholder() if owner is Placeholder else enum_member(owner, name)


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """A checkpoint that was read, with the steps of the engine, and those of the optimizer (0: not read).

    parts: for each model-parallel rank, its parameters and moments, on the CPU; frozen parameters have no moments.
    """

    step: int
    optimizer_steps: int
    parts: list[Part]


def is_deepspeed(path: str | Path) -> bool:
    """Return True if a folder is a checkpoint of DeepSpeed's, or holds some and a file `latest` with the name of one."""
    path = Path(path)
    return (path / "latest").is_file() or any(path.glob("*mp_rank_*_model_states.pt"))


def read_deepspeed(path: str | Path, with_moments: bool = True) -> DeepSpeedCheckpoint:
    """Read a checkpoint whole. ValueError or FileNotFoundError, with one line, if that is not possible."""
    folder = _folder(Path(path))
    models, optimizers = _files(folder, MODEL_STATES), _files(folder, OPTIMIZER_STATES)
    if not models:
        raise FileNotFoundError(f"{folder} holds no model states of DeepSpeed")
    parts: list[Part] = []
    steps, optimizer_steps = set(), set()
    for rank in sorted(models):
        states = [_load(file) for file in models[rank]]
        optimizer_states = [_load(file) for file in optimizers.get(rank, [])]
        try:
            partitions = [state["optimizer_state_dict"] for state in optimizer_states]
            _check_complete(folder, states[0], len(models), partitions)
            steps.add(states[0]["global_steps"])
            part, done = _part(states, partitions, with_moments)
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"{folder} is damaged, or not of an AdamW in DeepSpeed 0.19 ({reason})") from None
        parts.append(part)
        optimizer_steps.add(done)
    if len(steps) > 1 or len(optimizer_steps) > 1:
        raise ValueError(f"{folder} holds files of several steps: {sorted(steps)}, {sorted(optimizer_steps)}")
    return DeepSpeedCheckpoint(steps.pop(), optimizer_steps.pop(), parts)


def step_of_deepspeed(path: str | Path) -> int:
    """The number of steps that a checkpoint has done; errors as `read_deepspeed`."""
    folder = _folder(Path(path))
    models = _files(folder, MODEL_STATES)
    step = _load(models[0][0]).get("global_steps") if 0 in models else None
    if type(step) is not int:
        raise ValueError(f"{folder} holds no model states of DeepSpeed with a number of steps")
    return step


def checksum_of_deepspeed(path: str | Path) -> int:
    """The CRC-32 of the checksums of a checkpoint's files; reads only their tables of contents."""
    names, checksum = (MODEL_STATES, OPTIMIZER_STATES), 0
    files = [file for file in _folder(Path(path)).glob("*.pt") if any(name.fullmatch(file.name) for name in names)]
    for file in sorted(files):
        with zipfile.ZipFile(file) as archive:
            checksum = zlib.crc32(repr([entry.CRC for entry in archive.infolist()]).encode(), checksum)
    return checksum


# Files


def _folder(path: Path) -> Path:
    """The folder of the checkpoint that `path` is, or that its file `latest` names."""
    if not (path / "latest").is_file():
        return path
    name = (path / "latest").read_text(encoding="utf-8", errors="replace").strip()
    if Path(name).name != name or not (path / name).is_dir():
        raise ValueError(f"{path / 'latest'} names {name!r}, which is not a folder next to it")
    return path / name


def _files(folder: Path, pattern: re.Pattern) -> dict[int, list[Path]]:
    """{model-parallel rank: the files of its replicas}."""
    found: dict[int, dict[int, Path]] = {}
    for path in folder.glob("*.pt"):
        if match := pattern.fullmatch(path.name):
            found.setdefault(int(match[2]), {})[int(match[1] or 0)] = path
    return {rank: [files[replica] for replica in sorted(files)] for rank, files in found.items()}


def _load(path: Path) -> dict[str, Any]:
    """The contents of a file, whose tensors are mapped from it; ValueError if it cannot be read without running code.

    The whole file is read once before, because torch.load does not compare its checksums.
    """
    try:
        with zipfile.ZipFile(path) as file:
            if (changed := file.testzip()) is not None:
                raise ValueError(f"it is damaged: {changed} does not have its checksum")
        unknown = {*torch.serialization.get_unsafe_globals_in_checkpoint(path)} - {"builtins.getattr"}
        if foreign := [name for name in unknown if not name.startswith("deepspeed.")]:
            raise ValueError(f"it holds an object of {foreign[0]}, which is not loaded because that could run any code")
        replaced: list[Any] = [(_enum_member, "builtins.getattr"), *((Placeholder, name) for name in unknown)]
        with torch.serialization.safe_globals(replaced):
            return {**torch.load(path, map_location="cpu", mmap=True, weights_only=True)}
    except Exception as error:  # a damaged or foreign pickle may raise anything
        raise ValueError(f"cannot read {path}: {first_line(error)}") from None


def _check_complete(folder: Path, states: dict[str, Any], ranks: int, partitions: list[dict[str, Any]]) -> None:
    replicas: Any = len(partitions)
    if states["optimizer"] is None:
        replicas = partitions[0]["partition_count"] if partitions else "all"
        replicas = max(replicas) if isinstance(replicas, list) else replicas
    if (ranks, len(partitions)) != (states["mp_world_size"], replicas):
        raise ValueError(
            f"{folder} lacks files: it holds the model states of {ranks} of {states['mp_world_size']} ranks, and the "
            f"optimizer states of {len(partitions)} of {replicas} replicas"
        )


# Parameters and moments


def _part(states: list[dict[str, Any]], partitions: list[dict[str, Any]], with_moments: bool) -> tuple[Part, int]:
    """(parameters of one model-parallel rank, number of steps of the optimizer), from the states of its replicas."""
    kinds = ("model", *MOMENTS) if with_moments else ("model",)
    if not partitions:
        named = _named(states[0])
        if not with_moments:
            return named, 0
        optimizer = states[0]["optimizer"]
        _add_moments(named, states[0], optimizer["state"])
        return named, _steps(optimizer["state"])
    if "fp32_flat_groups" in partitions[0]:
        inner = [partition["optimizer_state_dict"]["state"] for partition in partitions]
        flat = {"model": [partition["fp32_flat_groups"] for partition in partitions]}
        join, part = _join_stage_3, _frozen(states)
    else:
        bases = [partition["base_optimizer_state"] for partition in partitions]
        inner = [base["state"] if isinstance(base, dict) else dict(enumerate(base)) for base in bases]
        flat = {"model": [partition["single_partition_of_fp32_groups"] for partition in partitions]}
        join, part = _join_stage_1, _named(states[0])
    for kind in kinds[1:]:
        flat[kind] = [[state[index][kind] for index in range(len(state))] for state in inner]
    for kind in kinds:
        for name, tensor in join(states[0]["param_shapes"], flat[kind], partitions[0]):
            part.setdefault(name, {})[kind] = tensor
    return part, _steps(inner[0]) if with_moments else 0


def _steps(state: dict[int, dict[str, Any]]) -> int:
    return int(state[0]["step"])


def _named(states: dict[str, Any]) -> Part:
    return {name: {"model": t} for name, t in states["module"].items() if name not in states["buffer_names"]}


def _add_moments(part: Part, states: dict[str, Any], moments: dict[int, dict[str, torch.Tensor]]) -> None:
    """Add the moments of ZeRO 0, which are stored in the optimizer's order. ValueError if that order is not known."""
    names = states[NAMES] if NAMES in states else list(part)
    if len(moments) != len(names) or (NAMES not in states and len(states["optimizer"]["param_groups"]) > 1):
        raise ValueError(
            "with ZeRO 0 DeepSpeed does not say which parameters the optimizer's state belongs to; begin with the weights: "
            "megatron-ssm convert, then --init-from"
        )
    for name, held in zip(names, (moments[index] for index in range(len(names))), strict=True):
        part[name] |= {kind: held[kind] for kind in MOMENTS}


Flat = list[list[torch.Tensor]]  # for each replica, its part of each group


def _join_stage_1(
    shapes: list[dict[str, torch.Size]], flat: Flat, partition: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) from ZeRO 1 or 2: the replicas' parts of a group, one behind the other, are its parameters."""
    paddings = partition.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    for index, group in enumerate(shapes):
        whole = torch.cat([groups[index] for groups in flat])
        offset = 0
        for (name, shape), padding in zip(group.items(), paddings[index], strict=True):
            yield name, whole[offset : offset + shape.numel()].view(shape)
            offset += shape.numel() + padding


def _join_stage_3(
    shapes: list[dict[str, torch.Size]], flat: Flat, partition: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) from ZeRO 3: of each parameter in turn, every replica has an equally long part."""
    vectors, offset = [torch.cat([part.flatten() for part in groups]) for groups in flat], 0
    for name, shape in (item for group in shapes for item in group.items()):
        length = math.ceil(shape.numel() / len(vectors))
        whole = torch.cat([vector[offset : offset + length] for vector in vectors])
        yield name, whole[: shape.numel()].view(shape)
        offset += length


def _frozen(states: list[dict[str, Any]]) -> Part:
    """The parameters that ZeRO 3 does not update; each replica's model states have a part of them."""
    part: Part = {}
    for name, shape in (states[0]["frozen_param_shapes"] or {}).items():
        pieces = [replica["frozen_param_fragments"][name].flatten() for replica in states]
        part[name] = {"model": torch.cat(pieces)[: shape.numel()].view(shape)}
    return part


# Into a model in training


@torch.no_grad()
def load_checkpoint(
    path: str | Path, step: int, model: Model, optimizer: torch.optim.Optimizer | GatheredState
) -> None:
    """`load_training`, or the same from a checkpoint of DeepSpeed's, of any number of model-parallel ranks and replicas.

    Its module is our model, or holds it: names end in those of our parameters. It has no random state. Every rank reads all
    of its files on the CPU; ValueError on every rank if one of them cannot, if the parameters are not those of the model, or
    if the ranks find different files. Gathers the ranks' errors and checksums over the default group, as pickles.
    """
    if not is_deepspeed(path):
        return load_training(path, step, model, optimizer)
    fields = {field_of(parameter).name: field_of(parameter) for parameter in model.parameters()}
    frozen = {field_of(parameter).name for parameter in model.parameters() if not parameter.requires_grad}

    @in_one_line(f"cannot resume from {path}", ValueError)
    def read() -> DeepSpeedCheckpoint:
        saved = read_deepspeed(path)
        parts = [_under_our_names(part, rank, len(saved.parts), fields) for rank, part in enumerate(saved.parts)]
        for name, tensors in parts[0].items():
            if name not in frozen and not tensors.keys() >= {*MOMENTS}:
                raise ValueError(f"{name} has no moments")
        return DeepSpeedCheckpoint(saved.step, saved.optimizer_steps, parts)

    def described(_: DeepSpeedCheckpoint) -> str:
        return f"{path} with files of CRC-32 {checksum_of_deepspeed(path):08x}"

    saved = together(read, [dist.group.WORLD], described)
    for entry, target in state_to_fill(model, optimizer, saved.optimizer_steps).items():
        kind, _, name = entry.partition(".")
        if name in fields:
            whole = _whole(fields[name], [part[name][kind] for part in saved.parts])
            local = target.to_local() if isinstance(target, DTensor) else target
            local.copy_(whole[fields[name].piece(*model.place.part)])
    return None


def _under_our_names(part: Part, rank: int, ranks: int, fields: dict[str, Field]) -> Part:
    """The parameters of model-parallel rank `rank`, without the prefix of our names. ValueError unless they are `fields`."""
    first = next(iter(fields))
    prefix = next((name.removesuffix(first) for name in part if name.endswith(first)), "")
    ours = {name.removeprefix(prefix): tensors for name, tensors in part.items()}
    if missing := sorted(fields.keys() - ours.keys()):
        raise ValueError(f"it has no {missing[0]}; a model of transformers is converted first: megatron-ssm convert")
    _check_shapes(ours, {name: field.local_shape(rank, ranks) for name, field in fields.items()}, rank, ranks)
    return ours


def _check_shapes(part: Part, expected: dict[str, tuple[int, ...]], rank: int = 0, ranks: int = 1) -> None:
    """ValueError if model-parallel rank `rank` has another parameter than `expected`, {name: shape}, or another shape."""
    for name, tensors in sorted(part.items()):
        shapes = {tuple(tensor.shape) for tensor in tensors.values()}
        if name not in expected or shapes != {expected[name]}:
            known = f"this model has {expected[name]}" if name in expected else "this model does not have it"
            raise ValueError(f"{name} is {', '.join(map(str, shapes))} on rank {rank} of {ranks}; {known}")


def _whole(field: Field, pieces: list[torch.Tensor]) -> torch.Tensor:
    if field.split is None or len(pieces) == 1:
        return pieces[0]
    whole = torch.empty(field.shape, dtype=pieces[0].dtype)
    for rank, piece in enumerate(pieces):
        whole[field.piece(rank, len(pieces))] = piece
    return whole


# Into Hugging Face's tensors


def hugging_face_tensors(path: str | Path, config: Stack) -> dict[str, tuple[str, torch.Tensor]]:
    """{Hugging Face's name: (names in the checkpoint, tensor)} of a checkpoint of our model, or of transformers'.

    ValueError if the checkpoint is not of such a model.
    """
    parts, fields = read_deepspeed(path, with_moments=False).parts, list(config.fields())
    shapes = hf_shapes(fields)
    named = {hf: next((name for name in config.names_in_files(hf) if name in parts[0]), None) for hf in shapes}
    if len(parts) == 1 and all(named.values()):
        _check_shapes(parts[0], {name: shape for hf, shape in shapes.items() for name in config.names_in_files(hf)})
        return {hf: (name, parts[0][name]["model"]) for hf, name in named.items() if name is not None}
    by_name = {field.name: field for field in fields}
    ours = [_under_our_names(part, rank, len(parts), by_name) for rank, part in enumerate(parts)]
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for field in fields:
        whole = _whole(field, [part[field.name]["model"] for part in ours])
        names, tensor = found.get(field.hf, ("", torch.empty(shapes[field.hf], dtype=whole.dtype)))
        field.write(tensor, whole, 0, 1)
        found[field.hf] = (f"{names} {field.name}".lstrip(), tensor)
    return found
