"""Model configuration, read from and written to a Hugging Face `config.json`.

A field that changes the mathematics and has a value not implemented here is an error that names both; fields known not
to matter are listed in `config_fields`; any other field is reported once (`Config.unknown`).
"""

import difflib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from .hf_fields import ACTIVATIONS, FAMILIES, IRRELEVANT, ONLY, Values


@dataclass(frozen=True)
class SharedBlockConfig:
    """The transformer block that the hybrid layers of Zamba and Zamba2 share (ssm.md A4, A5).

    blocks: how many blocks the hybrid layers take in turn (num_mem_blocks). tied: whether the layers of a block really
    share its weights: transformers unties them with the embeddings. adapter_rank: of the low-rank additions to the MLP,
    one per use of a block (0: none), and, with `attention_adapters`, to q, k and v. rope_theta 0: no rotary embedding.
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
    """The shape and the constants of one model; `raw` is the config.json it came from."""

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
    heads: int = 1  # of the mixer; Mamba-1's heads have an x_proj each
    dt_rank: int = 0  # Mamba-1
    inner_norm_eps: float | None = None  # of Falcon-Mamba's norms of dt, B and C (None: there are none)
    groups: int = 0  # Mamba-2; 0: a Mamba-1 kind
    gated_norm_eps: float = 0.0
    dt_limit: tuple[float, float] = (0.0, math.inf)
    hybrid_layers: tuple[int, ...] = ()  # the layers that use the shared block
    shared: SharedBlockConfig | None = None
    dt_init: tuple[float, float, float] = (0.001, 0.1, 1e-4)  # smallest, largest, floor
    eos_token_ids: tuple[int, ...] = ()
    raw: dict = field(default_factory=dict, compare=False, repr=False)
    unknown: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def read(cls, directory) -> "Config":
        """From `directory`/config.json, or from a path of the json file itself."""
        return cls.from_dict(read_json(directory))

    @classmethod
    def from_dict(cls, raw: dict) -> "Config":
        """From the dictionary of a Hugging Face config.json; ValueError where it cannot be honoured."""
        if not isinstance(raw, dict):
            raise ValueError(f"a model configuration is a JSON object, not {type(raw).__name__}")
        family = raw.get("model_type")
        if family not in FAMILIES:
            hint = ""
            if "d_model" in raw:
                hint = "; it looks like state-spaces' own: python -m megatron_ssm convert translates those"
            raise ValueError(f"model type {family!r} is not supported (supported: {', '.join(FAMILIES)}){hint}")
        only = ONLY | ({} if family.startswith("zamba") else {"hidden_act": ("silu", "swish")})
        for name, allowed in only.items():
            if name in raw and raw[name] not in allowed:
                raise ValueError(f"{family} with {name}={raw[name]!r} is not implemented (only {allowed[0]!r})")
        values = Values(family, raw)
        hybrid = _hybrid_layers(values)
        return cls(
            family=family,
            vocab_size=values.positive("vocab_size"),
            hidden_size=values.positive("hidden_size"),
            state_size=values.positive("state_size"),
            num_layers=values.positive("num_hidden_layers"),
            conv_kernel=values.positive("conv_kernel"),
            norm_eps=values.number("layer_norm_epsilon"),
            use_bias=values.flag("use_bias"),
            residual_in_fp32="residual_in_fp32" in values.defaults and values.flag("residual_in_fp32"),
            tie_embeddings=values.flag("tie_word_embeddings"),
            dt_init=tuple(values.number(f"time_step_{k}") for k in ("min", "max", "floor")),
            eos_token_ids=token_ids(raw.get("eos_token_id")),
            hybrid_layers=hybrid,
            shared=_shared_block(values) if hybrid else None,
            raw=dict(raw),
            unknown=tuple(sorted(set(raw) - values.known - set(only) - IRRELEVANT)),
            **(_mamba2_fields if family.endswith("2") else _mamba_fields)(values),
        )

    @property
    def shared_copies(self) -> int:
        """How many shared blocks have weights of their own: the i-th hybrid layer uses copy i % shared_copies."""
        hybrid = len(self.hybrid_layers)
        return min(self.shared.blocks, hybrid) if self.shared and self.shared.tied else hybrid

    @property
    def head_dim(self) -> int:
        """Channels per head of the mixer."""
        return self.intermediate_size // self.heads

    def check_ranks(self, size: int) -> None:
        """ValueError, with its numbers, if this model cannot be split over `size` tensor-parallel ranks (ssm.md A1-A5)."""
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
        """The config.json of a checkpoint of this model stored as `dtype` ('float32', ...)."""
        kept = {k: v for k, v in self.raw.items() if k not in ("torch_dtype", "dtype", "_name_or_path")}
        return {**kept, "dtype": dtype}

    def describe_unknown(self) -> str:
        """One line about the fields nobody here knows, with the known field each resembles; empty if there are none."""
        known = sorted(Values(self.family, {}).known)
        notes = []
        for name in self.unknown:
            close = difflib.get_close_matches(name, known, 1)
            notes.append(f"{name} (did you mean {close[0]}?)" if close else name)
        return f"config.json: ignored unknown field{'s' * (len(notes) > 1)} {', '.join(notes)}" if notes else ""


def read_json(directory):
    """What `directory`/config.json says, or the json file at that path; an error of one line unless it is JSON."""
    path = Path(directory)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no model configuration: {path} does not exist")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def read_for_ranks(model: str, ranks: int) -> Config:
    """The configuration of --model DIR; an error of one line unless `ranks` tensor-parallel ranks can share it."""
    if not Path(model).is_dir():
        fetch = f"hf download {model} --local-dir {Path(model).name or 'model'}"
        raise ValueError(f"{model} is not a directory; to fetch it: {fetch}")
    config = Config.read(model)
    config.check_ranks(ranks)
    return config


def _mamba_fields(values: Values) -> dict:
    """What is particular to a mixer of the Mamba-1 kind."""
    inner = int(values.number("expand") * values["hidden_size"])
    heads = 1
    if values.family == "zamba":
        heads = values.positive("num_heads")
        _divides(inner, heads, "channels", "mamba heads")
    elif values["intermediate_size"] is not None:  # transformers lets it overrule expand
        inner = values.positive("intermediate_size")
    auto = values["time_step_rank"] == "auto"
    return dict(
        intermediate_size=inner,
        heads=heads,
        dt_rank=math.ceil(values["hidden_size"] / 16) if auto else values.positive("time_step_rank"),
        conv_bias=values.flag("use_conv_bias"),
        inner_norm_eps=values.number("mixer_rms_eps") if values.family == "falcon_mamba" else None,
    )


def _mamba2_fields(values: Values) -> dict:
    """What is particular to a mixer of the Mamba-2 kind."""
    inner = int(values.number("expand") * values["hidden_size"])
    heads, groups = values.positive("num_heads"), values.positive("n_groups")
    zamba = values.family == "zamba2"
    if zamba:
        _divides(inner, heads, "channels", "mamba heads")
        values.same("head_dim", inner // heads, "mamba_expand * hidden_size / n_mamba_heads")
    else:
        values.same("intermediate_size", inner, "expand * hidden_size")
        if heads * values.positive("head_dim") != inner:
            raise ValueError(
                f"{heads} heads of {values['head_dim']} are {heads * values['head_dim']} channels, not "
                f"expand * hidden_size = {inner}"
            )
    _divides(heads, groups, "heads", "groups")
    return dict(
        intermediate_size=inner,
        heads=heads,
        groups=groups,
        conv_bias=zamba or values.flag("use_conv_bias"),
        gated_norm_eps=1e-5 if zamba else values.number("layer_norm_epsilon"),
        dt_limit=(values.number("time_step_min"), math.inf) if zamba else values.limits("time_step_limit"),
    )


def _hybrid_layers(values: Values) -> tuple[int, ...]:
    """The layers that use the shared block; "mamba" is the old name of "linear_attention"."""
    if not values.family.startswith("zamba"):
        return ()
    count = values.positive("num_hidden_layers")
    kinds = values.raw.get("layer_types") or values["layers_block_type"]  # transformers' name for it, which wins
    plain = "linear_attention"
    if kinds is None and values.family == "zamba":
        period, offset = values.positive("attn_layer_period"), values["attn_layer_offset"]
        kinds = [plain, plain, "hybrid"] + ["hybrid" if i % period == offset else plain for i in range(count - 3)]
    elif kinds is None:
        kinds = [plain] + ([plain] * 5 + ["hybrid"]) * 7 + [plain] * 4 + ["hybrid"] + [plain] * 3 + ["hybrid"]
        kinds += [plain] * 2
    if not isinstance(kinds, list) or not all(kind in (plain, "mamba", "hybrid") for kind in kinds):
        raise ValueError(f"config.json: layers_block_type={kinds!r} must be a list of 'linear_attention' and 'hybrid'")
    if len(kinds) != count:
        raise ValueError(f"config.json: layers_block_type has {len(kinds)} layers, num_hidden_layers={count}")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "hybrid")
    if values.family == "zamba2":
        values.same("hybrid_layer_ids", list(layers), "the hybrid layers of layers_block_type")
    return layers


def _shared_block(values: Values) -> SharedBlockConfig:
    hidden, heads = values["hidden_size"], values.positive("num_attention_heads")
    zamba2 = values.family == "zamba2"
    values.same("attention_hidden_size", 2 * hidden, "2 * hidden_size")
    head_dim = values.positive("attention_head_dim") if values["attention_head_dim"] else 2 * hidden // heads
    kv_heads = heads if values["num_key_value_heads"] is None else values.positive("num_key_value_heads")
    _divides(heads, kv_heads, "attention heads", "key/value heads")
    if values["hidden_act"] not in ACTIVATIONS:
        raise ValueError(
            f"{values.family} with hidden_act={values['hidden_act']!r} is not implemented (only {', '.join(ACTIVATIONS)})"
        )
    more = dict(tied=values.flag("tie_word_embeddings"))
    if zamba2:
        more |= dict(
            blocks=values.positive("num_mem_blocks"),
            bias=values.flag("use_bias"),
            adapter_rank=values.positive("adapter_rank"),
            attention_adapters=values.flag("use_shared_attention_adapter"),
            rope_theta=_rope_theta(values),
        )
        if more["attention_adapters"] and not heads * head_dim == kv_heads * head_dim == 2 * hidden:
            raise ValueError(
                f"attention adapters are 2 * hidden_size = {2 * hidden} wide, {heads} heads of {head_dim} and {kv_heads} "
                f"key/value heads are {heads * head_dim} and {kv_heads * head_dim}"
            )
        if more["rope_theta"] and head_dim % 2:
            raise ValueError(f"rotary embeddings need heads of even size, not {head_dim}")
    feed_forward = 4 * hidden if values["feed_forward_size"] is None else values.positive("feed_forward_size")
    return SharedBlockConfig(heads, kv_heads, head_dim, feed_forward, values["hidden_act"], **more)


def _rope_theta(values: Values) -> float:
    """The base of the rotary embedding (0: the model has none); ValueError if it is a scaled one."""
    if not values.flag("use_mem_rope"):
        return 0.0
    parameters = values["rope_scaling"] or values["rope_parameters"] or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: rope_parameters={parameters!r} must be an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{values.family} with rope_type={kind!r} is not implemented (only 'default')")
    return Values(values.family, {**values.raw, **parameters}).number("rope_theta")


def _divides(count, size, what, over="tensor-parallel ranks"):
    if count % size:
        raise ValueError(f"{count} {what} do not divide over {size} {over} ({count} % {size} = {count % size})")


def _divide_either_way(count, size, what):
    if count % size and size % count:
        raise ValueError(
            f"{count} {what} do not divide over {size} tensor-parallel ranks, nor the ranks over the {what}"
            f" ({count} % {size} = {count % size}, {size} % {count} = {size % count})"
        )


def token_ids(value) -> tuple[int, ...]:
    """A config's eos_token_id (None, an id, or a list of ids) as a tuple."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(i) is int for i in ids):
        raise ValueError(f"eos_token_id={value!r} is neither a token id nor a list of them")
    return ids
