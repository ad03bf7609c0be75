"""Model configuration, read from and written to a Hugging Face `config.json`.

A field that changes the mathematics and has a value not implemented here is an error that names both; fields known not
to matter are listed below; any other field is reported once (`Config.unknown`).
"""

import difflib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

FAMILIES = ("mamba", "mamba2")

# Defaults where config.json is silent: those of transformers' configuration classes.
_DEFAULTS = {
    "mamba": dict(vocab_size=50280, hidden_size=768, state_size=16, num_hidden_layers=32, tie_word_embeddings=True),
    "mamba2": dict(
        vocab_size=32768, hidden_size=4096, state_size=128, num_hidden_layers=64, tie_word_embeddings=False,
        num_heads=128, head_dim=64, n_groups=8, time_step_limit=(0.0, math.inf),
    ),
}  # fmt: skip
_SHARED_DEFAULTS = dict(
    layer_norm_epsilon=1e-5, expand=2, conv_kernel=4, use_bias=False, use_conv_bias=True, residual_in_fp32=True,
    time_step_rank="auto", time_step_min=0.001, time_step_max=0.1, time_step_floor=1e-4,
)  # fmt: skip

# Fields that would change the mathematics: the values that do not.
_ONLY = {
    "hidden_act": ("silu", "swish"),
    "rms_norm": (True,),
    "attn_layer_idx": (None, []),
    "attn_cfg": (None, {}),
    "d_intermediate": (None, 0),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "head_bias": (False,),
}

# Fields known not to matter: names of old Hub checkpoints, training and initialization choices, transformers' own
# switches. (norm_before_gate is among them: transformers always gates before the norm, whatever it says.)
_IRRELEVANT = frozenset(
    """_name_or_path architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens chunk_size
    chunk_size_feed_forward cross_attention_hidden_size d_conv d_inner d_model d_state decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id fused_add_norm id2label initializer_range is_decoder
    label2id length_penalty max_length min_length model_type n_layer no_repeat_ngram_size norm_before_gate num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_scores pad_vocab_size_multiple prefix
    problem_type pruned_heads remove_invalid_values repetition_penalty rescale_prenorm_residual return_dict
    return_dict_in_generate sep_token_id ssm_cfg suppress_tokens task_specific_params temperature tf_legacy_loss
    time_step_floor time_step_init_scheme time_step_max time_step_min time_step_scale tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p use_associative_scan use_bfloat16 use_cache
    use_mamba_kernels use_mambapy bos_token_id pad_token_id eos_token_id layer_types expand intermediate_size""".split()
)


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
    dt_rank: int = 0  # Mamba-1
    heads: int = 0  # Mamba-2
    head_dim: int = 0
    groups: int = 0
    dt_limit: tuple[float, float] = (0.0, math.inf)
    dt_init: tuple[float, float, float] = (0.001, 0.1, 1e-4)  # smallest, largest, floor
    eos_token_ids: tuple[int, ...] = ()
    raw: dict = field(default_factory=dict, compare=False, repr=False)
    unknown: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def read(cls, directory) -> "Config":
        """From `directory`/config.json, or from a path of the json file itself."""
        path = Path(directory)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"no model configuration: {path} does not exist")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict) -> "Config":
        """From the dictionary of a Hugging Face config.json; ValueError where it cannot be honoured."""
        if not isinstance(raw, dict):
            raise ValueError(f"a model configuration is a JSON object, not {type(raw).__name__}")
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"model type {family!r} is not supported (supported: {', '.join(FAMILIES)})")
        values = {**_SHARED_DEFAULTS, **_DEFAULTS[family], **{k: v for k, v in raw.items() if v is not None}}
        for name, allowed in _ONLY.items():
            if name in raw and raw[name] not in allowed:
                raise ValueError(f"{family} with {name}={raw[name]!r} is not implemented (only {allowed[0]!r})")
        known = {*_SHARED_DEFAULTS, *_DEFAULTS[family], *_ONLY, *_IRRELEVANT}
        return cls(
            family=family,
            vocab_size=_positive(values, "vocab_size"),
            hidden_size=_positive(values, "hidden_size"),
            intermediate_size=_intermediate(values),
            state_size=_positive(values, "state_size"),
            num_layers=_positive(values, "num_hidden_layers"),
            conv_kernel=_positive(values, "conv_kernel"),
            norm_eps=_number(values, "layer_norm_epsilon"),
            use_bias=_flag(values, "use_bias"),
            conv_bias=_flag(values, "use_conv_bias"),
            residual_in_fp32=_flag(values, "residual_in_fp32"),
            tie_embeddings=_flag(values, "tie_word_embeddings"),
            dt_init=tuple(_number(values, f"time_step_{k}") for k in ("min", "max", "floor")),
            eos_token_ids=token_ids(raw.get("eos_token_id")),
            raw=dict(raw),
            unknown=tuple(sorted(set(raw) - known)),
            **_PARTS[family](values),
        )

    def check_ranks(self, size: int) -> None:
        """ValueError, with its numbers, if this model cannot be split over `size` tensor-parallel ranks (ssm.md A1, A3)."""
        if self.family == "mamba":
            _divides(self.intermediate_size, size, "channels")
        else:
            _divides(self.heads, size, "heads")
            if self.groups % size and size % self.groups:
                raise ValueError(
                    f"{self.groups} groups do not divide over {size} tensor-parallel ranks, nor the ranks over the groups"
                    f" ({self.groups} % {size} = {self.groups % size}, {size} % {self.groups} = {size % self.groups})"
                )

    def to_dict(self, dtype: str) -> dict:
        """The config.json of a checkpoint of this model stored as `dtype` ('float32', ...)."""
        kept = {k: v for k, v in self.raw.items() if k not in ("torch_dtype", "dtype", "_name_or_path")}
        return {**kept, "dtype": dtype}

    def describe_unknown(self) -> str:
        """One line about the fields nobody here knows, with the known field each resembles; empty if there are none."""
        known = [*_SHARED_DEFAULTS, *_DEFAULTS[self.family]]
        notes = []
        for name in self.unknown:
            close = difflib.get_close_matches(name, known, 1)
            notes.append(f"{name} (did you mean {close[0]}?)" if close else name)
        return f"config.json: ignored unknown field{'s' * (len(notes) > 1)} {', '.join(notes)}" if notes else ""


def read_for_ranks(model: str, ranks: int) -> Config:
    """The configuration of --model DIR; an error of one line unless `ranks` tensor-parallel ranks can share it."""
    if not Path(model).is_dir():
        fetch = f"hf download {model} --local-dir {Path(model).name or 'model'}"
        raise ValueError(f"{model} is not a directory; to fetch it: {fetch}")
    config = Config.read(model)
    config.check_ranks(ranks)
    return config


def _mamba_fields(values) -> dict:
    auto = values["time_step_rank"] == "auto"
    return dict(dt_rank=math.ceil(values["hidden_size"] / 16) if auto else _positive(values, "time_step_rank"))


def _mamba2_fields(values) -> dict:
    heads, head_dim, groups = (_positive(values, k) for k in ("num_heads", "head_dim", "n_groups"))
    inner = _intermediate(values)
    if heads * head_dim != inner:
        raise ValueError(
            f"{heads} heads of {head_dim} are {heads * head_dim} channels, not expand * hidden_size = {inner}"
        )
    if heads % groups:
        raise ValueError(f"{heads} heads do not divide over {groups} groups ({heads} % {groups} = {heads % groups})")
    return dict(heads=heads, head_dim=head_dim, groups=groups, dt_limit=_limits(values, "time_step_limit"))


_PARTS = {"mamba": _mamba_fields, "mamba2": _mamba2_fields}


def _positive(values, name) -> int:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name}={value!r} must be a positive integer")
    return value


def _flag(values, name) -> bool:
    if not isinstance(values[name], bool):
        raise ValueError(f"config.json: {name}={values[name]!r} must be true or false")
    return values[name]


def _number(values, name) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {name}={value!r} must be a number")
    return float(value)


def _limits(values, name) -> tuple[float, float]:
    """Two numbers; transformers may write infinity as {"__float__": "Infinity"}."""
    try:
        low, high = (float(v["__float__"] if isinstance(v, dict) else v) for v in values[name])
    except (TypeError, ValueError, KeyError):
        raise ValueError(f"config.json: {name}={values[name]!r} must be two numbers") from None
    return low, high


def _intermediate(values) -> int:
    inner = int(_number(values, "expand") * values["hidden_size"])
    if values.get("intermediate_size", inner) != inner:
        raise ValueError(f"intermediate_size={values['intermediate_size']} is not expand * hidden_size = {inner}")
    return inner


def _divides(count, size, what):
    if count % size:
        raise ValueError(
            f"{count} {what} do not divide over {size} tensor-parallel ranks ({count} % {size} = {count % size})"
        )


def token_ids(value) -> tuple[int, ...]:
    """A config's eos_token_id (None, an id, or a list of ids) as a tuple."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(i) is int for i in ids):
        raise ValueError(f"eos_token_id={value!r} is neither a token id nor a list of them")
    return ids
