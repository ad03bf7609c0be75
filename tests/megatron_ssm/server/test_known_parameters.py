"""Parameters that clients send. Oracles: openai's types of requests, the names in vLLM's protocol, the reference's lists."""

import itertools
import json
import types
from collections.abc import Iterable, Sequence
from typing import Literal, Union, get_args, get_origin

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams
from typing_extensions import get_type_hints, is_typeddict

from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.request_models import (
    IGNORED,
    NOT_IMPLEMENTED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    parse_body,
)
from megatron_ssm.server.response_request import ResponseRequest

BODIES = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    ResponseRequest: {"input": "a"},
    EmbeddingRequest: {"input": "a"},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
}
OF_OPENAI = [
    (model, name, hint)
    for model, params in [
        (CompletionRequest, CompletionParams), (ChatRequest, ChatParams), (ResponseRequest, ResponseParams),
        (EmbeddingRequest, EmbeddingCreateParams),
    ]
    for name, hint in get_type_hints(params).items()
]  # fmt: skip
# vllm/entrypoints/openai/{completion,chat_completion,responses}/protocol.py, entrypoints/pooling/base/protocol.py and
# entrypoints/serve/tokenize/protocol.py of October 2026, with the names of 2025's entrypoints/openai/protocol.py.
GENERATING = """
    add_special_tokens allowed_token_ids bad_words best_of cache_salt ec_transfer_params echo frequency_penalty
    guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logit_bias logits_processors logprob_token_ids logprobs
    max_tokens min_p min_tokens model n presence_penalty priority prompt_logprobs repetition_detection
    repetition_penalty request_id response_format return_mm_kwargs return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
    spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options structured_outputs
    temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
    watermarking
"""
OF_VLLM = {
    CompletionRequest: f"{GENERATING} prompt prompt_embeds suffix",
    ChatRequest: f"""{GENERATING} add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
        include_reasoning max_completion_tokens media_io_kwargs messages mm_processor_kwargs parallel_tool_calls
        reasoning_effort return_prompt_text structural_tag tool_choice tools top_logprobs""",
    ResponseRequest: """background cache_salt enable_response_messages ignore_eos include include_stop_str_in_output input
        instructions logit_bias max_output_tokens max_tool_calls metadata mm_processor_kwargs model parallel_tool_calls
        previous_input_messages previous_response previous_response_id priority prompt prompt_cache_key reasoning
        repetition_penalty request_id seed service_tier skip_special_tokens stop store stream structured_outputs
        temperature text tool_choice tools top_k top_logprobs top_p truncation user vllm_xargs""",
    EmbeddingRequest: """add_special_tokens cache_salt dimensions embed_dtype encoding_format endianness input
        mm_processor_kwargs model normalize padding priority request_id truncate_prompt_tokens truncation_side
        use_activation user""",
    TokenizeRequest: """add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
        media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools""",
    DetokenizeRequest: "model tokens",
}  # fmt: skip


def plausible(hint, depth=0):
    """Values of a type, one for each member of a union; objects have all their fields."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [value for each in arguments if each is not type(None) for value in plausible(each, depth)]
    if origin is Literal:
        return list(arguments)
    if origin in (list, Sequence, Iterable):
        return [[value] for value in plausible(arguments[0], depth)] if depth < 8 else [[]]
    if is_typeddict(hint):
        fields = {name: plausible(each, depth + 1) for name, each in get_type_hints(hint).items()}
        return [
            {name: each[i % len(each)] for name, each in fields.items()} for i in range(max(map(len, fields.values())))
        ]
    return [{str: "a", bool: True, int: 1, float: 0.5, object: {}}.get(hint, {})]


def error_of(model, /, **changes):
    """The message of the error for a body with these fields; "" if it is accepted."""
    try:
        parse_body(model, json.dumps(BODIES[model] | changes))
    except ApiError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model, name, hint", OF_OPENAI, ids=lambda each: getattr(each, "__name__", "")[:20] or None)
def test_every_parameter_of_openais_is_known(model, name, hint):
    for value in plausible(hint):
        assert "there is no parameter" not in error_of(model, **{name: value}), value


@pytest.mark.parametrize("model", OF_VLLM)
def test_every_parameter_of_vllms_is_known(model):
    for name in OF_VLLM[model].split():
        assert f"no parameter {name}" not in error_of(model, **{name: "a"})


@pytest.mark.parametrize("model", BODIES)
def test_values_that_change_nothing_are_accepted(model):
    values = [(name, value) for name, values in NOT_IMPLEMENTED.items() for value in (None, *values)]
    values += itertools.product(IGNORED - model.model_fields.keys(), (None, 1, "a", {"a": [1]}))
    for name, value in values:
        if name not in model.model_fields:
            assert error_of(model, **{name: value}) == "", name


@pytest.mark.parametrize(
    "name, value",
    [
        ("use_beam_search", True), ("echo", True), ("include_stop_str_in_output", True), ("skip_special_tokens", False),
        ("prompt_logprobs", 1), ("truncate_prompt_tokens", 5), ("modalities", ["text", "audio"]), ("bad_words", ["a"]),
        ("audio", {"voice": "a", "format": "wav"}), ("chat_template", "{{ x }}"), ("moderation", {"model": "a"}),
    ],
)  # fmt: skip
def test_values_that_change_the_reply_are_refused(name, value):
    shown = value if isinstance(value, str) else json.dumps(value)
    assert error_of(ChatRequest, **{name: value}) == f"{name}={shown} is not implemented"


def test_tools_and_items_of_openais():
    """Hosted tools and their items are ignored. Items with what only OpenAI's server knows are errors."""
    hints = get_type_hints(ResponseParams)
    for tools in plausible(hints["tools"]):
        assert error_of(ResponseRequest, tools=tools) == ""
    kinds = {item["type"] for value in plausible(hints["input"]) if isinstance(value, list) for item in value}
    unknown = {kind for kind in kinds if "an item of type" in error_of(ResponseRequest, input=[{"type": kind}])}
    assert unknown == {"compaction", "compaction_trigger", "configuration_update", "item_reference"}
    refused = "tool_choice.type=web_search_preview: Input should be 'function' or 'custom'"
    assert error_of(ResponseRequest, tool_choice={"type": "web_search_preview"}) == refused


def test_other_names_are_refused():
    assert error_of(ChatRequest, verbosty="low") == "there is no parameter verbosty"
    assert "did you mean temperature?" in error_of(ResponseRequest, temprature=1)
