"""Directories of quantized models: Hugging Face's, but for the matrices, which are stored in 8 or 4 bits.

config.json has {"quantization_config": {"quant_method": "megatron_ssm", "weights": "int4", "block_size": 64}}, or "int8".
The files are safetensors. A quantized matrix NAME (out, in) is two tensors in them. NAME has the values: int8 (out, in), or
uint8 (out, in / 2) with 4 bits for each number. NAME.scales is float32 (out, in / 64), by which blocks of 64 numbers of a
row are multiplied (see `quantized_matrices`). Matrices of experts are stored as the source has them: one by one, or
(experts, out, in) with scales of three dimensions. A draft head (`mtp.*`) is written like the model. Other tensors are as in
the source, but for Mamba-1's small matrices, which are bfloat16 if they were float32. What a rank quantizes at load, in the
dtype of the files, has the same bits, so both generate the same tokens. Where ranks have parts of blocks, they keep the
quantized numbers in floating point.

The format "bfloat16" quantizes nothing: tensors become bfloat16, but for those that a bfloat16 model keeps in float32. The
directory is an ordinary one of Hugging Face.
"""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from commfabric.collectives.counted import Counter
from megatron_ssm.kernels.huge_pages import HugePages
from megatron_ssm.kernels.products import BLOCK
from megatron_ssm.kernels.quantized_matrices import QUANTIZED_FORMATS, QuantizedMatrix, narrowed
from megatron_ssm.layers import families
from megatron_ssm.layers.operator import Operator
from megatron_ssm.model.model import Model
from megatron_ssm.parallel.layers import QUANTIZABLE
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.spec.fields import Field, field_of
from megatron_ssm.spec.reader import QUANTIZATION
from megatron_ssm.spec.stack import Stack

from .hf_directory import FLOATS, Merged, Writer, file_plan, has_draft_head, match_tensors, open_tensors

BFLOAT16 = "bfloat16"
SCALES = ".scales"  # what is added to a matrix's name in the name of its scales
FILE_BYTES = 10**9  # of tensors in a file, which are in memory together
READ_BYTES = 2**24  # that are read at a time where only some columns are wanted


class QuantizedTensor:
    """A quantized matrix (out, in) in a file, or the matrices of experts (experts, out, in), as a safetensors slice.

    file: its descriptor. begins: the offsets of the values and of the scales in the file.
    """

    def __init__(self, file: int, begins: tuple[int, int], shape: tuple[int, ...], format: str):
        self._file, self._begins, self._shape, self.format = file, begins, shape, format
        self.kind = QUANTIZED_FORMATS[format]

    def get_shape(self) -> list[int]:
        """[out, in] or [experts, out, in]."""
        return list(self._shape)

    def get_dtype(self) -> str:
        return self.format

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Rows and columns (of experts) in float32."""
        *experts, rows, columns = index
        if experts:
            return torch.stack([self.matrix(i, rows)[0][rows, columns] for i in range(self._shape[0])[experts[0]]])
        return self._matrix(rows).rows(slice(None))[:, columns]

    def matrix(self, index: int, rows: slice) -> tuple["QuantizedTensor", slice]:
        """The matrix of expert `index`, and the position of `rows` in it."""
        _, out, width = self._shape
        before = index * out * width
        begins = self._begins[0] + before * self.kind.bits // 8, self._begins[1] + before // BLOCK * 4
        return QuantizedTensor(self._file, begins, (out, width), self.format), rows

    def _matrix(self, rows: slice) -> QuantizedMatrix:
        out, width = len(range(self._shape[0])[rows]), self._shape[1]
        values, scales = self.kind.empty(out, width)
        self.read(values, scales, rows, slice(0, width))
        return self.kind(values, scales, torch.float32)

    def read(self, values: Tensor, scales: Tensor, rows: slice, columns: slice) -> None:
        """Read rows, and columns that begin and end with blocks, into `values` and `scales` of the same size."""
        for target, begin, divisor in zip((values, scales), self._begins, (8 // self.kind.bits, BLOCK), strict=True):
            length = self._shape[1] // divisor
            self._read(target, begin, length, rows, slice(columns.start // divisor, columns.stop // divisor))

    def _read(self, target: Tensor, begin: int, length: int, rows: slice, columns: slice) -> None:
        """A part of a tensor that begins at `begin`, with rows of `length` elements."""
        wanted, nbytes = range(self._shape[0])[rows], length * target.element_size()
        if not wanted:
            return
        if wanted.step == 1 and columns == slice(0, length):
            return _pread(self._file, target, begin + wanted.start * nbytes)
        at_once = max(1, READ_BYTES // nbytes // wanted.step)
        for first in range(0, len(wanted), at_once):
            part = wanted[first : first + at_once]
            whole = torch.empty(part[-1] - part[0] + 1, length, dtype=target.dtype)
            _pread(self._file, whole, begin + part[0] * nbytes)
            target[first : first + at_once] = whole[:: wanted.step, columns]


def _pread(file: int, target: Tensor, begin: int) -> None:
    view = memoryview(target.view(torch.uint8).flatten().numpy())  # type: ignore[arg-type]
    while view:
        count = os.preadv(file, [view], begin)
        if not count:
            raise ValueError("a file with quantized matrices has become shorter")
        view, begin = view[count:], begin + count


def format_of(raw: Any) -> str | None:
    """The format of the matrices of a directory with this config.json; None: they are not quantized."""
    found = raw.get("quantization_config") if isinstance(raw, dict) else None
    return next((weights for weights, value in QUANTIZATION.items() if value == found), None)


def join_scales(tensors: dict[str, Any], paths: list[Path], format: str, files: ExitStack) -> dict[str, Any]:
    """{name: tensor} where quantized matrices are `QuantizedTensor`s, which can be read until `files` is closed.

    ValueError if the scales of a matrix are missing, or have another shape.
    """
    places: dict[str, tuple[int, int]] = {}
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        files.callback(os.close, file)
        size = int.from_bytes(os.pread(file, 8, 0), "little")  # safetensors has checked the header
        for name, stored in json.loads(os.pread(file, size, 8)).items():
            if name != "__metadata__":
                places[name] = file, 8 + size + stored["data_offsets"][0]
    joined = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALES)}
    bits = QUANTIZED_FORMATS[format].bits
    for name, tensor in joined.items():
        if tensor.get_dtype() != ("I8" if bits == 8 else "U8"):
            continue
        *rows, width = tensor.get_shape()
        shape, scales = (*rows, width * 8 // bits), tensors.get(name + SCALES)
        wanted = (*rows, shape[-1] // BLOCK)
        is_stored = scales is not None and (*scales.get_shape(), scales.get_dtype()) == (*wanted, "F32")
        if not is_stored or places[name][0] != places[name + SCALES][0]:
            raise ValueError(f"the file of the quantized matrix {name} lacks its scales {name}{SCALES} {wanted}")
        begins = places[name][1], places[name + SCALES][1]
        joined[name] = QuantizedTensor(places[name][0], begins, shape, format)
    return joined


def read_quantized(module: nn.Module, tensors: dict[str, Any], part: Sequence[int], memory: HugePages) -> bool:
    """Replace a layer's `weight` by this rank's part of stored matrices. Return False, without effect, if it cuts blocks.

    tensors: {Hugging Face tensor: slice object}. part: the arguments of `Field.piece`. memory: of the new matrix.
    """
    parameters = _parameters_of(module)
    runs = [run for p in parameters for run in _runs(field_of(p), tensors[field_of(p).hf], part)]
    if any(columns.start % BLOCK or columns.stop % BLOCK for *_, columns in runs):
        return False
    dtype, kind = parameters[0].dtype, runs[0][0].kind
    width = parameters[0].shape[-1]
    count = sum(parameter.numel() for parameter in parameters) // max(1, width)
    if not count:
        return True  # as `quantize`, which leaves a matrix without rows
    with memory:
        values, scales = kind.empty(count, width)
    lengths = [len(range(rows.stop)[rows]) for _, rows, _ in runs]
    for (tensor, *place), its_values, its_scales in zip(
        runs, values.split(lengths), scales.split(lengths), strict=True
    ):
        tensor.read(its_values, its_scales, *place)
    del module.weight
    module.weight = kind(values, scales, dtype)
    return True


def is_quantized(tensor: Any) -> bool:
    return tensor.get_dtype() in QUANTIZED_FORMATS


def _runs(field: Field, tensor: Any, part: Sequence[int]) -> list[tuple[QuantizedTensor, slice, slice]]:
    """Triples (matrix, rows, columns) of this rank's part of a field, in order."""
    places = field.places(*part)
    if not field.apart:
        return [(tensor, *place) for place in places]
    experts = range(field.shape[0])[places[0][0]]
    return [(*tensor.matrix(index, rows), columns) for index in experts for _, rows, columns in places]


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    weight: Any = module.weight
    return list(weight.parameters()) if isinstance(weight, nn.Module) else [weight]


# Writing


def quantized_names(config: Stack, format: str) -> tuple[set[str], set[str]]:
    """The names in files of the matrices that are quantized, and of the tensors that become bfloat16.

    ValueError if int8 or int4 can quantize none.
    """
    ranks = Ranks.of(None, Counter())
    if format == BFLOAT16:
        narrow = Model(config, ranks, dtype=torch.bfloat16, device="meta")
        return set(), {field_of(each).hf for each in narrow.parameters() if each.dtype is torch.bfloat16}
    model = Model(config, ranks, device="meta")
    quantized: set[str] = set()
    small: set[str] = set()
    for module in model.modules():
        if isinstance(module, QUANTIZABLE):
            parameters = _parameters_of(module)
            if parameters[0].shape[-1] % BLOCK == 0:
                quantized |= {field_of(parameter).hf for parameter in parameters}
        elif isinstance(module, Operator):
            small |= {field_of(module.get_parameter(name)).hf for name in module.small_matrices}
    if not quantized:
        raise ValueError(
            f"nothing of this model can be quantized: no matrix has rows of a multiple of {BLOCK} elements"
        )
    return quantized, small


def write_quantized(
    source: Path, target: Path | None, format: str, file_bytes: int = FILE_BYTES
) -> list[tuple[str, tuple, str]]:
    """Write the model of a Hugging Face directory with quantized matrices; [(name, shape, dtype or format)] of its tensors.

    target None: only check. The tensors of one file are in memory together, of at most `file_bytes`. ValueError if nothing
    can be quantized, and errors as `load`.
    """
    config = families.read(source)
    if held := format_of(config.raw):
        raise ValueError(f"{source} holds matrices in {held}: convert the original directory")
    with ExitStack() as stack:
        slices = open_tensors(source, stack)
        config = config.with_draft_head() if has_draft_head(config, slices) else config
        quantized, small = quantized_names(config, format)
        names = match_tensors(config, slices, source)
        shapes = {hf: tuple(slices[name].get_shape()) for hf, name in names.items()}
        sizes = {}
        for hf, name in names.items():
            count, itemsize = torch.Size(shapes[hf]).numel(), FLOATS[slices[name].get_dtype()].itemsize
            sizes[hf] = count * itemsize
            if hf in quantized:
                sizes[hf] = count * QUANTIZED_FORMATS[format].bits // 8 + count // BLOCK * 4
        if target is not None:
            writer, plan = Writer(target), file_plan(sizes, file_bytes)
            try:
                writer.open()
                _write(writer, slices, names, quantized, small, plan, format, config, source)
            finally:
                writer.abandon()
        kinds = {hf: slices[name].get_dtype() for hf, name in names.items()} | dict.fromkeys(quantized, format)
        if format == BFLOAT16:
            kinds |= dict.fromkeys(small, BFLOAT16)
    return [(hf, shapes[hf], kinds[hf]) for hf in names]


def _write(
    writer: Writer, slices: dict[str, Any], names: dict[str, str], quantized: set[str], small: set[str],
    plan: dict[str, list[str]], format: str, config: Stack, source: Path,
) -> None:  # fmt: skip
    """Write the files of a plan; names: {Hugging Face tensor: key of `slices`}."""
    weight_map: dict[str, str] = {}
    apart = {field.hf: field.apart for field in config.fields()}
    for file, held in plan.items():
        tensors: dict[str, Tensor] = {}
        for hf in tqdm(held, f"converting {file}", unit=" tensors", disable=None):  # None: only at a terminal
            for name, tensor in _apart(hf, slices[names[hf]], apart.get(hf, ())):
                if hf in quantized:
                    tensors[name], tensors[name + SCALES] = _quantized(tensor, format)
                elif hf in small:
                    tensors[name] = tensor[:].bfloat16() if format == BFLOAT16 else narrowed(tensor[:])
                else:
                    tensors[name] = tensor[:].contiguous()
        writer.write(file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    if format == BFLOAT16:
        written = config.to_dict(BFLOAT16)
    else:
        stored = str(FLOATS[slices[next(iter(names.values()))].get_dtype()]).removeprefix("torch.")
        written = config.to_dict(config.raw.get("dtype") or config.raw.get("torch_dtype") or stored)
        written |= {"quantization_config": QUANTIZATION[format]}
    writer.close(written, source, weight_map)


def _apart(hf: str, tensor: Any, apart: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Pairs (name in files, slice object) of a tensor; of `Merged` experts, whose names are `apart`, one for each matrix."""
    if not isinstance(tensor, Merged):
        return [(hf, tensor)]
    return [
        (name.format(index), part)
        for index, parts in enumerate(tensor.parts)
        for name, part in zip(apart, parts, strict=True)
    ]


def _quantized(tensor: Any, format: str) -> tuple[Tensor, Tensor]:
    """Values and scales of a matrix, or of the matrices of experts, stacked."""
    *experts, _, _ = tensor.get_shape()
    kind = QUANTIZED_FORMATS[format]
    matrices = [kind.of(tensor[i : i + 1][0]) for i in range(experts[0])] if experts else [kind.of(tensor[:])]
    values, scales = [matrix.values for matrix in matrices], [matrix.scales for matrix in matrices]
    return (torch.stack(values), torch.stack(scales)) if experts else (values[0], scales[0])
