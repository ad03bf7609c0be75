"""The fields of Hugging Face's config.json by family: names, defaults, supported values, and fields that are ignored."""

import math
import sys
from collections.abc import Iterable
from typing import Any

# By family: Hugging Face's name of each field for which it differs from ours.
_HF_NAMES = {
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": {},
    "zamba": dict(
        state_size="mamba_d_state", conv_kernel="mamba_d_conv", expand="mamba_expand", layer_norm_epsilon="rms_norm_eps",
        use_bias="mamba_proj_bias", use_conv_bias="mamba_conv_bias", time_step_rank="mamba_dt_rank",
        num_heads="n_mamba_heads", feed_forward_size="intermediate_size",
    ),
    "zamba2": dict(
        state_size="mamba_d_state", conv_kernel="mamba_d_conv", expand="mamba_expand", layer_norm_epsilon="rms_norm_eps",
        use_bias="add_bias_linear", num_heads="n_mamba_heads", n_groups="mamba_ngroups", head_dim="mamba_headdim",
        feed_forward_size="intermediate_size",
    ),
}  # fmt: skip
FAMILIES = tuple(_HF_NAMES)

# Defaults of fields that config.json leaves out, under our names; they are those of transformers' configuration classes.
# None: derived from other fields.
_MAMBA = dict(
    vocab_size=50280, hidden_size=768, state_size=16, num_hidden_layers=32, tie_word_embeddings=True,
    intermediate_size=None, residual_in_fp32=True,
)  # fmt: skip
_SHARED_BLOCK = dict(
    vocab_size=32000, tie_word_embeddings=True, hidden_act="gelu", layers_block_type=None, attention_head_dim=None,
    attention_hidden_size=None,
)  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA | dict(mixer_rms_eps=1e-6),
    "mamba2": dict(
        vocab_size=32768, hidden_size=4096, state_size=128, num_hidden_layers=64, tie_word_embeddings=False,
        intermediate_size=None, residual_in_fp32=True, num_heads=128, head_dim=64, n_groups=8,
        time_step_limit=(0.0, math.inf),
    ),
    "zamba": _SHARED_BLOCK | dict(
        hidden_size=3712, state_size=16, num_hidden_layers=76, num_heads=2, feed_forward_size=14848,
        num_attention_heads=16, num_key_value_heads=16, attn_layer_period=6, attn_layer_offset=4,
    ),
    "zamba2": _SHARED_BLOCK | dict(
        hidden_size=2560, state_size=64, num_hidden_layers=54, num_heads=8, n_groups=1, head_dim=None,
        feed_forward_size=None, num_attention_heads=32, num_key_value_heads=None, num_mem_blocks=1,
        use_shared_attention_adapter=False, adapter_rank=128, use_mem_rope=False, use_long_context=False,
        rope_parameters=None, rope_scaling=None, rope_theta=10000.0, hybrid_layer_ids=None,
    ),
}  # fmt: skip
_COMMON_DEFAULTS: dict[str, Any] = dict(
    layer_norm_epsilon=1e-5, expand=2, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank="auto",
    time_step_min=0.001, time_step_max=0.1, time_step_floor=1e-4,
)  # fmt: skip

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "swish", "relu")  # supported in the shared block's MLP

# Fields that change what the model computes, and the values that are implemented.
SUPPORTED_VALUES: dict[str, tuple] = {
    "hidden_mamba_act": ("silu", "swish"),
    "rms_norm": (True,),
    "attn_layer_idx": ([],),
    "attn_cfg": ({},),
    "d_intermediate": (0,),
    "quantization_config": (None,),
    "gated_linear_unit": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "head_bias": (False,),
    "attention_dropout": (0,),
}

# Known fields that do not change what the model computes: names in old checkpoints of the Hub, whose sizes the tensors
# repeat, options of training, initialization and generation, and transformers' own switches. (norm_before_gate is among
# them, because transformers always gates before the norm, whatever it says.)
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
    typical_p use_associative_scan use_bfloat16 use_cache use_falcon_mambapy use_mamba_kernels use_mambapy
    use_mem_eff_path""".split()
)


MAX_SIZE = 2**31 - 1  # of any size in a config.json, so that a damaged file is an error and not an endless allocation
MAX_LAYERS = 10_000


class FieldReader:
    """The fields of a config.json under our names, with transformers' defaults and checks of their types.

    Errors are ValueErrors that name the field as the file does.
    """

    def __init__(self, family: str, raw: dict):
        self.family, self.raw = family, raw
        self.defaults = {**_COMMON_DEFAULTS, **_DEFAULTS[family]}
        self.known = {self.hf_name(name) for name in self.defaults}

    def hf_name(self, name: str) -> str:
        """The name of a field in this family's config.json."""
        return _HF_NAMES[self.family].get(name, name)

    def __getitem__(self, name: str) -> Any:
        """The field's value, unchecked; its default if the file leaves it out or says null."""
        value = self.raw.get(self.hf_name(name))
        return self.defaults[name] if value is None else value

    def positive(self, name: str, most: int = MAX_SIZE) -> int:
        """A positive integer, at most `most`."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(name, "must be a positive integer")
        if value > most:
            raise self._error(name, f"must be at most {most}")
        return value

    def integer(self, name: str) -> int:
        """An integer."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(name, "must be an integer")
        return value

    def boolean(self, name: str) -> bool:
        """True or false."""
        if not isinstance(self[name], bool):
            raise self._error(name, "must be true or false")
        return self[name]

    def number(self, name: str) -> float:
        """A finite number. Python's JSON reader accepts NaN and Infinity; they are refused here."""
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
        """ValueError unless the file leaves the field out or gives it the value that follows from other fields."""
        if self[name] not in (None, expected):
            raise self._error(name, f"is not {equation} = {expected!r}")

    def _error(self, name, problem) -> ValueError:
        return ValueError(f"config.json: {self.hf_name(name)}={self[name]!r} {problem}")


def supported_values(family: str) -> dict[str, tuple]:
    """Fields of the family's config.json that change what the model computes, and the values that are implemented."""
    return SUPPORTED_VALUES | ({} if family.startswith("zamba") else {"hidden_act": ("silu", "swish")})


def unknown_fields(family: str, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names, sorted, that are no field of the family's config.json that is known."""
    known = FieldReader(family, {}).known | supported_values(family).keys() | IGNORED_FIELDS
    return tuple(sorted(set(names) - known))
