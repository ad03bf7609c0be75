"""A family of models, and the fields of its Hugging Face config.json: names, defaults, supported values, types."""

import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from commfabric.foundation.command_line import did_you_mean

# The values of quantization_config, by format of the matrices, in directories that `convert --weights` writes.
QUANTIZATION = {
    weights: {"quant_method": "megatron_ssm", "weights": weights, "block_size": 64} for weights in ("int8", "int4")
}
# Fields of every family that change the outputs of a model, with the values that are implemented.
COMMON_VALUES: dict[str, tuple] = {
    "hidden_mamba_act": ("silu", "swish"),
    "rms_norm": (True,),
    "attn_layer_idx": ([],),
    "attn_cfg": ({},),
    "d_intermediate": (0,),
    "quantization_config": (None, *QUANTIZATION.values()),
    "gated_linear_unit": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "head_bias": (False,),
    "attention_dropout": (0,),
}

# Known fields that do not change the outputs: old names, sizes that follow from tensors, options of training, initialization
# and generation, and transformers' own switches. norm_before_gate is one of them, because transformers ignores it and always
# gates before the norm.
IGNORED_FIELDS = frozenset(
    """_attn_implementation_autoset _name_or_path architectures attn_implementation auto_map bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size chunk_size_feed_forward cross_attention_hidden_size d_conv d_inner
    d_model d_state decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id expand exponential_decay_length_penalty ffn_hidden_size
    finetuning_task forced_bos_token_id forced_eos_token_id fused_add_norm id2label initializer_range is_decoder
    kv_channels label2id layer_types length_penalty max_length max_position_embeddings min_length model_type n_layer
    no_repeat_ngram_size norm_before_gate num_beam_groups num_beams num_logits_to_keep num_query_groups
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id pad_vocab_size_multiple
    prefix problem_type pruned_heads remove_invalid_values repetition_penalty rescale_prenorm_residual return_dict
    return_dict_in_generate sep_token_id ssm_cfg suppress_tokens task_specific_params temperature tf_legacy_loss
    time_step_init_scheme time_step_scale tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_fixed unsloth_version use_associative_scan use_bfloat16 use_cache use_mamba_kernels use_mambapy
    use_mem_eff_path""".split()
)


MAX_SIZE = 2**31 - 1  # the largest size in a config.json, so that a damaged file raises an error before any allocation
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class Nested:
    """The config.json of a multimodal model. Its field `name` has the config.json of a language model, a `model_type`."""

    name: str
    model_type: str

    def fields(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of the language model, with the outer values of fields that it lacks."""
        inner = raw.get(self.name)
        if not isinstance(inner, Mapping):
            raise ValueError(f"config.json: {self.name}={inner!r} must be an object")
        outer = {name: raw[name] for name in ("eos_token_id", "quantization_config") if name in raw}
        inner = {name: value for name, value in inner.items() if value is not None or name not in outer}
        names = ("tie_word_embeddings", "dtype", "torch_dtype")  # of which transformers uses the outer value
        decisive = {name: raw[name] for name in names if raw.get(name) is not None}
        return {"model_type": self.model_type} | outer | inner | decisive


@dataclass(frozen=True)
class Family:
    """A family of models, which maps a config.json to a `Stack`.

    Attributes:
        name: The model_type.
        architecture: transformers' class of the model, which is written where config.json names none.
        read: A function that makes the stack from the fields; ValueError for a value that is wrong or not implemented.
        defaults: {our name of a field: its default in transformers' configuration class}. None: derived from other fields.
        hf_names: {our name: the name in config.json}, where they differ.
        supported: {name in config.json: the implemented values}, for fields that change the outputs and that `read` does
            not read.
        ignored: Names in config.json of fields that do not change the outputs, in addition to `IGNORED_FIELDS`.
        unsupported_by_peft: Names of linear layers whose adapters PEFT does not load.
        from_options: A function that makes the family's own fields of a new model's config.json from training options;
            None: new models need a config.json.
        shares_blocks: True if some layers invoke a shared block.
        pattern: {symbol of Megatron's layer patterns: the name of this layer type in config.json}; None: the family has no
            layer specs for Megatron.
        made_from_pattern: True if --hybrid-override-pattern makes a new model of this family.
        nested: The place of the language model in a multimodal config.json, whose model_type is the family; or None.
        tokenizer_class: transformers' class for checkpoints that name none.
    """

    name: str
    read: Callable[["FieldReader"], Any]
    defaults: Mapping[str, Any]
    hf_names: Mapping[str, str] = field(default_factory=dict)
    supported: Mapping[str, tuple] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    unsupported_by_peft: tuple[str, ...] = ()
    from_options: Callable[[Any], dict] | None = None
    shares_blocks: bool = False
    pattern: Mapping[str, str] | None = None
    made_from_pattern: bool = False
    nested: Nested | None = None
    tokenizer_class: str | None = None
    architecture: str = ""

    def sizes_from_options(self, options: Any) -> dict:
        """The family's own fields of a new model's config.json. ValueError without `from_options`."""
        if self.from_options is None:
            raise ValueError(f"a new {self.name} model needs --model-config F.json")
        return self.from_options(options)

    def hf_name(self, name: str) -> str:
        return self.hf_names.get(name, name)

    @property
    def known(self) -> set[str]:
        """The names in config.json of the fields that `read` reads."""
        return {self.hf_name(name) for name in self.defaults}

    def check_supported(self, raw: Mapping[str, Any]) -> None:
        """ValueError for a field with a value that is not implemented."""
        for name, allowed in {**COMMON_VALUES, **self.supported}.items():
            if name in raw and raw[name] not in allowed and name == "quantization_config":
                method = raw[name].get("quant_method") if isinstance(raw[name], Mapping) else raw[name]
                rule = "not implemented: use a checkpoint in bfloat16"
                raise ValueError(f"{self.name} with a quantization_config of quant_method={method!r} is {rule}")
            if name in raw and raw[name] not in allowed:
                raise ValueError(f"{self.name} with {name}={raw[name]!r} is not implemented (only {allowed[0]!r})")

    def unknown_fields(self, names: Mapping[str, Any] | list[str]) -> tuple[str, ...]:
        known = self.known | COMMON_VALUES.keys() | self.supported.keys() | IGNORED_FIELDS | self.ignored
        return tuple(sorted(set(names) - known))

    def describe_unknown(self, names: tuple[str, ...]) -> str:
        """One line about unknown fields, with suggestions of known fields; "" if there are none."""
        notes = [name + did_you_mean(name, sorted(self.known)) for name in names]
        return f"config.json: ignored unknown field{'s' * (len(notes) > 1)} {', '.join(notes)}" if notes else ""


class FieldReader:
    """The fields of a config.json under our names, with transformers' defaults and checks of their types.

    Errors are ValueErrors that name the field as in the file.

    Args:
        raw: The content of config.json without nulls.
        nulls: The names of fields that are null, for the few fields where null differs from a missing field.
    """

    def __init__(self, family: Family, raw: Mapping[str, Any], nulls: Collection[str] = ()):
        self.family, self.raw, self.defaults, self.nulls = family, raw, family.defaults, nulls

    def hf_name(self, name: str) -> str:
        return self.family.hf_name(name)

    def __contains__(self, name: str) -> bool:
        return name in self.defaults

    def __getitem__(self, name: str) -> Any:
        """The value of the field, unchecked; its default if the file has none."""
        value = self.raw.get(self.hf_name(name))
        return self.defaults[name] if value is None else value

    def positive(self, name: str, limit: int = MAX_SIZE) -> int:
        """A positive integer, at most `limit`."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(name, "must be a positive integer")
        if value > limit:
            raise self._error(name, f"must be at most {limit}")
        return value

    def integer(self, name: str) -> int:
        """An integer."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(name, "must be an integer")
        return value

    def boolean(self, name: str) -> bool:
        """True or false. A null is false: transformers refuses it, or takes it as false."""
        if self.hf_name(name) in self.nulls:
            return False
        if not isinstance(self[name], bool):
            raise self._error(name, "must be true or false")
        return self[name]

    def number(self, name: str) -> float:
        """A finite number. Python's JSON reader accepts NaN and Infinity; this method does not."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(name, "must be a number")
        if not abs(value) <= sys.float_info.max:
            raise self._error(name, "must be a finite number")
        return float(value)

    def limits(self, name: str) -> tuple[float, float]:
        """Two numbers, which may be infinite; transformers may write infinity as {"__float__": "Infinity"}."""
        try:
            low, high = (float(v["__float__"] if isinstance(v, dict) else v) for v in self[name])
        except (TypeError, ValueError, KeyError, OverflowError):
            raise self._error(name, "must be two numbers") from None
        if math.isnan(low) or math.isnan(high):
            raise self._error(name, "must be two numbers")
        return low, high

    def check_derived(self, name: str, expected: object, equation: str) -> None:
        """ValueError if the file gives the field another value than the one that follows from other fields."""
        if self[name] not in (None, expected):
            raise self._error(name, f"is not {equation} = {expected!r}")

    def _error(self, name, problem) -> ValueError:
        return ValueError(f"config.json: {self.hf_name(name)}={self[name]!r} {problem}")

    def choice(self, name: str, allowed: Mapping[str, Any] | tuple) -> Any:
        """One of the allowed values; ValueError, which lists them, for another."""
        if self[name] not in allowed:
            raise ValueError(
                f"{self.family.name} with {self.hf_name(name)}={self[name]!r} is not implemented (only {', '.join(allowed)})"
            )
        return self[name]


def token_ids(value: object) -> tuple[int, ...]:
    """The token ids in a config's eos_token_id, which may be None, an id, or a list of ids."""
    ids: tuple = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(i) is int for i in ids):
        raise ValueError(f"eos_token_id={value!r} must be a token id or a list of token ids")
    return ids
