"""Models from Hugging Face directories and back: each rank reads only its own slices; saving gathers tensor by tensor."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from attention2d import Attention2D
from commfabric import FORMATS
from commfabric.collectives.agreement import together
from commfabric.collectives.counted import Counter
from commfabric.foundation.json_files import read_json
from commfabric.reduction.quantized import format_choice
from megatron_ssm.kernels.huge_pages import HugePages, trim_heap
from megatron_ssm.kernels.products import BLOCK
from megatron_ssm.kernels.quantized_matrices import QUANTIZED_FORMATS, QuantizedMatrix, narrowed, quantize
from megatron_ssm.layers import families
from megatron_ssm.layers.operator import Operator
from megatron_ssm.model.context import check_schedule
from megatron_ssm.model.model import Model
from megatron_ssm.model.parameters import fields_of
from megatron_ssm.parallel.layers import QUANTIZABLE, ExpertMatrices, Packed, Ranks, VocabularyParallel
from megatron_ssm.parallel.recomputation import Recomputation
from megatron_ssm.spec.fields import Field, field_of, hf_shapes
from megatron_ssm.spec.stack import Stack

from .disk import os_errors_as
from .hf_directory import (
    FILE_BYTES,
    FLOATS,
    PROCESSOR_FILES,
    Merged,
    Writer,
    file_plan,
    has_draft_head,
    left_out_note,
    match_tensors,
    open_tensors,
    stored_bytes,
    weight_files,
)
from .quantized_files import format_of, is_quantized, join_scales, read_quantized

log = logging.getLogger("megatron_ssm")
# Layers with the largest matrices, which are quantized piece by piece, so that no whole one is in floating point
IN_PIECES = (ExpertMatrices, VocabularyParallel)
PIECE = 4096  # rows of a vocabulary


# Loading


def load(
    directory: str | Path,
    group: ProcessGroup | None = None,
    context: Attention2D | None = None,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    reduce: str | Callable[[torch.Tensor, ProcessGroup], torch.Tensor] = "fp32",
    data_group: ProcessGroup | None = None,
    weights: str | None = None,
    shared_memory: bool = True,
    graphs: bool = True,
    sequence_parallel: bool = False,
    recompute: bool = False,
    exchange_channels: bool = False,
    draft_head: bool = False,
    expert_group: ProcessGroup | None = None,
) -> Model:
    """A model from a Hugging Face directory, split over the ranks of `group`.

    Every rank reads its own slices only: at its peak it holds its parameters and one slice. The ranks compare the arguments
    and the files before the model is built, and wait for each other after it is filled.

    Args:
        directory: With config.json, and safetensors files or pytorch_model.bin.
        group: The tensor-parallel process group (None: one rank).
        context: A schedule of `attention2d`, over whose ranks each sequence is spread (None: each rank has whole sequences).
            The model then takes and returns this rank's tokens, `context.shard(input_ids)`. The schedule computes the
            attention of a hybrid model.
        dtype: Of parameters and activations, also by name ("bfloat16"). "auto" is the dtype that config.json names, else
            that of the stored embeddings, as in transformers. To train, pass torch.float32. A_log, D and the dt bias are at
            least fp32.
        device: Of the parameters.
        reduce: The wire format in which block outputs (out_proj, o_proj, down_proj) are summed: fp32, fp16, bf16, int8 or
            auto (see `commfabric.all_reduce`; auto measures the group's links here, once), or a callable (tensor, group)
            -> tensor.
        data_group: The ranks that hold other tokens of the same batch, over which `model.loss` averages (None: there are
            none).
        weights: "int8" or "int4" keeps the matrices in 8 or 4 bits, for a model that only generates on a CPU. None keeps
            them in `dtype`, or as they are stored in a directory of quantized matrices (see `quantized_files`).
        shared_memory: Sum CPU tensors of ranks on one host through memory that they share, if they all have the C kernels;
            `auto` then is fp32, and `model.close()` releases the memory. False: always through the group's backend.
        graphs: On CUDA, decode tokens with CUDA graphs where that is possible.
        sequence_parallel: Between the layers, give each tensor-parallel rank a share of the tokens (see
            `parallel.sequence_parallel`). This saves memory in training; such a model takes no cache and needs
            reduce="fp32".
        recompute: In backward, compute the activations of each block again, except what ranks have sent each other.
        exchange_channels: Without a cache, state-space layers give each context rank all tokens of some channels, instead
            of passing states; this sends less where sequences are short (docs/concepts/passing-states.md).
        draft_head: Also load the layer that guesses tokens (`mtp.*`), for checkpoints that ship one. An `Engine` then
            proposes tokens by it, and the cache also keeps the final hidden state of each token. On a CPU, the head's rows
            of the vocabulary are copied in 4 bits, to find likely tokens. It is not trained.
        expert_group: The ranks that divide the experts of the model, each of which has the same part of everything else
            (None: one rank). Calls with a cache are the same on all of them; in others each has tokens of its own, or none,
            and the ranks send each other those that choose their experts (see `parallel.dispatch`). All of them make each
            call and each backward.

    Returns:
        The model, with this rank's part of the parameters.

    Raises:
        ValueError: The configuration is not supported or cannot be split; tensors are missing, truncated, or of another
            model; the ranks' configurations or arguments differ. It is raised on every rank of these groups, before the
            model is built.
        FileNotFoundError: The directory or a file does not exist. If a rank alone cannot read a file, every rank raises its
            error.
    """
    groups = (group, data_group, context.group if isinstance(context, Attention2D) else None, expert_group)
    part = f"part {0 if group is None else group.rank()} of the model"

    def open_files() -> tuple[Stack, dict[str, Any], torch.dtype]:
        if not callable(reduce) and reduce not in FORMATS:
            raise ValueError(f"reduce={reduce!r} is neither one of {', '.join(FORMATS)} nor a callable")
        if weights not in (None, *QUANTIZED_FORMATS):
            raise ValueError(f"weights={weights!r} is neither None nor one of {', '.join(QUANTIZED_FORMATS)}")
        asked = dtype_of(dtype)
        families.check_directory(directory)
        with os_errors_as(f"cannot read {directory}", ValueError):
            config, tensors = _open(Path(directory), groups, context, exchange_channels, draft_head, stack)
        _check_quantized(config, directory, weights, sequence_parallel, device)
        if weights or format_of(config.raw):
            config = config.in_granules(BLOCK, _size(group))
        if asked == "auto":
            asked = dtype_of(config.raw.get("dtype") or config.raw.get("torch_dtype") or "auto")
        if asked == "auto":
            asked = FLOATS[next(iter(tensors.values())).get_dtype()]  # that of the embeddings
        return config, tensors, asked

    def same(opened: tuple[Stack, dict[str, Any], torch.dtype]) -> dict[str, object]:
        config, _, found = opened
        return {
            "dtype": found, "device": torch.device(device).type, "weights": weights, "context": context,
            "reduce": "callable" if callable(reduce) else reduce, "sequence_parallel": sequence_parallel,
            "recompute": recompute, "exchange_channels": exchange_channels, "replicas": _size(data_group),
            "expert-parallel ranks": _size(expert_group), "family": config.family, "layers": config.num_layers,
            "config": config,
        }  # fmt: skip

    def build_and_fill() -> Model:
        options = found, device, reduce, shared_memory, context, sequence_parallel, recompute, exchange_channels
        kept = weights or format_of(config.raw)
        model = build(config, group, data_group, *options, expert_group, nullcontext() if kept else None)
        with os_errors_as(f"cannot read {directory}", ValueError):
            _read_parameters(model, tensors, kept, directory)
        if model.draft_head is not None:
            model.draft_head.copy_vocabulary(model.logits_layer)
        return model

    with ExitStack() as stack:
        config, tensors, found = together(open_files, groups, same, device)
        together(lambda: part, groups[1:], str, device)  # ranks that hold other tokens hold the same part
        model = together(build_and_fill, groups, device=device)
    model.directory, model.graphs = Path(directory), model.graphs and bool(graphs)
    if config.unknown_note and model.ranks.rank == 0:
        log.warning(config.unknown_note)
    return model


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def dtype_of(dtype: object) -> Any:
    """A floating-point torch.dtype, given as it is or by name, or "auto"; ValueError for anything else."""
    found = dtype if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."), None)
    if found not in ("auto", *FLOATS.values()):
        raise ValueError(f"dtype={dtype} is neither auto nor a floating-point torch dtype")
    return found


def _check_quantized(
    config: Stack, directory: str | Path, weights: str | None, sequence_parallel: bool, device: torch.device | str
) -> None:
    """ValueError for arguments of `load` that quantized matrices, or those of the directory, do not allow."""
    stored = format_of(config.raw)
    if stored and weights not in (None, stored):
        raise ValueError(f"weights={weights!r}: {directory} holds matrices in {stored}")
    if (stored or weights) and (sequence_parallel or stored and torch.device(device).type != "cpu"):
        raise ValueError(
            f"{directory}: matrices in {stored or weights} are only for generation on a CPU, without sequence_parallel"
        )


def _open(
    directory: Path,
    groups: tuple[ProcessGroup | None, ...],
    context: Attention2D | None,
    exchange_channels: bool,
    draft_head: bool,
    files: ExitStack,
) -> tuple[Stack, dict[str, Any]]:
    """The configuration, and {Hugging Face tensor: slice object}; ValueError if the ranks cannot split the model.

    The tensors can be read until `files` is closed.
    """
    config = families.read(directory)
    config = config.with_draft_head() if draft_head else config
    group, data_group, _, expert_group = groups
    config.check_ranks(_size(group), _size(expert_group))
    check_schedule(context, config, group, data_group, exchange_channels)
    tensors = open_tensors(directory, files)
    if stored := format_of(config.raw):
        tensors = join_scales(tensors, weight_files(directory), stored, files)
    if config.draft_head and draft_head and not has_draft_head(config, tensors):
        raise ValueError(
            f"draft_head=True: {directory} has no tensors {config.draft_head.hf}*; it was saved without them"
        )
    notes = config.unknown_note, left_out_note(config, tensors)
    config = replace(config, unknown_note="; ".join(note for note in notes if note))
    found = {hf: tensors[name] for hf, name in match_tensors(config, tensors, directory).items()}
    if any(each.apart for each in config.fields()):
        config = replace(config, apart=any(isinstance(each, Merged) for each in found.values()))
    return config, found


def build(
    config: Stack,
    group: ProcessGroup | None = None,
    data_group: ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    reduce: str | Callable[[torch.Tensor, ProcessGroup], torch.Tensor] = "fp32",
    shared_memory: bool = True,
    context: Attention2D | None = None,
    sequence_parallel: bool = False,
    recompute: bool = False,
    exchange_channels: bool = False,
    expert_group: ProcessGroup | None = None,
    memory: AbstractContextManager | None = None,
) -> Model:
    """A model of this configuration with uninitialized parameters.

    Args:
        config: The configuration of the whole model.
        memory: A context manager in which the parameters are allocated (None: in huge pages).

    See `load` for the other arguments.
    """
    config.check_ranks(_size(group), _size(expert_group))
    if sequence_parallel and reduce != "fp32":
        raise ValueError(f"reduce={reduce!r}: sequence_parallel=True sums in fp32")
    share = shared_memory if torch.device(device).type == "cpu" else None
    ranks = Ranks.of(group, Counter(), reduce, share, sequence_parallel, Recomputation(recompute))
    if reduce == "auto" and ranks.group is not None and ranks.memory is None:
        format_choice(ranks.group, device)
    experts = Ranks.of(expert_group, ranks.counter, reduce, share, recomputation=ranks.recomputation)
    data_group = None if data_group is None or data_group.size() == 1 else data_group
    with memory or HugePages():
        return Model(config, ranks, data_group, dtype, device, context, exchange_channels, experts)


def _read_parameters(model: Model, tensors: dict[str, Any], weights: str | None, directory: str | Path) -> None:
    """Fill a new model from {Hugging Face tensor: slice object}, and quantize it with `weights`; close it on an error."""
    try:
        with torch.no_grad():
            memory = HugePages()
            quantized = _fill(model, tensors, weights, memory, model.place.part)
        if weights is not None:
            trim_heap()
            _freeze(model, weights, quantized, directory)
    except BaseException:
        model.close()
        raise


def _fill(
    module: nn.Module, tensors: dict[str, Any], weights: str | None, memory: HugePages, part: Sequence[int]
) -> list[bool]:
    """Read the parameters of a module and of its children. With `weights`, quantize each matrix into `memory`.

    Matrices that are stored quantized are copied, unless ranks have parts of blocks. Other parameters are moved into
    `memory` as well (small matrices of operators as bfloat16), except packed fields, which are views of one storage.

    Args:
        tensors: {Hugging Face tensor: slice object}.
        weights: "int8", "int4", or None to quantize nothing.
        memory: The memory for the quantized matrices.
        part: The arguments of `Field.piece`.

    Returns:
        For each matrix of a quantizable layer, True if it is quantized.
    """
    quantized = []
    can_be_quantized = weights is not None and isinstance(module, QUANTIZABLE)
    is_stored = can_be_quantized and is_quantized(tensors[field_of(next(module.parameters())).hf])
    if is_stored:
        quantized.append(read_quantized(module, tensors, part, memory))
    elif (
        can_be_quantized
        and isinstance(module, IN_PIECES)
        and len(module.weight)
        and not module.weight.shape[-1] % BLOCK
    ):
        _quantize_in_pieces(module, tensors[field_of(module.weight).hf], str(weights), part, memory)
        return [True]
    small = module.small_matrices if isinstance(module, Operator) else ()
    for name, parameter in module.named_parameters(recurse=False):
        _read(parameter, tensors[field_of(parameter).hf], part)
        is_moved = weights is not None and parameter.is_cpu and not isinstance(module, Packed)
        if is_moved and not (can_be_quantized and name == "weight" and not is_stored):
            parameter.data = memory.copy(narrowed(parameter.data) if name in small else parameter.data)
    for child in module.children():
        if not isinstance(child, QuantizedMatrix):
            quantized += _fill(child, tensors, weights, memory, part)
    if weights is not None and can_be_quantized and not is_stored:
        with memory:
            quantized.append(quantize(module, weights))
    return quantized


def _quantize_in_pieces(module: nn.Module, tensor: Any, format: str, part: Sequence[int], memory: HugePages) -> None:
    """Read this rank's part of a large matrix, or of the matrices of experts, and quantize piece by piece into `memory`."""
    parameter: Any = module.weight
    kind, (count, *inner, columns) = QUANTIZED_FORMATS[format], parameter.shape
    rows_of_each = math.prod(inner)
    with memory:
        values, scales = kind.empty(count * rows_of_each, columns)
    at_once = 1 if inner else PIECE  # experts, or rows of a vocabulary
    for first in range(0, count, at_once):
        piece = slice(first, min(first + at_once, count))
        quantized = kind.of(field_of(parameter).read(tensor, *part, rows=piece).to(parameter.dtype).flatten(0, -2))
        rows = slice(piece.start * rows_of_each, piece.stop * rows_of_each)
        values[rows], scales[rows] = quantized.values, quantized.scales
    del module.weight
    module.register_module("weight", kind(values, scales, parameter.dtype))


def _freeze(model: Model, weights: str, quantized: list[bool], directory: str | Path) -> None:
    """Mark a quantized model, which is not trained; ValueError if no matrix was quantized, a log line if some were not."""
    reason = f"have rows, on {model.ranks.size} ranks, whose length is not a multiple of {BLOCK}"
    if not any(quantized):
        raise ValueError(
            f"weights={weights!r} quantizes nothing of {directory}: all {len(quantized)} matrices {reason}"
        )
    model.weights = weights
    model.requires_grad_(False)
    if not all(quantized) and model.ranks.rank == 0:
        log.warning(
            f"weights={weights!r}: {quantized.count(False)} of {len(quantized)} matrices {reason}, and stay as they are"
        )


def _read(parameter: nn.Parameter, tensor: Any, part: Sequence[int]) -> None:
    """Copy this rank's part of a stored tensor into the parameter; of experts, one matrix after the other."""
    field = field_of(parameter)
    if parameter.numel() and field.apart:
        for index, matrix in enumerate(parameter):
            matrix.copy_(field.read(tensor, *part, rows=slice(index, index + 1))[0])
    elif parameter.numel():
        parameter.copy_(field.read(tensor, *part))


# Saving


def save(model: Model, directory: str | Path, file_bytes: int = FILE_BYTES, left_out: bool = False) -> None:
    """Write a Hugging Face directory that transformers loads; all ranks of the model, its data and context groups call it.

    Rank 0 (of the first replica and the first context rank) receives the shards tensor by tensor, holds at most the tensors
    of one file, and writes them. Files appear under their names only when all are complete. Tokenizer and generation files
    are copied from the directory that the model was loaded from. A tensor kept in fp32 (A_log, ...) is stored in the model's
    dtype where that is exact. Every rank sends its part of each tensor to rank 0, once. Where ranks divide the experts, the
    first of them gathers these before.

    Args:
        model: A model that is not quantized.
        directory: Where to write; it may exist.
        file_bytes: The largest file to write. The tensors of one parameter (all experts of a layer) stay in one file.
        left_out: Also copy what `load` left out of the model's directory (a vision tower, a draft head), with the names of
            its tensors and its config.json, so that a multimodal checkpoint remains one.

    Raises:
        OSError: The writing rank has failed; on every rank.
        ValueError: The model is quantized, the ranks were given different values of `file_bytes`, or one of them no path;
            on every rank.
    """
    copies = model.copy_groups
    groups = (model.ranks.group, *copies)

    def planned() -> tuple[Path, Source, dict[str, dict[str, list[nn.Parameter]]]]:
        source = _source(model, files) if left_out else Source(model.config.raw, {}, {}, ())
        return Path(directory), source, _plan(model, file_bytes, source)

    with ExitStack() as files:
        target, source, plan = together(
            planned, groups, lambda found: {file: list(names) for file, names in found[2].items()}, model.device
        )
        errors = _take_part(model, plan)
        if all(group is None or dist.get_rank(group) == 0 for group in copies):
            errors = _save_replica(model, target, plan, source)
        for error in errors:
            for group in copies:
                error = broadcast(error, group, model.device)
            if error:
                raise OSError(error)


@dataclass(frozen=True)
class Source:
    """The parts of a model's source directory that are saved again.

    Attributes:
        raw: The fields of its config.json.
        names: {tensor of the model, or each of `Field.apart`: its name in these files, if that differs}.
        left: {tensor that the model does not use: slice object}.
        companions: Further files to copy.
    """

    raw: dict[str, Any]
    names: dict[str, str]
    left: dict[str, Any]
    companions: tuple[str, ...]


def _source(model: Model, files: ExitStack) -> Source:
    """The `Source` of a model, including the tensors that `load` left out; they can be read until `files` is closed."""
    if model.directory is None:
        raise ValueError("left_out=True: the model was not loaded from a directory")
    tensors = open_tensors(model.directory, files)
    config = model.config
    names = match_tensors(config, tensors, model.directory)
    used = {name for hf in names for name in config.names_in_files(hf)}
    for field in config.fields():
        spelling = list(config.names_in_files(field.hf)).index(names[field.hf])
        names |= {each: list(config.names_in_files(each))[spelling] for each in field.apart}
    raw = read_json(model.directory / "config.json")
    return Source(raw, names, {name: t for name, t in tensors.items() if name not in used}, PROCESSOR_FILES)


def _save_replica(
    model: Model, directory: Path, plan: dict[str, dict[str, list[nn.Parameter]]], source: Source
) -> Iterator[str | None]:
    """Write from the ranks of one replica, step by step; yields each step's error, the same on all of them."""
    writer = Writer(directory) if model.ranks.rank == 0 else None

    def attempt(step: str, *arguments: Any) -> str | None:
        error = None if writer is None else writer.attempt(getattr(writer, step), *arguments)
        return broadcast(error, model.ranks.group, model.device)

    def renamed(parameters: list[nn.Parameter]) -> Field:
        field = field_of(parameters[0])
        hf, *apart = (source.names.get(name, name) for name in (field.hf, *field.apart))
        return replace(field, hf=hf, apart=tuple(apart))

    yield attempt("open")
    for file, tensors in plan.items():
        gathered: dict[str, Any] = {}
        for hf, parameters in tensors.items():
            if parameters:
                gathered |= written(renamed(parameters), gather(model, hf, parameters))
        copied = [hf for hf, parameters in tensors.items() if not parameters]
        yield attempt("write", file, gathered, {name: source.left[name] for name in copied})
        del gathered
    config = model.config.to_dict(str(model.dtype).removeprefix("torch."), source.raw)
    weight_map = {
        name: file
        for file, tensors in plan.items()
        for hf, parameters in tensors.items()
        for name in (names_written(renamed(parameters)) if parameters else [hf])
    }
    yield attempt("close", config, model.directory, weight_map, source.companions)


def written(field: Field, tensor: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """{name: tensor} in files of a field's whole tensor."""
    return field.apart_tensors(tensor) if field.written_apart and tensor is not None else {field.hf: tensor}


def names_written(field: Field) -> list[str]:
    """The names in files of a field's tensor."""
    if not field.written_apart:
        return [field.hf]
    return [each.format(index) for index in range(field.shape[0]) for each in field.apart]


def _take_part(model: Model, plan: dict[str, dict[str, list[nn.Parameter]]]) -> Iterator[str | None]:
    """The steps of `_save_replica` on the ranks of another replica."""
    yield None
    for tensors in plan.values():
        help_gather(model, tensors)
        yield None
    yield None


def help_gather(model: Model, tensors: dict[str, list[nn.Parameter]]) -> None:
    """Take part in `gather` of these tensors on a rank of another replica: call `undivided` for each parameter."""
    for parameter in itertools.chain(*tensors.values()):
        undivided(model, parameter)


def undivided(model: Model, parameter: nn.Parameter) -> torch.Tensor:
    """The part of a parameter on this tensor-parallel rank, gathered from all ranks that divide it in another way.

    All ranks of a `fully_shard` mesh gather it. The first expert-parallel rank receives the experts of all of them; the
    others return their own.
    """
    full_tensor = getattr(parameter, "full_tensor", None)
    own: torch.Tensor = parameter if full_tensor is None else full_tensor()
    experts = model.place.experts
    if experts.group is None or not field_of(parameter).by_expert:
        return own
    received = [torch.empty_like(own) for _ in range(experts.size)] if experts.rank == 0 else None
    dist.gather(own.detach().contiguous(), received, group=experts.group, group_dst=0)
    return own if received is None else torch.cat(received)


def broadcast(value: str | None, group: ProcessGroup | None, device: torch.device) -> str | None:
    """Rank 0's value, on every rank of the group."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=group, device=device)
    return box[0]


def _plan(model: Model, file_bytes: int, source: Source) -> dict[str, dict[str, list[nn.Parameter]]]:
    """{file: {Hugging Face tensor: [its parameters]}}, filled in layout order up to `file_bytes`.

    Tensors that are copied from the source have no parameters, and come last.
    """
    model.check_exact_weights("saved")
    if model.lora is not None:
        raise ValueError(
            "a model with LoRA adapters is saved after merge_lora(model); save_lora writes the adapters alone"
        )
    tensors: dict[str, list[nn.Parameter]] = {}
    for parameter, field in fields_of(model).items():
        tensors.setdefault(field.hf, []).append(parameter)
    sizes = {hf: _nbytes(parameters) for hf, parameters in tensors.items()}
    sizes |= {name: stored_bytes(tensor) for name, tensor in source.left.items()}
    tensors |= {name: [] for name in source.left}
    return {file: {hf: tensors[hf] for hf in names} for file, names in file_plan(sizes, file_bytes).items()}


def _nbytes(parameters: list[nn.Parameter]) -> int:
    """The bytes of a full tensor, of which these are this rank's parts."""
    return sum(torch.Size(field_of(p).shape).numel() * p.element_size() for p in parameters)


@torch.no_grad()
def gather(model: Model, hf: str, parameters: list[nn.Parameter]) -> torch.Tensor | None:
    """The full Hugging Face tensor on rank 0 (None elsewhere): each rank sends its parts of it, once."""
    ranks, full = model.ranks, None
    if ranks.rank == 0:
        full = torch.empty(hf_shapes([field_of(p) for p in parameters])[hf], dtype=parameters[0].dtype)
    for parameter in parameters:
        field, whole = field_of(parameter), undivided(model, parameter)
        for rank in range(0, ranks.size, field.copies(ranks.size)):
            if 0 in (shape := field.local_shape(rank, ranks.size)):
                continue
            if ranks.rank == 0:
                part = whole
                if rank:
                    part = torch.empty(shape, dtype=parameter.dtype, device=model.device)
                    dist.recv(part, group=ranks.group, group_src=rank)
                field.write(full, part, rank, ranks.size)
                del part  # or it would stay in memory while the next one is received
            elif ranks.rank == rank:
                dist.send(whole.contiguous(), group=ranks.group, group_dst=0)
    if full is not None and field_of(parameters[0]).fp32:
        narrow = full.to(model.dtype)
        full = narrow if narrow.to(full.dtype).equal(full) else full
    return full
