"""Model configuration, read from and written to a Hugging Face `config.json`.

A field that changes what the model computes and whose value is not implemented is an error that names both. Fields that are
known not to change it are listed in `hf_fields`. Any other field is reported once (`Config.unknown`).
"""

import difflib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .adapters import adapters_in
from .hf_fields import ACTIVATIONS, FAMILIES, MAX_LAYERS, MAX_SIZE, FieldReader, supported_values, unknown_fields


@dataclass(frozen=True)
class SharedBlockConfig:
    """The transformer block that the hybrid layers of Zamba and Zamba2 share.

    heads, kv_heads: how many query heads and key/value heads the attention has, each of head_dim elements.
    feed_forward_size: the width of the MLP. activation: one of `ACTIVATIONS`. blocks: the number of different blocks,
    which the hybrid layers use in turn (num_mem_blocks). tied: whether the layers that use a block share its weights;
    transformers unties them together with the embeddings. bias: whether the MLP has biases. adapter_rank: the rank of the
    MLP's low-rank adapters, one for each layer that uses the block (0: there are none). attention_adapters: whether q, k
    and v have such adapters too. rope_theta: the base of the rotary embedding (0: there is none).
    """

    heads: int
    kv_heads: int
    head_dim: int
    feed_forward_size: int
    activation: str
    blocks: int = 1
    tied: bool = True
    bias: bool = False
    adapter_rank: int = 0
    attention_adapters: bool = False
    rope_theta: float = 0.0


@dataclass(frozen=True)
class Config:
    """The sizes and constants of one model, under one set of names for all families.

    raw: the config.json it was read from. unknown: its fields that are not known.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    state_size: int
    num_layers: int
    conv_kernel: int
    norm_eps: float
    use_bias: bool
    conv_bias: bool
    residual_in_fp32: bool
    tie_embeddings: bool
    heads: int = 1  # of the mixer; each head of a Mamba-1 mixer has an x_proj of its own
    dt_rank: int = 0  # Mamba-1 only
    inner_norm_eps: float | None = None  # of Falcon-Mamba's norms of dt, B and C; None: there are no such norms
    groups: int = 0  # heads of a group share B and C; 0: the mixer is of the Mamba-1 kind
    gated_norm_eps: float = 0.0
    dt_limit: tuple[float, float] = (0.0, math.inf)
    hybrid_layers: tuple[int, ...] = ()  # the layers that use the shared block
    shared: SharedBlockConfig | None = None
    dt_init: tuple[float, float, float] = (0.001, 0.1, 1e-4)  # of new models: smallest dt, largest dt, floor
    eos_token_ids: tuple[int, ...] = ()
    raw: dict = field(default_factory=dict, compare=False, repr=False)
    unknown: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def read(cls, directory: str | Path) -> "Config":
        """From `directory`/config.json, or from the path of a JSON file; errors as `read_json` and `from_dict`."""
        return cls.from_dict(read_json(directory))

    @classmethod
    def from_dict(cls, raw: dict) -> "Config":
        """From the dictionary of a Hugging Face config.json, where null means that a field is left out.

        ValueError if a field has a wrong type, a value that is not supported, or one that contradicts other fields.
        """
        family = _supported_family(raw)
        given = {name: value for name, value in raw.items() if value is not None}
        for name, allowed in supported_values(family).items():
            if name in given and given[name] not in allowed:
                raise ValueError(f"{family} with {name}={given[name]!r} is not implemented (only {allowed[0]!r})")
        fields = FieldReader(family, given)
        layers, hidden = fields.positive("num_hidden_layers", MAX_LAYERS), fields.positive("hidden_size")
        hybrid = _hybrid_layers(fields, layers)
        return cls(
            family=family,
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden,
            state_size=fields.positive("state_size"),
            num_layers=layers,
            conv_kernel=fields.positive("conv_kernel"),
            norm_eps=fields.number("layer_norm_epsilon"),
            use_bias=fields.boolean("use_bias"),
            residual_in_fp32="residual_in_fp32" in fields.defaults and fields.boolean("residual_in_fp32"),
            tie_embeddings=fields.boolean("tie_word_embeddings"),
            dt_init=(fields.number("time_step_min"), fields.number("time_step_max"), fields.number("time_step_floor")),
            eos_token_ids=token_ids(given.get("eos_token_id")),
            hybrid_layers=hybrid,
            shared=_shared_block(fields) if hybrid else None,
            raw=dict(raw),
            unknown=unknown_fields(family, given),
            **(_mamba2_fields if family.endswith("2") else _mamba_fields)(fields),
        )

    @property
    def shared_copies(self) -> int:
        """The number of shared blocks with weights of their own; the i-th hybrid layer uses block i % shared_copies."""
        hybrid = len(self.hybrid_layers)
        return min(self.shared.blocks, hybrid) if self.shared and self.shared.tied else hybrid

    @property
    def head_dim(self) -> int:
        """Channels per head of the mixer."""
        return self.intermediate_size // self.heads

    def check_ranks(self, size: int) -> None:
        """ValueError, with the numbers, if this model cannot be split over `size` tensor-parallel ranks.

        docs/families.md has the conditions of each family.
        """
        if size < 1:
            raise ValueError(f"{size} tensor-parallel ranks: there must be at least 1")
        if self.groups:
            _divides(self.heads, size, "heads")
            _divide_either_way(self.groups, size, "groups")
        else:
            _divides(self.intermediate_size, size, "channels")
            if self.heads > 1:
                _divide_either_way(self.heads, size, "mamba heads")
        if self.shared is not None:
            _divides(self.shared.heads, size, "attention heads")
            _divides(self.shared.kv_heads, size, "key/value heads")
            _divides(self.shared.feed_forward_size, size, "channels of the shared MLP")

    def to_dict(self, dtype: str) -> dict:
        """The config.json of a checkpoint of this model whose tensors are stored as `dtype` ('float32', ...)."""
        kept = {k: v for k, v in self.raw.items() if k not in ("torch_dtype", "dtype", "_name_or_path")}
        return {**kept, "dtype": dtype}

    def describe_unknown(self) -> str:
        """One line about unknown fields, each with the known field that it resembles; empty if there are none."""
        known = sorted(FieldReader(self.family, {}).known)
        notes = []
        for name in self.unknown:
            close = difflib.get_close_matches(name, known, 1)
            notes.append(f"{name} (did you mean {close[0]}?)" if close else name)
        return f"config.json: ignored unknown field{'s' * (len(notes) > 1)} {', '.join(notes)}" if notes else ""


def read_json(directory: str | Path) -> Any:
    """The content of `directory`/config.json, or of the JSON file at that path.

    FileNotFoundError or ValueError, of one line, if there is no such file or it is not JSON.
    """
    path = Path(directory)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no model configuration: {path} does not exist{adapters_in(path.parent)}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def read_for_ranks(model: str, ranks: int) -> Config:
    """The configuration of --model DIR; a one-line ValueError unless `ranks` tensor-parallel ranks can split the model."""
    if not Path(model).is_dir():
        fetch = f"hf download {model} --local-dir {Path(model).name or 'model'}"
        raise ValueError(f"{model} is not a directory; to fetch it: {fetch}")
    config = Config.read(model)
    config.check_ranks(ranks)
    return config


def _supported_family(raw: object) -> str:
    """The model type; ValueError if it is not one of FAMILIES."""
    if not isinstance(raw, dict):
        raise ValueError(f"a model configuration is a JSON object, not {type(raw).__name__}")
    family = raw.get("model_type")
    if family not in FAMILIES:
        hint = ""
        if "d_model" in raw:
            hint = "; it looks like state-spaces' own: python -m megatron_ssm convert translates those"
        raise ValueError(f"model type {family!r} is not supported (supported: {', '.join(FAMILIES)}){hint}")
    return family


def _expanded_size(fields: FieldReader) -> int:
    """expand * hidden_size: the channels of a mixer; ValueError unless there is at least one."""
    product = fields.number("expand") * fields["hidden_size"]
    if not 1 <= product < MAX_SIZE + 1:  # before it is converted: it may be infinite
        factors = f"{fields.hf_name('expand')}={fields['expand']!r} * hidden_size={fields['hidden_size']}"
        count = int(product) if math.isfinite(product) else product
        raise ValueError(f"config.json: {factors} is {count} channels, not between 1 and {MAX_SIZE}")
    return int(product)


def _mamba_fields(fields: FieldReader) -> dict:
    """The fields of a mixer of the Mamba-1 kind."""
    inner = _expanded_size(fields)
    heads = 1
    if fields.family == "zamba":
        heads = fields.positive("num_heads")
        _divides(inner, heads, "channels", "mamba heads")
    elif fields["intermediate_size"] is not None:  # it takes precedence over expand, as in transformers
        inner = fields.positive("intermediate_size")
    auto = fields["time_step_rank"] == "auto"
    return dict(
        intermediate_size=inner,
        heads=heads,
        dt_rank=math.ceil(fields["hidden_size"] / 16) if auto else fields.positive("time_step_rank"),
        conv_bias=fields.boolean("use_conv_bias"),
        inner_norm_eps=fields.number("mixer_rms_eps") if fields.family == "falcon_mamba" else None,
    )


def _mamba2_fields(fields: FieldReader) -> dict:
    """The fields of a mixer of the Mamba-2 kind."""
    inner = _expanded_size(fields)
    heads, groups = fields.positive("num_heads"), fields.positive("n_groups")
    zamba = fields.family == "zamba2"
    if zamba:
        _divides(inner, heads, "channels", "mamba heads")
        fields.check_derived("head_dim", inner // heads, "mamba_expand * hidden_size / n_mamba_heads")
    else:
        fields.check_derived("intermediate_size", inner, "expand * hidden_size")
        if heads * fields.positive("head_dim") != inner:
            raise ValueError(
                f"{heads} heads of {fields['head_dim']} are {heads * fields['head_dim']} channels, not "
                f"expand * hidden_size = {inner}"
            )
    _divides(heads, groups, "heads", "groups")
    return dict(
        intermediate_size=inner,
        heads=heads,
        groups=groups,
        conv_bias=zamba or fields.boolean("use_conv_bias"),
        gated_norm_eps=1e-5 if zamba else fields.number("layer_norm_epsilon"),
        dt_limit=(fields.number("time_step_min"), math.inf) if zamba else fields.limits("time_step_limit"),
    )


def _hybrid_layers(fields: FieldReader, count: int) -> tuple[int, ...]:
    """The layers, of `count`, that use the shared block. ("mamba" is the old name of "linear_attention".)"""
    if not fields.family.startswith("zamba"):
        return ()
    kinds = fields.raw.get("layer_types") or fields["layers_block_type"]  # transformers prefers the first
    plain = "linear_attention"
    if kinds is None and fields.family == "zamba":
        period, offset = fields.positive("attn_layer_period"), fields.integer("attn_layer_offset")
        kinds = [plain, plain, "hybrid"] + ["hybrid" if i % period == offset else plain for i in range(count - 3)]
    elif kinds is None:
        kinds = [plain] + ([plain] * 5 + ["hybrid"]) * 7 + [plain] * 4 + ["hybrid"] + [plain] * 3 + ["hybrid"]
        kinds += [plain] * 2
    if not isinstance(kinds, list) or not all(kind in (plain, "mamba", "hybrid") for kind in kinds):
        raise ValueError(f"config.json: layers_block_type={kinds!r} must be a list of 'linear_attention' and 'hybrid'")
    if len(kinds) != count:
        raise ValueError(f"config.json: layers_block_type has {len(kinds)} layers, num_hidden_layers={count}")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "hybrid")
    if fields.family == "zamba2":
        fields.check_derived("hybrid_layer_ids", list(layers), "the hybrid layers of layers_block_type")
    return layers


def _shared_block(fields: FieldReader) -> SharedBlockConfig:
    """The shared block of a model that has hybrid layers."""
    hidden, heads = fields["hidden_size"], fields.positive("num_attention_heads")
    zamba2 = fields.family == "zamba2"
    fields.check_derived("attention_hidden_size", 2 * hidden, "2 * hidden_size")
    head_dim = fields.positive("attention_head_dim") if fields["attention_head_dim"] else 2 * hidden // heads
    if not head_dim:
        raise ValueError(f"{heads} attention heads are more than the {2 * hidden} channels of the shared block")
    kv_heads = heads if fields["num_key_value_heads"] is None else fields.positive("num_key_value_heads")
    _divides(heads, kv_heads, "attention heads", "key/value heads")
    if fields["hidden_act"] not in ACTIVATIONS:
        raise ValueError(
            f"{fields.family} with hidden_act={fields['hidden_act']!r} is not implemented (only {', '.join(ACTIVATIONS)})"
        )
    more: dict[str, Any] = dict(tied=fields.boolean("tie_word_embeddings"))
    if zamba2:
        more |= dict(
            blocks=fields.positive("num_mem_blocks"),
            bias=fields.boolean("use_bias"),
            adapter_rank=fields.positive("adapter_rank"),
            attention_adapters=fields.boolean("use_shared_attention_adapter"),
            rope_theta=_rope_theta(fields),
        )
        if more["attention_adapters"] and not heads * head_dim == kv_heads * head_dim == 2 * hidden:
            raise ValueError(
                f"attention adapters are 2 * hidden_size = {2 * hidden} wide, {heads} heads of {head_dim} and {kv_heads} "
                f"key/value heads are {heads * head_dim} and {kv_heads * head_dim}"
            )
        if more["rope_theta"] and head_dim % 2:
            raise ValueError(f"rotary embeddings need heads of even size, not {head_dim}")
    feed_forward = 4 * hidden if fields["feed_forward_size"] is None else fields.positive("feed_forward_size")
    return SharedBlockConfig(heads, kv_heads, head_dim, feed_forward, fields["hidden_act"], **more)


def _rope_theta(fields: FieldReader) -> float:
    """The base of the rotary embedding (0: the model has none); ValueError if the embedding is not the default one."""
    if not fields.boolean("use_mem_rope"):
        return 0.0
    if fields.boolean("use_long_context"):  # Zyphra's code scales the base; transformers only warns
        raise ValueError(f"{fields.family} with use_long_context=True is not implemented (only False)")
    parameters = fields["rope_scaling"] or fields["rope_parameters"] or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: rope_parameters={parameters!r} must be an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{fields.family} with rope_type={kind!r} is not implemented (only 'default')")
    theta = FieldReader(fields.family, {**fields.raw, **parameters}).number("rope_theta")
    if theta <= 0:
        raise ValueError(f"config.json: rope_theta={theta!r} must be positive")
    return theta


def _divides(count: int, size: int, what: str, over: str = "tensor-parallel ranks") -> None:
    """ValueError unless `size` divides `count`."""
    if count % size:
        raise ValueError(f"{count} {what} do not divide over {size} {over} ({count} % {size} = {count % size})")


def _divide_either_way(count: int, size: int, what: str) -> None:
    """ValueError unless `size` divides `count`, or `count` divides `size`."""
    if count % size and size % count:
        raise ValueError(
            f"{count} {what} do not divide over {size} tensor-parallel ranks, nor the ranks over the {what}"
            f" ({count} % {size} = {count % size}, {size} % {count} = {size % count})"
        )


def token_ids(value: object) -> tuple[int, ...]:
    """The token ids in a config's eos_token_id, which may be None, an id, or a list of ids."""
    ids: tuple = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(i) is int for i in ids):
        raise ValueError(f"eos_token_id={value!r} is neither a token id nor a list of them")
    return ids
