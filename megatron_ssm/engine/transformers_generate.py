"""`model.generate` with the arguments, defaults and result of transformers' `generate`."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from commfabric.collectives.agreement import together
from commfabric.foundation.command_line import did_you_mean
from megatron_ssm.model.model import Model
from megatron_ssm.spec.reader import token_ids

from .beam_search import BeamSearch, BeamSettings
from .generation import generate
from .generation_config import read_generation_config
from .options import GenerationOptions

# The implemented arguments, with the defaults of transformers 5.24.
DEFAULTS = dict(
    max_length=None, max_new_tokens=None, min_length=0, min_new_tokens=None, do_sample=False, num_beams=1,
    num_return_sequences=1, temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0, length_penalty=1.0,
    early_stopping=False, eos_token_id=None, pad_token_id=None, stop_strings=None, min_p=None,
)  # fmt: skip
DEFAULT_NEW_TOKENS = 20

# Arguments that are not implemented, with the values that do not change the tokens.
_NOT_IMPLEMENTED = dict(
    num_beam_groups=1, diversity_penalty=0.0, penalty_alpha=None, typical_p=1.0, top_h=None,
    epsilon_cutoff=0.0, eta_cutoff=0.0, no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0,
    encoder_repetition_penalty=1.0, bad_words_ids=None, force_words_ids=None, constraints=None,
    forced_bos_token_id=None, forced_eos_token_id=None, exponential_decay_length_penalty=None, suppress_tokens=None,
    begin_suppress_tokens=None, sequence_bias=None, guidance_scale=None, renormalize_logits=None, max_time=None,
    prompt_lookup_num_tokens=None, dola_layers=None, logits_processor=None, stopping_criteria=None,
    prefix_allowed_tokens_fn=None, assistant_model=None, token_healing=None, watermarking_config=None, use_mtp=None,
    return_dict_in_generate=False, output_scores=False, output_logits=None, output_attentions=False,
    output_hidden_states=False, streamer=None, inputs_embeds=None, past_key_values=None, negative_prompt_ids=None,
)  # fmt: skip
# Fields of a generation configuration that do not change the tokens.
_IGNORED = frozenset(
    """use_cache cache_implementation cache_config max_cache_len bos_token_id decoder_start_token_id transformers_version
    _from_model_config is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
    speculation_type compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size
    remove_invalid_values synced_gpus tokenizer""".split()
)


@dataclass(frozen=True)
class _Call:
    """A call in terms of this package: `repetitions` sequences for each prompt, by beam search or with `options` of
    `generate`.
    """

    attention_mask: torch.Tensor | None
    repetitions: int
    beams: BeamSettings | None
    options: dict


def transformers_generate(
    model: Model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    generation_config: Any,
    seed: int | None,
    arguments: Mapping[str, Any],
) -> torch.Tensor:
    """See `Model.generate`. The ranks first compare their arguments."""

    def prepare() -> tuple[_Call, BeamSearch | None]:
        values = _merged_arguments(model, generation_config, arguments)
        call = _as_call(model, input_ids, attention_mask, values, seed)
        if call.beams is None:
            return call, None
        if model.context_ranks is not None:
            raise ValueError(f"num_beams={call.beams.num_beams}: there is no beam search on context ranks")
        return call, BeamSearch(model, input_ids, call.attention_mask, call.beams)  # memory may be short on one rank

    def same(prepared: tuple[_Call, BeamSearch | None]) -> dict[str, Any]:
        call, mask = prepared[0], prepared[0].attention_mask
        return vars(call) | {"attention_mask": mask if mask is None else mask.tolist(), "input_ids": input_ids.tolist()}

    call, search = together(prepare, model.generating_groups, same, model.device)
    rows = torch.arange(len(input_ids), device=input_ids.device).repeat_interleave(call.repetitions)
    if search is not None:
        new = search.run()
    else:
        mask = None if call.attention_mask is None else call.attention_mask[rows]
        new = generate(model, input_ids[rows], mask, **call.options)
    return torch.cat([input_ids[rows], new.to(input_ids.device)], dim=1)


def _as_call(model, input_ids, attention_mask, values, seed) -> _Call:
    """The call for these prompts. ValueError for arguments that are invalid or not implemented."""
    eos, pad = token_ids(values["eos_token_id"]), values["pad_token_id"]
    model.check_inputs(input_ids)
    if attention_mask is None and pad is not None and pad not in eos:
        attention_mask = (input_ids != pad).long()
        if (attention_mask.diff(dim=1) < 0).any():  # transformers would mask them without a warning
            raise ValueError(f"pad_token_id={pad} follows other tokens of a prompt: pass an attention_mask")
    model.check_inputs(input_ids, attention_mask)
    length = input_ids.shape[1]
    longest, shortest = _new_tokens(values, length), values["min_new_tokens"]
    shortest = max(0, values["min_length"] - length) if shortest is None else shortest
    chosen = ("temperature", "top_k", "top_p", "min_p") if values["do_sample"] else ()
    options: dict[str, Any] = dict(
        {name: values[name] for name in (*chosen, "repetition_penalty")},
        max_new_tokens=longest, min_new_tokens=shortest, stop_tokens=eos, seed=seed,
        stop_strings=values["stop_strings"] or (),
    )  # fmt: skip
    GenerationOptions.of(**options)  # ValueError for a value out of range
    repetitions = values["num_return_sequences"]
    if values["num_beams"] > 1:
        fill = (pad or eos[0]) if eos else -1  # as in transformers, which treats pad_token_id=0 as missing
        beams = BeamSettings(
            values["num_beams"], longest, eos, fill, values["length_penalty"], values["early_stopping"],
            values["repetition_penalty"], shortest, repetitions,
        )  # fmt: skip
        return _Call(attention_mask, repetitions, beams, {})
    options["pad_token_id"] = pad if pad is not None else (eos or (0,))[0]
    return _Call(attention_mask, repetitions, None, options)


def _merged_arguments(model, generation_config, arguments) -> dict[str, Any]:
    """DEFAULTS, overridden by the checkpoint's configuration, `generation_config` and the arguments, in this order.

    The checkpoint's configuration may have unknown fields, as in transformers. ValueError for a value that is invalid, or
    that would change the tokens and is not implemented.
    """
    values: dict[str, Any] = dict(DEFAULTS)
    checkpoint = _checkpoint_configuration(model)
    for source in (checkpoint, _as_dict(generation_config), arguments):
        for name, value in source.items():
            value = value.tolist() if torch.is_tensor(value) and name in DEFAULTS else value
            if name in _NOT_IMPLEMENTED and value not in (None, [], _NOT_IMPLEMENTED[name]):
                raise ValueError(f"generate: {name}={value!r} is not implemented")
            if (
                name not in DEFAULTS
                and name not in _NOT_IMPLEMENTED
                and name not in _IGNORED
                and source is not checkpoint
            ):
                raise ValueError(f"generate has no argument {name}{did_you_mean(name, DEFAULTS)}")
            if name in DEFAULTS and (value is not None or source is arguments):
                values[name] = value
    for name in ("temperature", "repetition_penalty", "length_penalty", "early_stopping", "do_sample", "min_length"):
        values[name] = DEFAULTS[name] if values[name] is None else values[name]
    _check_values(values)
    sampled = values["do_sample"]
    values["top_k"] = values["top_k"] if sampled and values["top_k"] else None
    values["top_p"] = values["top_p"] if sampled and values["top_p"] not in (None, 1.0) else None
    return values


def _check_values(values) -> None:
    for name in ("num_beams", "num_return_sequences"):
        if operator.index(values[name]) < 1:
            raise ValueError(f"{name}={values[name]} must be at least 1")
    beams, sequences = values["num_beams"], values["num_return_sequences"]
    if beams > 1 and values["do_sample"]:
        raise ValueError("do_sample=True with num_beams > 1 is not implemented")
    if beams > 1 and values["stop_strings"]:
        raise ValueError("stop_strings with num_beams > 1 are not implemented")
    if not values["do_sample"] and sequences > beams:
        raise ValueError(
            f"num_return_sequences={sequences} needs do_sample=True or at least as many beams, not {beams}"
        )
    if values["early_stopping"] not in (True, False, "never"):
        raise ValueError(f"early_stopping={values['early_stopping']!r} must be True, False or 'never'")


def _new_tokens(values, length) -> int:
    if values["max_new_tokens"] is not None:
        return values["max_new_tokens"]
    if values["max_length"] is None:
        return DEFAULT_NEW_TOKENS
    if values["max_length"] <= length:
        raise ValueError(f"max_length={values['max_length']} leaves no room after a prompt of {length} tokens")
    return values["max_length"] - length


def _checkpoint_configuration(model) -> dict[str, Any]:
    """The checkpoint's generation_config.json; without one, the fields of its config.json that concern generation."""
    if model.directory is not None and (Path(model.directory) / "generation_config.json").is_file():
        return read_generation_config(model.directory)
    return {name: value for name, value in model.config.raw.items() if name in DEFAULTS or name in _NOT_IMPLEMENTED}


def _as_dict(generation_config) -> dict[str, Any]:
    if generation_config is None:
        return {}
    return dict(generation_config if isinstance(generation_config, dict) else generation_config.to_dict())
