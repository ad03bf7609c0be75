"""The name, shape and split of a parameter, and its place in a tensor of a Hugging Face checkpoint.

A `Field` is one parameter. Several fields may be rows of one tensor in a file: in_proj holds the rows of z, x, B, C and dt,
one block below the other. An operator's specification names its fields (`in_proj.weight.x`), and the stack adds the prefix
of the operator (`layers.3.mixer.`). Fields drive loading, saving, training checkpoints, initial values, LoRA and sizes.
docs/concepts/splitting-an-ssm.md explains the split of each parameter.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Field:
    """One parameter: `name` in our model, its unsplit `shape`, and its rows in Hugging Face's tensor `hf`.

    Attributes:
        name: The name of the parameter in our model.
        hf: The name of Hugging Face's tensor.
        shape: The unsplit shape.
        split: The dimension that is split over the tensor-parallel ranks; None: every rank holds the whole parameter.
        units: The number of indivisible units along `split` (heads, groups, channels). With fewer units than ranks,
            ranks/units consecutive ranks hold the same unit. None: each rank gets ceil(rows/ranks) rows, and the last ranks
            may get fewer (the vocabulary).
        start, block, stride: The rows are in blocks of `block` rows (0: in one block). The first begins at row `start` of
            Hugging Face's tensor, and each following one `stride` rows after the previous one.
        by_expert: True if dimension 0 is also split over the expert-parallel ranks, in equal parts.
        heads: In Hugging Face's tensor, dimension `split` is divided into this number of heads, which are its first
            dimension: (heads, ..., split/heads, ...). Such a field is all of its tensor. 0: it is not divided.
        merged: True if Hugging Face's tensor has dimensions 1 and 2 merged into one.
        apart: Names of tensors, with {} for an index of dimension 0, that files may have instead of `hf`. Each tensor is the
            part of the field at this index, and if there are several names, an equal part of its dimension 1.
        written_apart: True if the tensors `apart` are written instead of `hf`.
        adaptable: True if a linear layer with this weight may have LoRA adapters.
        used: The fraction of the parameter that multiplies a token; below 1 for experts.
        granule: With units=None, the number of rows of each rank but the last ones is a multiple of it.
        fp32: True if it is stored in at least float32 (A_log, D, the dt bias).
        usual: The operator's own name of Hugging Face's tensor, if the family has another; "": it is `hf`.
        init, init_range: The initialization of a new model and its parameters (see `model.initialization`).
    """

    name: str
    hf: str
    shape: tuple[int, ...]
    split: int | None = None
    units: int | None = None
    start: int = 0
    block: int = 0
    stride: int = 0
    by_expert: bool = False
    heads: int = 0
    merged: bool = False
    apart: tuple[str, ...] = ()
    written_apart: bool = False
    adaptable: bool = True
    used: float = 1.0
    granule: int = 1
    fp32: bool = False
    usual: str = ""
    init: str = "linear"
    init_range: tuple[float, ...] = ()

    def piece(self, rank: int, size: int, expert_rank: int = 0, experts: int = 1) -> tuple[slice, ...]:
        """This rank's part: one slice for each dimension of the unsplit field."""
        whole = tuple(slice(0, n) for n in self.shape)
        if self.by_expert:
            count = self.shape[0] // experts
            whole = (slice(expert_rank * count, (expert_rank + 1) * count), *whole[1:])
        if self.split is None:
            return whole
        length = self.shape[self.split]
        if self.units is None:
            width = -(-length // (size * self.granule)) * self.granule
            start, stop = min(rank * width, length), min((rank + 1) * width, length)
        else:
            width = length // self.units * max(1, self.units // size)
            start = rank // self.copies(size) * width
            stop = start + width
        return whole[: self.split] + (slice(start, stop),) + whole[self.split + 1 :]

    def copies(self, size: int) -> int:
        """The number of tensor-parallel ranks, out of `size`, that hold each element."""
        if self.split is None:
            return size
        return 1 if self.units is None else max(1, size // self.units)

    def local_shape(self, *part: int) -> tuple[int, ...]:
        """The shape of a rank's part. part: the arguments of `piece`."""
        return tuple(s.stop - s.start for s in self.piece(*part))

    @property
    def has_weight_decay(self) -> bool:
        """True if the optimizer's weight decay applies: for matrices except A_log, not for norms and biases."""
        return len(self.shape) > 1 and not self.name.endswith("A_log")

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of Hugging Face's tensor up to this field's last row."""
        if self.heads:
            assert self.split is not None
            channels = self.shape[self.split] // self.heads
            return (self.heads, *self.shape[: self.split], channels, *self.shape[self.split + 1 :])
        if self.merged:
            return (self.shape[0], self.shape[1] * self.shape[2], *self.shape[3:])
        blocks = self.shape[0] // self.block if self.block else 1
        return (self.start + self.stride * (blocks - 1) + (self.block or self.shape[0]), *self.shape[1:])

    def read(self, tensor: Any, *part: int, rows: slice | None = None) -> Any:
        """A rank's part (see `piece`) of Hugging Face's tensor or of a safetensors slice object.

        rows: Some rows of the part, in files where they are consecutive; None: all. Slice objects do not support steps, so
        steps are applied after reading.
        """
        runs = []
        for first, *rest in self.places(*part):
            if rows is not None:
                first = slice(first.start + rows.start, min(first.start + rows.stop, first.stop), 1)
            runs.append(tensor[(slice(first.start, first.stop), *rest)][:: first.step])
        tensor = runs[0] if len(runs) == 1 else _joined(runs, 1 if self.merged else 0)
        if self.merged:
            return tensor.unflatten(1, (self.shape[1], -1))
        if not self.heads:
            return tensor
        assert self.split is not None
        return tensor.movedim(0, self.split).reshape(self.local_shape(*part))

    def write(self, tensor: Any, piece: Any, *part: int) -> None:
        """Copy `piece`, a rank's part (see the method `piece`), into the whole Hugging Face tensor."""
        targets = [tensor[place] for place in self.places(*part)]
        if self.heads:
            piece = piece.unflatten(self.split, (len(targets[0]), -1)).movedim(self.split, 0)
        parts = piece.unbind(1) if self.merged else piece.split([len(each) for each in targets])
        for target, rows in zip(targets, parts, strict=True):
            target.copy_(rows)

    def apart_tensors(self, tensor: Any) -> dict[str, Any]:
        """{name of a tensor of `apart`: its part of the whole Hugging Face tensor}."""
        tensors = {}
        for index in range(self.shape[0]):
            for name, part in zip(self.apart, tensor[index].chunk(len(self.apart)), strict=True):
                tensors[name.format(index)] = part.contiguous()
        return tensors

    def places(self, *part: int) -> list[tuple[slice, ...]]:
        """The slices of a rank's part (see `piece`) in Hugging Face's tensor, one tuple for each run of rows.

        With `heads`, they cover whole heads or part of one head.
        """
        piece = self.piece(*part)
        if self.merged:
            first, _, rows, *rest = piece
            starts = range(0, self.shape[1] * self.shape[2], self.shape[2])
            return [(first, slice(start + rows.start, start + rows.stop), *rest) for start in starts]
        if not self.heads:
            first, *rest = piece
            return [(rows, *rest) for rows in self._runs(first)]
        assert self.split is not None
        channels, mine = self.shape[self.split] // self.heads, piece[self.split]
        heads = slice(mine.start // channels, -(-mine.stop // channels), 1)
        first = mine.start % channels
        within = slice(first, first + min(channels, mine.stop - mine.start))
        return [(heads, *piece[: self.split], within, *piece[self.split + 1 :])]

    def _runs(self, rows: slice) -> list[slice]:
        """The slices of some rows of this field in Hugging Face's tensor."""
        if self.block == 1:  # one row of each block
            first, count = self.start + self.stride * rows.start, rows.stop - rows.start
            return [slice(first, first + self.stride * (count - 1) + 1 if count else first, self.stride)]
        if not self.block or rows.start == rows.stop:
            return [slice(self.start + rows.start, self.start + rows.stop, 1)]
        runs, row = [], rows.start
        while row < rows.stop:
            block, within = divmod(row, self.block)
            count = min(self.block - within, rows.stop - row)
            first = self.start + self.stride * block + within
            runs.append(slice(first, first + count, 1))
            row += count
        return runs


def _joined(parts: list[Any], dim: int) -> Any:
    import torch  # here, so that the server's launcher, which only needs names of fields, starts without torch

    return torch.cat(parts, dim)


def field_of(parameter: Any) -> Field:
    return parameter.field


def packed(
    name: str, rows: Mapping[str, int], units: Mapping[str, int], trailing: tuple[int, ...], bias: bool = False,
    blocks: int = 1, hf: str = "", init: str = "linear",
) -> Iterator[Field]:  # fmt: skip
    """The fields of a weight that packs several parameters, and of its bias: `name`.weight.PART and `name`.bias.PART.

    Args:
        name: The name of the layer in our model.
        rows: {part: its number of rows}. In the file, the parts are concatenated in this order.
        units: {part: its units along the rows}; see `Field.units`.
        trailing: The other dimensions of the weight.
        bias: True for a layer with a bias.
        blocks: The number of equal blocks of each part. Block i of every part comes before block i + 1 of any part.
        hf: The name of the layer in files; "": `name`.
        init: The initialization of the weight; see `Field.init`.
    """
    hf = hf or name
    yield from rows_of(f"{name}.weight", f"{hf}.weight", rows, units, trailing, blocks, init)
    if bias:
        yield from rows_of(f"{name}.bias", f"{hf}.bias", rows, units, (), blocks, "bias")


def rows_of(
    name: str, hf: str, rows: Mapping[str, int], units: Mapping[str, int], trailing: tuple[int, ...],
    blocks: int = 1, init: str = "linear",
) -> Iterator[Field]:  # fmt: skip
    """The fields `name`.PART that are rows of one tensor `hf`. Arguments as for `packed`."""
    start, stride = 0, sum(rows.values()) // blocks
    for part, count in rows.items():
        block, step = (count // blocks, stride) if blocks > 1 else (0, 0)
        yield Field(f"{name}.{part}", hf, (count, *trailing), 0, units[part], start, block, step, init=init)
        start += count // blocks


def row_parallel(
    name: str, shape: tuple[int, int], units: int, bias: bool = False, hf: str = "", init: str = "out_proj"
) -> Iterator[Field]:
    """The fields of a linear layer that is split by input column; every rank holds the whole bias. hf: as in `packed`."""
    hf = hf or name
    yield Field(f"{name}.weight", f"{hf}.weight", shape, 1, units, init=init)
    if bias:
        yield Field(f"{name}.bias", f"{hf}.bias", shape[:1], init="bias")


def norm_field(name: str, hf: str, size: int, offset: float = 0.0) -> Field:
    """The weight of a norm that multiplies by offset + weight, initially 1."""
    return Field(name, hf, (size,), init="zero" if offset else "one")


def hf_shapes(fields: Iterable[Field]) -> dict[str, tuple[int, ...]]:
    """The full shapes of the Hugging Face tensors of some fields, in the order of the fields."""
    shapes: dict[str, tuple[int, ...]] = {}
    for field in fields:
        shapes[field.hf] = max(shapes.get(field.hf, (0,)), field.hf_shape)
    return shapes


def divides(count: int, size: int, what: str, over: str = "tensor-parallel ranks") -> None:
    if count % size:
        raise ValueError(f"{count} {what} do not divide over {size} {over} ({count} % {size} = {count % size})")


def divide_either_way(count: int, size: int, what: str) -> None:
    """ValueError unless `size` divides `count`, or `count` divides `size`."""
    if count % size and size % count:
        raise ValueError(
            f"{count} {what} do not divide over {size} tensor-parallel ranks, nor the ranks over the {what}"
            f" ({count} % {size} = {count % size}, {size} % {count} = {size % count})"
        )
