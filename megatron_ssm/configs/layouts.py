"""One layout per family: every parameter of the model, its shape, how it is split, and where Hugging Face keeps it.

A `Field` is one parameter. Several fields may be rows of one Hugging Face tensor (in_proj holds z, x, B, C and dt one
below the other). The layout drives loading, saving, training checkpoints and initialization; the mixers know no names
of files. The tables are ssm.md A1 (Mamba-1), A2 (Falcon-Mamba), A3 (Mamba-2), A4 (Zamba) and A5 (Zamba2).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .config import Config, SharedBlockConfig


@dataclass(frozen=True)
class Field:
    """One parameter: `name` in our model, `shape` unsplit, and its rows of Hugging Face's tensor `hf`.

    split: the dimension cut over the tensor-parallel ranks (None: every rank holds all of it).
    units: along `split`, how many indivisible pieces there are (heads, groups); with fewer pieces than ranks,
        size/units neighbouring ranks hold the same piece. None: rows are cut in ceil(rows/size), the last ranks
        getting fewer (the vocabulary).
    start, stride: our row i is Hugging Face's row start + stride * i (Zamba's in_proj has x and z in turn).
    heads: Hugging Face cuts dimension `split` into this many heads, which come first: (heads, ..., split/heads, ...);
        0: it does not. Such a field is the whole of its tensor.
    fp32: kept in at least float32 and without weight decay (A_log, D, the dt bias).
    init: how a new model draws it (see `initialization`).
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

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of Hugging Face's tensor, if it ended with this field's last row."""
        if self.heads:
            channels = self.shape[self.split] // self.heads
            return (self.heads, *self.shape[: self.split], channels, *self.shape[self.split + 1 :])
        return (self.start + self.stride * (self.shape[0] - 1) + 1, *self.shape[1:])

    def read(self, tensor, rank: int, size: int):
        """`rank`'s piece of the field, from Hugging Face's tensor or a safetensors slice of it (which has no steps)."""
        first, *rest = self._place(rank, size)
        part = tensor[(slice(first.start, first.stop), *rest)][:: first.step]
        return part.movedim(0, self.split).reshape(self.local_shape(rank, size)) if self.heads else part

    def write(self, tensor, piece, rank: int, size: int) -> None:
        """Copy `rank`'s piece of the field to its place in Hugging Face's whole tensor."""
        place = tensor[self._place(rank, size)]
        if self.heads:
            piece = piece.unflatten(self.split, (len(place), -1)).movedim(self.split, 0)
        place.copy_(piece)

    def _place(self, rank, size) -> tuple[slice, ...]:
        """Where in Hugging Face's tensor a rank's piece is: whole heads, or part of one; or rows."""
        piece = self.piece(rank, size)
        if not self.heads:
            first, *rest = piece
            start, length = self.start + self.stride * first.start, first.stop - first.start
            return (slice(start, start + self.stride * (length - 1) + 1 if length else start, self.stride), *rest)
        channels, mine = self.shape[self.split] // self.heads, piece[self.split]
        heads = slice(mine.start // channels, -(-mine.stop // channels), 1)
        first = mine.start % channels
        within = slice(first, first + min(channels, mine.stop - mine.start))
        return (heads, *piece[: self.split], within, *piece[self.split + 1 :])


@dataclass(frozen=True)
class _Names:
    """What Hugging Face calls the parts that every family has."""

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


def layout(config: Config) -> tuple[Field, ...]:
    """Every parameter of a model of this configuration."""
    hidden, vocab, names = config.hidden_size, config.vocab_size, _NAMES[config.family]
    embeddings = f"{names.root}{names.embeddings}.weight"
    fields = [Field("embeddings.weight", embeddings, (vocab, hidden), split=0, init="embedding")]
    fields.extend(_shared_blocks(config))
    mixer = _mamba2 if config.groups else _mamba
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"{names.root}layers.{layer}."
        if layer in config.hybrid_layers:
            fields.extend(_use(config, ours + "use.", theirs, config.hybrid_layers.index(layer)))
            theirs += "mamba_decoder."
        fields.append(Field(ours + "norm.weight", f"{theirs}{names.norm}.weight", (hidden,), init="one"))
        fields.extend(mixer(config, ours + "mixer.", f"{theirs}{names.mixer}."))
    fields.append(Field("norm_f.weight", f"{names.root}{names.final_norm}.weight", (hidden,), init="one"))
    if not config.tie_embeddings:
        fields.append(Field("lm_head.weight", "lm_head.weight", (vocab, hidden), split=0))
    return tuple(fields)


def aliases(config: Config, hf: str) -> Iterator[str]:
    """The names under which checkpoints have kept a tensor: its own first, then old ones and those of tied tensors."""
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
    """Mamba-1 (ssm.md A1) and Zamba (A4): everything by channel; x_proj and out_proj by input channel.

    Zamba's x_proj is one matrix per mamba head, (heads, R + 2N, channels of a head): side by side, they have Mamba-1's
    shape. A rank with channels of one head only uses its own part of that head's.
    """
    inner, hidden, state, rank = c.intermediate_size, c.hidden_size, c.state_size, c.dt_rank
    zamba = c.family == "zamba"
    heads = c.heads if zamba else 0
    kept = dict(units=inner, heads=heads)
    x_proj, dt_proj, dt_bias = (
        (theirs + name)
        for name in (_ZAMBA_PROJECTIONS if zamba else ("x_proj.weight", "dt_proj.weight", "dt_proj.bias"))
    )
    yield Field(ours + "A_log", theirs + "A_log", (inner, state), 0, **kept, fp32=True, init="A_log")
    yield Field(ours + "D", theirs + "D", (inner,), 0, **kept, fp32=True, init="one")
    parts = {"x": inner, "z": inner}
    in_proj = ours + "in_proj.", theirs + "in_proj.", parts, dict.fromkeys(parts, inner), (hidden,), c.use_bias
    yield from _packed(*in_proj, interleaved=zamba)
    yield from _packed(ours + "conv.", theirs + "conv1d.", {"x": inner}, {"x": inner}, (1, c.conv_kernel), c.conv_bias)
    yield Field(ours + "x_proj", x_proj, (rank + 2 * state, inner), 1, **kept)
    yield Field(ours + "dt_proj", dt_proj, (inner, rank), 0, **kept, init="dt_proj")
    yield Field(ours + "dt_bias", dt_bias, (inner,), 0, **kept, fp32=True, init="dt_bias")
    yield from _out_proj(c, ours, theirs, inner)


_ZAMBA_PROJECTIONS = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias")


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


def _packed(ours, theirs, rows: dict, units: dict, trailing, bias: bool, interleaved=False) -> Iterator[Field]:
    """The fields of one packed tensor and of its bias; see `_rows`."""
    yield from _rows(ours + "weight.", theirs + "weight", rows, units, trailing, interleaved)
    if bias:
        yield from _rows(ours + "bias.", theirs + "bias", rows, units, (), interleaved, init="bias")


def _rows(ours, theirs, rows: dict, units: dict, trailing, interleaved=False, init="linear") -> Iterator[Field]:
    """The fields of one packed tensor: one below the other, or row by row in turn."""
    start = 0
    for name, count in rows.items():
        place = dict(start=start, stride=len(rows) if interleaved else 1)
        yield Field(ours + name, theirs, (count, *trailing), 0, units[name], **place, init=init)
        start += 1 if interleaved else count


def _out_proj(c: Config, ours, theirs, units) -> Iterator[Field]:
    yield from _row_parallel(
        ours + "out_proj.", theirs + "out_proj.", (c.hidden_size, c.intermediate_size), units, c.use_bias
    )


def _row_parallel(ours, theirs, shape, units, bias=False) -> Iterator[Field]:
    yield Field(ours + "weight", theirs + "weight", shape, 1, units, init="out_proj")
    if bias:
        yield Field(ours + "bias", theirs + "bias", shape[:1], init="bias")


def _shared_blocks(c: Config) -> Iterator[Field]:
    """The shared blocks (ssm.md A4, A5), each under the name of the first layer that uses it."""
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


def _use(c: Config, ours: str, theirs: str, use: int) -> Iterator[Field]:
    """What the `use`-th hybrid layer has of its own: its linear layer and, in Zamba2, its adapters.

    Where blocks are not tied, each layer's block has the adapters of all uses, and those of the others lie idle.
    """
    s, hidden = c.shared, c.hidden_size
    yield Field(ours + "linear", theirs + "linear.weight", (hidden, hidden), init="out_proj")
    if not s.adapter_rank:
        return
    block = f"{_NAMES[c.family].root}layers.{c.hybrid_layers[use % c.shared_copies]}.{_NAMES[c.family].shared}."
    for name in "qkv" if s.attention_adapters else "":
        adapter = f"{block}self_attn.linear_{name}_adapter_list.{use}."
        yield Field(f"{ours}qkv.down.{name}", adapter + "0.weight", (s.adapter_rank, 2 * hidden))
        yield Field(f"{ours}qkv.up.{name}", adapter + "1.weight", (2 * hidden, s.adapter_rank), 0, s.heads)
    adapter = f"{block}feed_forward.gate_up_proj_adapter_list.{use}."
    yield Field(f"{ours}gate_up.down.low", adapter + "0.weight", (s.adapter_rank, hidden))
    rows = dict.fromkeys(("gate", "up"), s.feed_forward_size)
    yield from _rows(f"{ours}gate_up.up.", adapter + "1.weight", rows, rows, (s.adapter_rank,))
    for other in range(use % s.blocks, 0 if s.tied else len(c.hybrid_layers), s.blocks):
        if other != use:
            yield from _idle_adapters(s, hidden, f"{ours}idle.{other}_", block, other)


def _idle_adapters(s: SharedBlockConfig, hidden: int, ours: str, block: str, use: int) -> Iterator[Field]:
    """The adapters that a block has for another layer: whole on every rank, never used, kept so that saving is exact."""
    parts = {name: f"self_attn.linear_{name}_adapter_list" for name in "qkv"} if s.attention_adapters else {}
    wide = dict.fromkeys(parts, 2 * hidden) | {"gate_up": 2 * s.feed_forward_size}
    inputs = dict.fromkeys(parts, 2 * hidden) | {"gate_up": hidden}
    for name, theirs in {**parts, "gate_up": "feed_forward.gate_up_proj_adapter_list"}.items():
        yield Field(f"{ours}{name}_down", f"{block}{theirs}.{use}.0.weight", (s.adapter_rank, inputs[name]))
        yield Field(f"{ours}{name}_up", f"{block}{theirs}.{use}.1.weight", (wide[name], s.adapter_rank))


def idle_tensors(config: Config, layer: int) -> dict[str, tuple[int, ...]]:
    """{name: shape} of what a hybrid layer's checkpoint has beside what the layer uses."""
    ours = f"layers.{layer}.use."
    fields = _use(config, ours, "", config.hybrid_layers.index(layer))
    return {f.name.removeprefix(ours + "idle."): f.shape for f in fields if f.name.startswith(ours + "idle.")}


def hf_shapes(fields) -> dict[str, tuple[int, ...]]:
    """The full shape of every Hugging Face tensor of a layout, in layout order."""
    shapes = {}
    for field in fields:
        shapes[field.hf] = max(shapes.get(field.hf, (0,)), field.hf_shape)
    return shapes
