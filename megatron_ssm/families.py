"""One layout per family: every parameter of the model, its shape, how it is split, and where Hugging Face keeps it.

A `Field` is one parameter. Several fields may be rows of one Hugging Face tensor (in_proj holds z, x, B, C and dt one
below the other). The layout drives loading, saving, training checkpoints and initialization; the mixers know no names
of files. The tables are ssm.md A1 (Mamba-1) and A3 (Mamba-2).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .config import Config


@dataclass(frozen=True)
class Field:
    """One parameter: `name` in our model, `shape` unsplit, and rows start, start+1, ... of Hugging Face's tensor `hf`.

    split: the dimension cut over the tensor-parallel ranks (None: every rank holds all of it).
    units: along `split`, how many indivisible pieces there are (heads, groups); with fewer pieces than ranks,
        size/units neighbouring ranks hold the same piece. None: rows are cut in ceil(rows/size), the last ranks
        getting fewer (the vocabulary).
    fp32: kept in at least float32 and without weight decay (A_log, D, the dt bias).
    init: how a new model draws it (see `initialization`).
    """

    name: str
    hf: str
    shape: tuple[int, ...]
    split: int | None = None
    units: int | None = None
    start: int = 0
    fp32: bool = False
    init: str = "linear"

    def piece(self, rank: int, size: int) -> tuple[slice, ...]:
        """What `rank` of `size` holds, as one slice per dimension of the unsplit field."""
        whole = tuple(slice(0, n) for n in self.shape)
        if self.split is None:
            return whole
        length = self.shape[self.split]
        if self.units is None:
            width = -(-length // size)
            start, stop = min(rank * width, length), min((rank + 1) * width, length)
        else:
            width = length // self.units * max(1, self.units // size)
            start = rank // self.copies(size) * width
            stop = start + width
        return whole[: self.split] + (slice(start, stop),) + whole[self.split + 1 :]

    def copies(self, size: int) -> int:
        """How many of `size` ranks hold each element."""
        if self.split is None:
            return size
        return 1 if self.units is None else max(1, size // self.units)

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """The shape of `rank`'s piece."""
        return tuple(s.stop - s.start for s in self.piece(rank, size))

    @property
    def decays(self) -> bool:
        """Whether the optimizer's weight decay applies: to matrices, never to A_log, D, norms and biases."""
        return len(self.shape) > 1 and not self.fp32


def layout(config: Config) -> tuple[Field, ...]:
    """Every parameter of a model of this configuration."""
    hidden, vocab = config.hidden_size, config.vocab_size
    fields = [Field("embeddings.weight", "backbone.embeddings.weight", (vocab, hidden), split=0, init="embedding")]
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"backbone.layers.{layer}."
        fields.append(Field(ours + "norm.weight", theirs + "norm.weight", (hidden,), init="one"))
        fields.extend(_MIXERS[config.family](config, ours + "mixer.", theirs + "mixer."))
    fields.append(Field("norm_f.weight", "backbone.norm_f.weight", (hidden,), init="one"))
    if not config.tie_embeddings:
        fields.append(Field("lm_head.weight", "lm_head.weight", (vocab, hidden), split=0))
    return tuple(fields)


def _mamba(c: Config, ours: str, theirs: str) -> Iterator[Field]:
    """Mamba-1 (ssm.md A1): everything by channel; x_proj and out_proj by input channel."""
    inner, hidden, state, rank = c.intermediate_size, c.hidden_size, c.state_size, c.dt_rank
    parts = {"x": inner, "z": inner}
    yield Field(ours + "A_log", theirs + "A_log", (inner, state), 0, inner, fp32=True, init="A_log")
    yield Field(ours + "D", theirs + "D", (inner,), 0, inner, fp32=True, init="one")
    yield from _packed(
        ours + "in_proj.", theirs + "in_proj.", parts, dict.fromkeys(parts, inner), (hidden,), c.use_bias
    )
    yield from _packed(ours + "conv.", theirs + "conv1d.", {"x": inner}, {"x": inner}, (1, c.conv_kernel), c.conv_bias)
    yield Field(ours + "x_proj", theirs + "x_proj.weight", (rank + 2 * state, inner), 1, inner)
    yield Field(ours + "dt_proj", theirs + "dt_proj.weight", (inner, rank), 0, inner, init="dt_proj")
    yield Field(ours + "dt_bias", theirs + "dt_proj.bias", (inner,), 0, inner, fp32=True, init="dt_bias")
    yield from _out_proj(c, ours, theirs, inner)


def _mamba2(c: Config, ours: str, theirs: str) -> Iterator[Field]:
    """Mamba-2 (ssm.md A3): z, x, dt and the norm by head, B and C by group."""
    inner, hidden, bc = c.intermediate_size, c.hidden_size, c.groups * c.state_size
    parts = {"z": inner, "x": inner, "B": bc, "C": bc, "dt": c.heads}
    units = {"z": c.heads, "x": c.heads, "B": c.groups, "C": c.groups, "dt": c.heads}
    conv = {name: parts[name] for name in "xBC"}
    yield Field(ours + "A_log", theirs + "A_log", (c.heads,), 0, c.heads, fp32=True, init="A_log")
    yield Field(ours + "D", theirs + "D", (c.heads,), 0, c.heads, fp32=True, init="one")
    yield Field(ours + "dt_bias", theirs + "dt_bias", (c.heads,), 0, c.heads, fp32=True, init="dt_bias")
    yield Field(ours + "norm_weight", theirs + "norm.weight", (inner,), 0, c.heads, init="one")
    yield from _packed(ours + "in_proj.", theirs + "in_proj.", parts, units, (hidden,), c.use_bias)
    yield from _packed(ours + "conv.", theirs + "conv1d.", conv, units, (1, c.conv_kernel), c.conv_bias)
    yield from _out_proj(c, ours, theirs, c.heads)


_MIXERS = {"mamba": _mamba, "mamba2": _mamba2}


def _packed(ours, theirs, rows: dict, units: dict, trailing, bias: bool) -> Iterator[Field]:
    """The fields of one packed tensor and of its bias, in the order in which they stand below one another."""
    for kind, shape, init in (("weight", trailing, "linear"), ("bias", (), "bias"))[: 2 if bias else 1]:
        start = 0
        for name, count in rows.items():
            yield Field(f"{ours}{kind}.{name}", theirs + kind, (count, *shape), 0, units[name], start, init=init)
            start += count


def _out_proj(c: Config, ours, theirs, units) -> Iterator[Field]:
    shape = (c.hidden_size, c.intermediate_size)
    yield Field(ours + "out_proj.weight", theirs + "out_proj.weight", shape, 1, units, init="out_proj")
    if c.use_bias:
        yield Field(ours + "out_proj.bias", theirs + "out_proj.bias", (c.hidden_size,), init="bias")


def hf_shapes(fields) -> dict[str, tuple[int, ...]]:
    """The full shape of every Hugging Face tensor of a layout (its fields' rows added up), in layout order."""
    shapes = {}
    for field in fields:
        rows, *rest = shapes.get(field.hf, (0, *field.shape[1:]))
        shapes[field.hf] = (max(rows, field.start + field.shape[0]), *rest)
    return shapes
