"""DeepSpeed's own checkpoints in our models: into a model in training, or as the tensors of a Hugging Face directory."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from commfabric.collectives.agreement import together
from megatron_ssm.model.model import Model
from megatron_ssm.spec.fields import Field, field_of, hf_shapes
from megatron_ssm.spec.stack import Stack

from .deepspeed_files import DeepSpeedCheckpoint, Part, checksum_of_deepspeed, is_deepspeed, read_deepspeed
from .failures import in_one_line
from .training import MOMENTS, GatheredState, load_training, state_to_fill

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
    """A whole parameter from the pieces of all model-parallel ranks."""
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
        return _of_transformers(parts[0], config, named, shapes)
    by_name = {field.name: field for field in fields}
    ours = [_under_our_names(part, rank, len(parts), by_name) for rank, part in enumerate(parts)]
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for field in fields:
        whole = _whole(field, [part[field.name]["model"] for part in ours])
        names, tensor = found.get(field.hf, ("", torch.empty(shapes[field.hf], dtype=whole.dtype)))
        field.write(tensor, whole, 0, 1)
        found[field.hf] = (f"{names} {field.name}".lstrip(), tensor)
    return found


def _of_transformers(
    part: Part, config: Stack, named: dict[str, str | None], shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[str, torch.Tensor]]:
    _check_shapes(part, {name: shape for hf, shape in shapes.items() for name in config.names_in_files(hf)})
    return {hf: (name, part[name]["model"]) for hf, name in named.items() if name is not None}
