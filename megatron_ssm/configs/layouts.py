"""One layout per family: the name, shape and split of every parameter, and its tensor in a Hugging Face checkpoint.

A `Field` is one parameter. Several fields may be rows of one Hugging Face tensor: in_proj holds the rows of z, x, B, C and
dt, one block below the other. The layout drives loading, saving, training checkpoints and initialization, so the mixers know
no names of tensors in files. How each field is split is explained in docs/concepts/splitting-an-ssm.md.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .config import Config, SharedBlockConfig


@dataclass(frozen=True)
class Field:
    """One parameter: `name` in our model, its unsplit `shape`, and its rows in Hugging Face's tensor `hf`.

    split: the dimension that is split over the tensor-parallel ranks (None: every rank holds the whole parameter).
    units: the number of indivisible units along `split` (heads, groups, channels). With fewer units than ranks,
        ranks/units consecutive ranks hold the same unit. None: rows are split into ceil(rows/ranks) for each rank, and
        the last ranks may get fewer (the vocabulary).
    start, stride: our row i is row start + stride * i of Hugging Face's tensor (Zamba's in_proj alternates x and z).
    heads: Hugging Face's tensor has dimension `split` divided into this many heads, and the heads as its first dimension:
        (heads, ..., split/heads, ...). Such a field is all of its tensor. 0: it has not.
    fp32: is stored in at least float32 and has no weight decay (A_log, D, the dt bias).
    init: how a new model initializes it (see `models.initialization`).
    """

    name: str
    hf: str
    shape: tuple[int, ...]
    split: int | None = None
    units: int | None = None
    start: int = 0
    stride: int = 1
    heads: int = 0
    fp32: bool = False
    init: str = "linear"

    def piece(self, rank: int, size: int) -> tuple[slice, ...]:
        """The part that `rank` of `size` tensor-parallel ranks holds: one slice for each dimension of the unsplit field."""
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
        """How many of `size` tensor-parallel ranks hold each element."""
        if self.split is None:
            return size
        return 1 if self.units is None else max(1, size // self.units)

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """The shape of the part that `rank` of `size` holds."""
        return tuple(s.stop - s.start for s in self.piece(rank, size))

    @property
    def has_weight_decay(self) -> bool:
        """Whether the optimizer's weight decay applies: to matrices, but never to A_log, D, norms and biases."""
        return len(self.shape) > 1 and not self.fp32

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of Hugging Face's tensor up to this field's last row."""
        if self.heads:
            assert self.split is not None, "only split fields have heads in Hugging Face's tensor"
            channels = self.shape[self.split] // self.heads
            return (self.heads, *self.shape[: self.split], channels, *self.shape[self.split + 1 :])
        return (self.start + self.stride * (self.shape[0] - 1) + 1, *self.shape[1:])

    def read(self, tensor: Any, rank: int, size: int) -> Any:
        """The part of `rank` of `size`, out of Hugging Face's tensor or a safetensors slice object.

        Slice objects do not support steps, so the stride is applied after reading.
        """
        first, *rest = self._hf_slices(rank, size)
        contiguous = (slice(first.start, first.stop), *rest)
        part = tensor[contiguous][:: first.step]
        return part.movedim(0, self.split).reshape(self.local_shape(rank, size)) if self.heads else part

    def write(self, tensor: Any, piece: Any, rank: int, size: int) -> None:
        """Copy `piece`, the part of `rank` of `size`, into Hugging Face's full tensor."""
        target = tensor[self._hf_slices(rank, size)]
        if self.heads:
            piece = piece.unflatten(self.split, (len(target), -1)).movedim(self.split, 0)
        target.copy_(piece)

    def _hf_slices(self, rank, size) -> tuple[slice, ...]:
        """The slices of a rank's part in Hugging Face's tensor: rows; or, with `heads`, whole heads or part of one head."""
        piece = self.piece(rank, size)
        if not self.heads:
            first, *rest = piece
            start, length = self.start + self.stride * first.start, first.stop - first.start
            return (slice(start, start + self.stride * (length - 1) + 1 if length else start, self.stride), *rest)
        assert self.split is not None, "only split fields have heads in Hugging Face's tensor"
        channels, mine = self.shape[self.split] // self.heads, piece[self.split]
        heads = slice(mine.start // channels, -(-mine.stop // channels), 1)
        first = mine.start % channels
        within = slice(first, first + min(channels, mine.stop - mine.start))
        return (heads, *piece[: self.split], within, *piece[self.split + 1 :])


@dataclass(frozen=True)
class _Names:
    """Hugging Face's names of the modules that every family has."""

    root: str = "backbone."
    embeddings: str = "embeddings"
    final_norm: str = "norm_f"
    norm: str = "norm"
    mixer: str = "mixer"
    shared: str = ""


_ZAMBA = dict(
    root="model.", embeddings="embed_tokens", final_norm="final_layernorm", norm="input_layernorm", mixer="mamba"
)
_NAMES = {
    "mamba": _Names(),
    "falcon_mamba": _Names(),
    "mamba2": _Names(),
    "zamba": _Names(**_ZAMBA, shared="shared_transf"),
    "zamba2": _Names(**_ZAMBA, shared="shared_transformer"),
}


def field_of(parameter: Any) -> Field:
    """The field that a model's parameter holds; models attach it."""
    return parameter.field


def layout(config: Config) -> tuple[Field, ...]:
    """Every parameter of a model with this configuration."""
    hidden, vocab, names = config.hidden_size, config.vocab_size, _NAMES[config.family]
    embeddings = f"{names.root}{names.embeddings}.weight"
    fields = [Field("embeddings.weight", embeddings, (vocab, hidden), split=0, init="embedding")]
    fields.extend(_shared_blocks(config))
    mixer = _mamba2 if config.groups else _mamba
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"{names.root}layers.{layer}."
        if layer in config.hybrid_layers:
            fields.extend(_invocation(config, ours + "use.", theirs, config.hybrid_layers.index(layer)))
            theirs += "mamba_decoder."
        fields.append(Field(ours + "norm.weight", f"{theirs}{names.norm}.weight", (hidden,), init="one"))
        fields.extend(mixer(config, ours + "mixer.", f"{theirs}{names.mixer}."))
    fields.append(Field("norm_f.weight", f"{names.root}{names.final_norm}.weight", (hidden,), init="one"))
    if not config.tie_embeddings:
        fields.append(Field("lm_head.weight", "lm_head.weight", (vocab, hidden), split=0))
    return tuple(fields)


def aliases(config: Config, hf: str) -> Iterator[str]:
    """The names under which checkpoints store a tensor: its own name first, then older ones and those of tied tensors."""
    names = _NAMES[config.family]
    spellings = [hf]
    if config.shared is not None and config.shared.tied and f".{names.shared}." in hf:
        layer, tail = hf.removeprefix(f"{names.root}layers.").split(".", 1)
        block = config.hybrid_layers.index(int(layer)) % config.shared.blocks
        layers = config.hybrid_layers[block :: config.shared.blocks]
        spellings += [f"{names.root}layers.{i}.{tail}" for i in layers]
    elif hf == f"{names.root}{names.embeddings}.weight":
        spellings += ["backbone.embedding.weight"] * (names.root == "backbone.")
        spellings += ["lm_head.weight"] * config.tie_embeddings
    for name in spellings:
        yield name
        yield name.removeprefix(names.root)


def _mamba(c: Config, ours: str, theirs: str) -> Iterator[Field]:
    """Mamba-1, Falcon-Mamba and Zamba: everything is split by channel, x_proj and out_proj by input channel.

    Zamba's x_proj is one matrix per mamba head, (heads, R + 2N, channels of a head). Side by side these matrices have the
    shape of Mamba-1's. A rank that holds only some channels of a head uses its columns of that head's matrix.
    """
    inner, hidden, state, rank = c.intermediate_size, c.hidden_size, c.state_size, c.dt_rank
    zamba = c.family == "zamba"
    heads = c.heads if zamba else 0
    by_channel: dict[str, Any] = dict(units=inner, heads=heads)
    x_proj, dt_proj, dt_bias = (
        (theirs + name)
        for name in (_ZAMBA_PROJECTIONS if zamba else ("x_proj.weight", "dt_proj.weight", "dt_proj.bias"))
    )
    yield Field(ours + "A_log", theirs + "A_log", (inner, state), 0, **by_channel, fp32=True, init="A_log")
    yield Field(ours + "D", theirs + "D", (inner,), 0, **by_channel, fp32=True, init="one")
    parts = {"x": inner, "z": inner}
    in_proj = ours + "in_proj.", theirs + "in_proj.", parts, dict.fromkeys(parts, inner), (hidden,), c.use_bias
    yield from _packed(*in_proj, interleaved=zamba)
    yield from _packed(ours + "conv.", theirs + "conv1d.", {"x": inner}, {"x": inner}, (1, c.conv_kernel), c.conv_bias)
    yield Field(ours + "x_proj", x_proj, (rank + 2 * state, inner), 1, **by_channel)
    yield Field(ours + "dt_proj", dt_proj, (inner, rank), 0, **by_channel, init="dt_proj")
    yield Field(ours + "dt_bias", dt_bias, (inner,), 0, **by_channel, fp32=True, init="dt_bias")
    yield from _out_proj(c, ours, theirs, inner)


_ZAMBA_PROJECTIONS = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias")


def _mamba2(c: Config, ours: str, theirs: str) -> Iterator[Field]:
    """Mamba-2 and Zamba2: z, x, dt and the norm are split by head, B and C by group."""
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


def _packed(
    ours: str, theirs: str, rows: dict, units: dict, trailing: tuple[int, ...], bias: bool, interleaved: bool = False
) -> Iterator[Field]:
    """The fields of a tensor that packs several parameters, and of its bias; see `_rows`."""
    yield from _rows(ours + "weight.", theirs + "weight", rows, units, trailing, interleaved)
    if bias:
        yield from _rows(ours + "bias.", theirs + "bias", rows, units, (), interleaved, init="bias")


def _rows(ours, theirs, rows: dict, units: dict, trailing, interleaved=False, init="linear") -> Iterator[Field]:
    """The fields of a packed tensor: one block of rows below the other, or interleaved row by row.

    rows: the number of rows of each field. units: along them, see `Field`.
    """
    start = 0
    for name, count in rows.items():
        stride = len(rows) if interleaved else 1
        yield Field(ours + name, theirs, (count, *trailing), 0, units[name], start, stride, init=init)
        start += 1 if interleaved else count


def _out_proj(c: Config, ours, theirs, units) -> Iterator[Field]:
    """The fields of a mixer's output projection."""
    yield from _row_parallel(
        ours + "out_proj.", theirs + "out_proj.", (c.hidden_size, c.intermediate_size), units, c.use_bias
    )


def _row_parallel(ours, theirs, shape, units, bias=False) -> Iterator[Field]:
    """The fields of a linear layer that is split by input column; every rank holds the whole bias."""
    yield Field(ours + "weight", theirs + "weight", shape, 1, units, init="out_proj")
    if bias:
        yield Field(ours + "bias", theirs + "bias", shape[:1], init="bias")


def _shared_blocks(c: Config) -> Iterator[Field]:
    """The shared blocks of Zamba and Zamba2, each under Hugging Face's name of the first layer that uses it."""
    if c.shared is None:
        return
    s, hidden, names = c.shared, c.hidden_size, _NAMES[c.family]
    for block, layer in enumerate(c.hybrid_layers[: c.shared_copies]):
        ours, theirs = f"shared.{block}.", f"{names.root}layers.{layer}.{names.shared}."
        mlp = theirs + "feed_forward."
        yield Field(ours + "norm.weight", theirs + "input_layernorm.weight", (2 * hidden,), init="one")
        for name, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            shape = (heads * s.head_dim, 2 * hidden)
            yield Field(f"{ours}qkv.weight.{name}", f"{theirs}self_attn.{name}_proj.weight", shape, 0, heads)
        yield from _row_parallel(
            ours + "o_proj.", theirs + "self_attn.o_proj.", (hidden, s.heads * s.head_dim), s.heads
        )
        yield Field(ours + "mlp_norm.weight", theirs + "pre_ff_layernorm.weight", (hidden,), init="one")
        rows = dict.fromkeys(("gate", "up"), s.feed_forward_size)
        if s.adapter_rank:
            yield from _packed(ours + "gate_up.", mlp + "gate_up_proj.", rows, rows, (hidden,), s.bias)
        else:
            for name, count in rows.items():
                yield Field(f"{ours}gate_up.weight.{name}", f"{mlp}{name}_proj.weight", (count, hidden), 0, count)
        down = (hidden, s.feed_forward_size)
        yield from _row_parallel(ours + "down_proj.", mlp + "down_proj.", down, s.feed_forward_size, s.bias)


def _invocation(c: Config, ours: str, theirs: str, invocation: int) -> Iterator[Field]:
    """The hybrid layer's own parameters for its invocation of a shared block: a linear layer and, in Zamba2, adapters.

    invocation: the index of the hybrid layer among the hybrid layers. Where blocks are not tied, each layer's block holds
    the adapters of all invocations, of which it uses only its own.
    """
    assert c.shared is not None, "only models with hybrid layers have invocations"
    s, hidden = c.shared, c.hidden_size
    yield Field(ours + "linear", theirs + "linear.weight", (hidden, hidden), init="out_proj")
    if not s.adapter_rank:
        return
    block = f"{_NAMES[c.family].root}layers.{c.hybrid_layers[invocation % c.shared_copies]}.{_NAMES[c.family].shared}."
    for name in "qkv" if s.attention_adapters else "":
        adapter = f"{block}self_attn.linear_{name}_adapter_list.{invocation}."
        yield Field(f"{ours}qkv.down.{name}", adapter + "0.weight", (s.adapter_rank, 2 * hidden))
        yield Field(f"{ours}qkv.up.{name}", adapter + "1.weight", (2 * hidden, s.adapter_rank), 0, s.heads)
    adapter = f"{block}feed_forward.gate_up_proj_adapter_list.{invocation}."
    yield Field(f"{ours}gate_up.down.low", adapter + "0.weight", (s.adapter_rank, hidden))
    rows = dict.fromkeys(("gate", "up"), s.feed_forward_size)
    yield from _rows(f"{ours}gate_up.up.", adapter + "1.weight", rows, rows, (s.adapter_rank,))
    for other in range(invocation % s.blocks, 0 if s.tied else len(c.hybrid_layers), s.blocks):
        if other != invocation:
            yield from _idle_adapters(s, hidden, f"{ours}idle.{other}_", block, other)


def _idle_adapters(s: SharedBlockConfig, hidden: int, ours: str, block: str, invocation: int) -> Iterator[Field]:
    """A block's adapters for another layer: every rank holds them unsplit and never uses them; they are saved again."""
    parts = {name: f"self_attn.linear_{name}_adapter_list" for name in "qkv"} if s.attention_adapters else {}
    wide = dict.fromkeys(parts, 2 * hidden) | {"gate_up": 2 * s.feed_forward_size}
    inputs = dict.fromkeys(parts, 2 * hidden) | {"gate_up": hidden}
    for name, theirs in {**parts, "gate_up": "feed_forward.gate_up_proj_adapter_list"}.items():
        yield Field(f"{ours}{name}_down", f"{block}{theirs}.{invocation}.0.weight", (s.adapter_rank, inputs[name]))
        yield Field(f"{ours}{name}_up", f"{block}{theirs}.{invocation}.1.weight", (wide[name], s.adapter_rank))


def idle_tensors(config: Config, layer: int) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the tensors that a checkpoint has for a hybrid layer and the layer does not use."""
    ours = f"layers.{layer}.use."
    fields = _invocation(config, ours, "", config.hybrid_layers.index(layer))
    return {f.name.removeprefix(ours + "idle."): f.shape for f in fields if f.name.startswith(ours + "idle.")}


def hf_shapes(fields: Iterable[Field]) -> dict[str, tuple[int, ...]]:
    """The full shape of every Hugging Face tensor of a layout, in layout order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for field in fields:
        shapes[field.hf] = max(shapes.get(field.hf, (0,)), field.hf_shape)
    return shapes
