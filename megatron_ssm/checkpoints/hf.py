"""Hugging Face directories in and out: each rank reads only its own slices, and shards are gathered file by file."""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import aliases, field_of, hf_shapes, layout
from megatron_ssm.models.model import Model
from megatron_ssm.native.kernels import BLOCK
from megatron_ssm.ops.matrices import prefer_huge_pages, quantize
from megatron_ssm.parallel.layers import QUANTIZABLE, Ranks
from sparsefusion import FORMATS
from sparsefusion.collectives.counted import Counter
from sparsefusion.reduction.quantized import automatic

log = logging.getLogger("megatron_ssm")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_BYTES = 4 * 10**9
COMPARED_ROWS = 1024  # at once
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What travels with the weights from a loaded directory to a saved one.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "tokenizer.model.v3", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def load(
    directory, group=None, context=None, dtype=torch.float32, device="cpu", reduce="fp32", data_group=None, weights=None,
    shared_memory=True, graphs=True,
) -> Model:  # fmt: skip
    """A model from a Hugging Face directory (config.json and safetensors), split over the ranks of `group`.

    group: the tensor-parallel process group (None: one rank). data_group: the ranks that hold other tokens of the same
    batch, over which `model.loss` averages. dtype: of parameters and activations; A_log, D and the dt bias are at least
    fp32. reduce: how the block outputs (out_proj, o_proj, down_proj) are summed: fp32, fp16, bf16, int8 or auto
    (`sparsefusion.all_reduce`; auto measures the group's links here, once), or a callable (tensor, group) -> tensor.
    shared_memory: ranks of one host sum tensors of the CPU through memory that they share (`model.close()` gives it
    up), where the C kernels are there, and `auto` is fp32 then; False: always by the group's backend.
    weights: "int8" keeps the matrices in 8 bits, for a model that only generates (`weights.py`); None: in dtype.
    graphs: on CUDA, tokens are decoded by CUDA graphs where they can be (`graphs.py`); False: never.
    Every rank reads its own slices only: at its peak it holds its parameters and one slice.
    ValueError or FileNotFoundError, on every rank and before anything is sent, for a configuration that cannot be split
    or honoured, and for tensors that are missing, truncated, or of another model.
    """
    if context is not None:
        raise ValueError("context parallelism is not implemented yet: context must be None")
    if not callable(reduce) and reduce not in FORMATS:
        raise ValueError(f"reduce={reduce!r} is none of {', '.join(FORMATS)}, nor a callable")
    if weights not in (None, "int8"):
        raise ValueError(f"weights={weights!r} is neither None nor 'int8'")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating-point torch dtype")
    if not Path(directory).is_dir():
        raise FileNotFoundError(f"{directory} is not a directory")
    config = Config.read(directory)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(Path(directory), stack)
        names = match_tensors(config, tensors, directory)
        model = build(config, group, data_group, dtype, device, reduce, shared_memory)
        with torch.no_grad():
            rounded = _fill(model, lambda p: _read(p, tensors[names[field_of(p).hf]], model.ranks), weights)
    if weights is not None:
        _freeze(model, weights, rounded, directory)
    model.directory, model.graphs = Path(directory), bool(graphs)  # type: ignore[assignment]
    if config.unknown and model.ranks.rank == 0:
        log.warning(config.describe_unknown())
    return model


def build(
    config: Config, group=None, data_group=None, dtype=torch.float32, device="cpu", reduce="fp32", shared_memory=True
) -> Model:
    """A model of this configuration with uninitialized parameters; see `load` for the arguments."""
    ranks = Ranks.of(group, Counter(), reduce, share=shared_memory if torch.device(device).type == "cpu" else None)
    if reduce == "auto" and ranks.group is not None and ranks.memory is None:
        automatic(ranks.group, device)
    data_group = None if data_group is None or data_group.size() == 1 else data_group
    model = Model(config, ranks, data_group, dtype, device)
    prefer_huge_pages(model.parameters())
    return model


def open_tensors(directory: Path, stack) -> dict:
    """{name: safetensors slice} of every tensor in the directory; opening checks that each file is whole."""
    if (directory / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif (directory / INDEX).is_file():
        try:
            files = sorted(set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
            foreign = [name for name in files if Path(name).name != name]
        except (ValueError, KeyError, AttributeError, TypeError):
            foreign = [INDEX]
        if foreign:
            raise ValueError(f"{directory / INDEX} is not an index of safetensors files in its directory")
    else:
        raise FileNotFoundError(f"{directory} holds neither {WEIGHTS} nor {INDEX}")
    tensors = {}
    for name in files:
        path = directory / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is named in {INDEX} but does not exist")
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file ({error})") from None
        tensors.update((key, handle.get_slice(key)) for key in handle.keys())
    return tensors


def match_tensors(config: Config, tensors: dict, directory) -> dict[str, str]:
    """{Hugging Face name: name in these files}, every tensor there with its right shape and a floating dtype."""
    names, known = {}, set()
    for hf, shape in hf_shapes(layout(config)).items():
        known.update(aliases(config, hf))
        name = next((n for n in aliases(config, hf) if n in tensors), None)
        if name is None:
            raise ValueError(f"{directory} has no tensor {hf} {shape}")
        if tuple(tensors[name].get_shape()) != shape:
            raise ValueError(
                f"{directory}: {name} is {tuple(tensors[name].get_shape())}, its configuration says {shape}"
            )
        if tensors[name].get_dtype() not in FLOATS:
            raise ValueError(f"{directory}: {name} is {tensors[name].get_dtype()}, not one of {', '.join(FLOATS)}")
        names[hf] = name
        _check_copies(tensors, name, set(aliases(config, hf)) & set(tensors), directory)
    left = sorted(set(tensors) - known)
    if left:
        raise ValueError(
            f"{directory} has {len(left)} tensors that a {config.family} model does not use, such as {left[0]}"
        )
    return names


def _check_copies(tensors, name, copies, directory) -> None:
    """ValueError if what is one tensor in the model is several in the files, and they differ."""
    for other in sorted(copies - {name}):
        first, second = tensors[name], tensors[other]
        rows = range(0, first.get_shape()[0], COMPARED_ROWS)
        same = first.get_shape() == second.get_shape() and first.get_dtype() == second.get_dtype()
        if not same or not all(torch.equal(*(t[i : i + COMPARED_ROWS] for t in (first, second))) for i in rows):
            raise ValueError(f"{directory}: {name} and {other} differ, but its configuration makes them one")


def _fill(module, read, weights) -> list[bool]:
    """Read a module's parameters, then its children's; matrices that are to be rounded, each as soon as it is there.

    Returns of each such matrix whether it could be.
    """
    for parameter in module.parameters(recurse=False):
        read(parameter)
    rounded = [done for child in module.children() for done in _fill(child, read, weights)]
    if weights == "int8" and isinstance(module, QUANTIZABLE):
        rounded.append(quantize(module))
    return rounded


def _freeze(model, weights, rounded, directory) -> None:
    """A model with rounded weights is not trained; ValueError if it has none, a line if not all are."""
    rule = f"have rows, on {model.ranks.size} ranks, that are no multiple of {BLOCK} numbers long"
    if not any(rounded):
        raise ValueError(f"weights={weights!r} rounds nothing of {directory}: all {len(rounded)} matrices {rule}")
    model.weights = weights
    model.requires_grad_(False)
    if not all(rounded) and model.ranks.rank == 0:
        log.warning(
            f"weights={weights!r}: {rounded.count(False)} of {len(rounded)} matrices {rule}, and stay as they are"
        )


def _read(parameter, tensor, ranks: Ranks) -> None:
    """Copy this rank's piece of a stored tensor into the parameter."""
    if parameter.numel():
        parameter.copy_(field_of(parameter).read(tensor, ranks.rank, ranks.size))


def save(model: Model, directory, file_bytes: int = FILE_BYTES) -> None:
    """Write a Hugging Face directory that transformers loads; collective over the model's ranks (and its data group).

    Rank 0 (of the first data-parallel replica) receives the shards tensor by tensor, holds at most one file's tensors,
    at most `file_bytes`, and writes; files appear under their names only when all are complete. Configuration,
    tokenizer and generation files come along from where the model was loaded. A tensor kept in fp32 (A_log, ...) is
    stored in the model's dtype where that is exact. An error of the writing rank is raised on every rank.
    """
    model.check_exact_weights("saved")
    plan = _plan(model, file_bytes)
    if model.data_group is None or dist.get_rank(model.data_group) == 0:
        stages = _save_replica(model, Path(directory), plan)
    else:
        stages = iter([None] * (len(plan) + 2))
    for error in stages:
        if error := _broadcast(error, model.data_group, model.device):
            raise OSError(error)


def _save_replica(model, directory, plan) -> Iterator[str | None]:
    """Write from the ranks of one replica, stage by stage; yields each stage's error, the same on all of them."""
    writer = Writer(directory) if model.ranks.rank == 0 else None

    def stage(step, *arguments):
        error = writer and writer.attempt(getattr(writer, step), *arguments)
        return _broadcast(error, model.ranks.group, model.device)

    yield stage("open")
    for name, tensors in plan.items():
        gathered = {hf: _gather(model, hf, parameters) for hf, parameters in tensors.items()}
        yield stage("write", name, gathered)
        del gathered
    config = model.config.to_dict(str(model.dtype).removeprefix("torch."))
    yield stage("close", config, model.directory, {hf: name for name, tensors in plan.items() for hf in tensors})


def _broadcast(value, group, device):
    """Rank 0's value on every rank of the group."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=group, device=device)
    return box[0]


def _plan(model, file_bytes) -> dict[str, dict]:
    """{file: {Hugging Face tensor: [its parameters]}}, filled in layout order up to `file_bytes`."""
    tensors: dict[str, list] = {}
    for parameter in model.parameters():
        tensors.setdefault(field_of(parameter).hf, []).append(parameter)
    sizes = {
        hf: sum(torch.Size(field_of(p).shape).numel() * p.element_size() for p in parameters)
        for hf, parameters in tensors.items()
    }
    return {file: {hf: tensors[hf] for hf in names} for file, names in file_plan(sizes, file_bytes).items()}


def file_plan(sizes: dict[str, int], file_bytes: int) -> dict[str, list[str]]:
    """{file: its tensors}, from {tensor: its bytes}: filled in order up to `file_bytes` (a larger tensor has its own)."""
    files, held = [[]], 0
    for name, nbytes in sizes.items():
        if files[-1] and held + nbytes > file_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += nbytes
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


@torch.no_grad()
def _gather(model, hf, parameters):
    """The whole Hugging Face tensor on rank 0 (None elsewhere): each rank sends its pieces of it, once."""
    ranks = model.ranks
    whole = None
    if ranks.rank == 0:
        shape = hf_shapes([field_of(p) for p in parameters])[hf]
        whole = torch.empty(shape, dtype=parameters[0].dtype)
    for parameter in parameters:
        field = field_of(parameter)
        for rank in range(0, ranks.size, field.copies(ranks.size)):
            if 0 in (shape := field.local_shape(rank, ranks.size)):
                continue
            if ranks.rank == 0:
                piece = parameter
                if rank:
                    piece = torch.empty(shape, dtype=parameter.dtype, device=model.device)
                    dist.recv(piece, group=ranks.group, group_src=rank)
                field.write(whole, piece, rank, ranks.size)
                del piece  # or it would stay while the next one is received
            elif ranks.rank == rank:
                dist.send(parameter.contiguous(), group=ranks.group, group_dst=0)
    if whole is not None and field_of(parameters[0]).fp32:
        narrow = whole.to(model.dtype)
        whole = narrow if narrow.to(whole.dtype).equal(whole) else whole
    return whole


class Writer:
    """Rank 0's side of `save`: files are written in a hidden folder and moved into place together."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.hidden: Path | None = None

    def attempt(self, step, *arguments) -> str | None:
        """Run a step; an error becomes a line of text, and leaves nothing behind."""
        try:
            step(*arguments)
        except Exception as error:  # whatever it is, the other ranks must learn of it
            self.abandon()
            return f"cannot save to {self.directory}: {error}"
        return None

    def abandon(self):
        """Remove what was written."""
        if self.hidden is not None:
            shutil.rmtree(self.hidden, ignore_errors=True)

    def open(self):
        """Make the directory, and a hidden folder of this writer's own in it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.hidden = Path(tempfile.mkdtemp(prefix=".saving-", dir=self.directory))

    def write(self, name, tensors):
        """One file of tensors."""
        save_file(tensors, self.hidden / name, metadata={"format": "pt"})

    def close(self, config: dict, source, weight_map: dict):
        """The index, config.json, and companions from `source`; then everything into place, older weights removed.

        weight_map: {tensor: its file}, written as an index where there are several files.
        """
        files = set(weight_map.values())
        if len(files) > 1:
            size = sum((self.hidden / name).stat().st_size for name in files)
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (self.hidden / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        (self.hidden / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in COMPANIONS:
            if source is not None and (source / name).is_file():
                shutil.copyfile(source / name, self.hidden / name)
        new = os.listdir(self.hidden)
        for name in new:
            os.replace(self.hidden / name, self.directory / name)
        for old in [*self.directory.glob("model*.safetensors"), self.directory / INDEX]:
            if old.name not in new:
                old.unlink(missing_ok=True)
        self.hidden.rmdir()
