"""What a request's JSON asks for. Oracle: the interface's documentation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ssm.engine.generation_config import sampling_defaults
from megatron_ssm.engine.text import load_tokenizer, write_byte_tokenizer
from megatron_ssm.server import prepared_request
from megatron_ssm.server.chat_template import ChatTemplate
from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.prepared_request import ServedModel, prepare_request
from megatron_ssm.server.request_models import ChatRequest, CompletionRequest
from megatron_ssm.server.response_request import ResponseRequest

CHAT, COMPLETIONS = ChatRequest, CompletionRequest
CHATTING = {"messages": [{"role": "user", "content": "Hi"}]}
LENGTH, VOCABULARY = 30, 10
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "http.md"
CASES = [
    # endpoint, chat template, body, param and message of the error
    (COMPLETIONS, "", {"prompt": "a", "logprobs": 20}, "logprobs", "logprobs=20 exceeds the vocabulary of 10"),
    (CHAT, "a", {**CHATTING, "logprobs": True, "top_logprobs": 20}, "top_logprobs", "top_logprobs=20 exceeds"),
    (CHAT, "a", {**CHATTING, "top_logprobs": 1}, "top_logprobs", "top_logprobs needs logprobs to be true"),
    (CHAT, None, CHATTING, "messages", "the model has no chat template"),
    (CHAT, "a" * LENGTH, CHATTING, "messages", "the prompt has 30 tokens, which are too many: a request may have 30"),
    (CHAT, "a" * LENGTH, {**CHATTING, "max_tokens": 5}, "messages", "the prompt has 30 tokens, which are too many"),
    (CHAT, "a" * 20, {**CHATTING, "max_tokens": 11}, "max_tokens", "20 tokens, and 11 new ones do not fit"),
    (CHAT, "a" * 20, {**CHATTING, "max_completion_tokens": 11}, "max_completion_tokens", "11 new ones do not fit"),
    (COMPLETIONS, "", {"prompt": "a" * 20}, "max_tokens", "20 tokens, and 16 new ones do not fit"),
    (
        COMPLETIONS,
        "",
        {"prompt": "a" * 391},
        "prompt",
        "the prompt has 391 characters, which are too many: a request may",
    ),
    (
        COMPLETIONS,
        "",
        {"prompt": "a" * 390},
        "prompt",
        "the prompt has 390 tokens",
    ),  # a token has at most 13 characters
    (COMPLETIONS, "", {"prompt": "a", "n": 2, "best_of": 3}, "best_of", "best_of is not implemented"),
    (
        CHAT,
        "a",
        {**CHATTING, "guided_json": {}, "min_tokens": 1},
        "min_tokens",
        "guided_json and min_tokens exclude each",
    ),
    (CHAT, "a", {**CHATTING, "structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", ".regex: regex: "),
    (
        COMPLETIONS,
        "",
        {"prompt": "a", "structured_outputs": {"json": "{}", "choice": ["a"]}},
        "structured_outputs.choice",
        "structured_outputs.json and structured_outputs.choice exclude each other",
    ),
    (
        COMPLETIONS,
        "",
        {"prompt": "a", "stop_token_ids": [1, 10]},
        "stop_token_ids",
        "stop_token_ids: 10 is not a token id",
    ),
    *(
        (
            COMPLETIONS,
            "",
            {"prompt": "a", "logit_bias": {"1": 100, name: -100}},
            "logit_bias",
            f"'{name}' is not a token id",
        )
        for name in ("01", "00", "10", "-1", " 1", "1.0", "\u0661")
    ),
    (COMPLETIONS, "", {"prompt": [10**6] * 31}, "prompt", "the prompt has 31 tokens, which are too many"),
    (CHAT, "a" * 391, CHATTING, "messages", "the prompt has 391 characters, which are too many"),
]


def served(directory, template):
    write_byte_tokenizer(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return ServedModel("model", load_tokenizer(directory), VOCABULARY, (256,), LENGTH, ChatTemplate(directory))


def prepared(model, body, served_model):
    return prepare_request(model, json.dumps(body), "", served_model)


@pytest.mark.parametrize("endpoint, template, body, param, message", CASES)
def test_errors_name_the_parameter(tmp_path, endpoint, template, body, param, message):
    with pytest.raises(ApiError, match=message) as refused:
        prepared(endpoint, body, served(tmp_path, template))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.code == ("context_length_exceeded" if "request may have" in str(refused.value) else None)


def test_how_many_tokens_there_may_be(tmp_path):
    model = served(tmp_path, "a" * 20)

    def most(endpoint, **body):
        return prepared(endpoint, body, model).sequences[0].options.max_new_tokens

    assert most(CHAT, **CHATTING) == 10 and most(CHAT, **CHATTING, max_tokens=10) == 10
    assert most(COMPLETIONS, prompt="a" * 14) == 16
    assert most(COMPLETIONS, prompt="a" * LENGTH, max_tokens=0, echo=True) == 1  # the engine always makes one


def test_empty_fields_of_messages_are_not_given_to_the_template(tmp_path):
    """Templates ask whether they are there. Nor is the type, which clients such as lm-eval's send."""
    model = served(tmp_path, "{{ messages[0] | list | join(',') }}")
    empty = {"tool_calls": [], "refusal": None, "type": "text"}
    message = {**empty, "role": "assistant", "content": [{"type": "text", "text": "a"}]}
    (prompt,) = prepared(CHAT, {"messages": [message]}, model).prompts
    assert prompt[0] == "role,content"


def test_ids_become_text_only_to_be_repeated(tmp_path):
    model, body = served(tmp_path, None), {"prompt": [1, 2], "max_tokens": 5}
    assert prepared(COMPLETIONS, {**body, "echo": True}, model).prompts == [("\x01\x02", [1, 2])]
    assert prepared(COMPLETIONS, body, replace(model, tokenizer=None)).prompts == [("", [1, 2])]


def test_as_many_candidates_as_replies(tmp_path):
    body = {"prompt": "a", "n": 2, "best_of": 2}
    assert len(prepared(COMPLETIONS, body, served(tmp_path, None)).sequences) == 2


def arguments_of(tmp_path, **body):
    (sequence,) = prepared(COMPLETIONS, {"prompt": "a", "max_tokens": 5, **body}, served(tmp_path, None)).sequences
    return sequence.options


def test_options_of_sampling_reach_the_engine(tmp_path):
    options = dict(temperature=0.5, top_k=3, top_p=0.4, min_p=0.2, repetition_penalty=1.1, frequency_penalty=0.3,
                   presence_penalty=-0.6)  # fmt: skip
    found = arguments_of(tmp_path, **options, min_tokens=2, stop_token_ids=[4, 5])
    assert {name: getattr(found, name) for name in options} == options
    assert (found.min_new_tokens, found.stop_tokens) == (2, (4, 5, 256))
    neutral = arguments_of(tmp_path, top_k=-1, top_p=1, min_p=0, ignore_eos=True)
    assert (neutral.top_k, neutral.top_p, neutral.min_p, neutral.stop_tokens) == (None, None, None, ())


def test_names_of_grammars(tmp_path):
    """The parameters of vLLM, now and before."""
    pytest.importorskip("llguidance")
    schema = {"type": "null"}
    for new, old in (
        ({"json": schema}, {"guided_json": schema}), ({"json": json.dumps(schema)}, {"guided_json": json.dumps(schema)}),
        ({"choice": ["a", "b"]}, {"guided_choice": ["a", "b"]}), ({"regex": "a"}, {"guided_regex": "a"}),
        ({"grammar": 'start: "a"'}, {"guided_grammar": 'start: "a"'}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
    ):  # fmt: skip
        found = arguments_of(tmp_path, **old).grammar
        assert found is not None and found == arguments_of(tmp_path, structured_outputs=new).grammar
    assert arguments_of(tmp_path, structured_outputs={"json_object": False}).grammar is None


def test_a_grammar_may_be_given_twice(tmp_path):
    """guidance's client sends it by both of its names."""
    grammar = 'start: "a"'
    once = arguments_of(tmp_path, guided_grammar=grammar).grammar
    both = dict(guided_grammar=grammar, structured_outputs={"grammar": grammar}, guided_decoding_backend="guidance")
    assert arguments_of(tmp_path, **both).grammar == once
    with pytest.raises(ApiError, match="structured_outputs.grammar and guided_grammar exclude each other"):
        arguments_of(tmp_path, guided_grammar=grammar, structured_outputs={"grammar": 'start: "b"'})


def test_a_salt_separates_the_prefix_cache(tmp_path):
    model, body = served(tmp_path, None), {"prompt": "a", "max_tokens": 5}
    keys = [
        prepare_request(COMPLETIONS, json.dumps(body | salt), owner, model).sequences[0].options.prefix_key
        for salt in ({}, {"cache_salt": "1"})
        for owner in ("", "key 1", "key 11")
    ]
    assert len(set(keys)) == len(keys) and keys[0] == ""


TWO_PROMPTS = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 5, "logprobs": 4}


@pytest.mark.parametrize(
    "endpoint, body, count",
    [
        (COMPLETIONS, TWO_PROMPTS, 2 * (5 + 5) * (1 + 4)),
        (COMPLETIONS, {**TWO_PROMPTS, "logprobs": 0}, 2 * (5 + 5)),
        (COMPLETIONS, {**TWO_PROMPTS, "echo": True}, 2 * (3 + 5 + 2 + 5) * (1 + 4)),
        (COMPLETIONS, {**TWO_PROMPTS, "echo": True, "max_tokens": 0}, 2 * (3 + 2) * (1 + 4)),
        (CHAT, {**CHATTING, "n": 3, "logprobs": True, "top_logprobs": 4}, 3 * 10 * (1 + 4)),  # a prompt of 20 tokens
        (CHAT, {**CHATTING, "n": 3, "logprobs": True, "max_tokens": 5}, 3 * 5),
    ],
)
def test_how_many_log_probabilities_there_may_be(tmp_path, monkeypatch, endpoint, body, count):
    model = served(tmp_path, "a" * 20)
    assert f"at most {prepared_request.MAX_LOGPROBS} log-probabilities" in PAGE.read_text()
    monkeypatch.setattr(prepared_request, "MAX_LOGPROBS", count)
    prepared(endpoint, body, model)
    monkeypatch.setattr(prepared_request, "MAX_LOGPROBS", count - 1)
    with pytest.raises(ApiError, match=f"exceed the limit of {count - 1};") as refused:
        prepared(endpoint, body, model)
    assert refused.value.param == ("top_logprobs" if endpoint == CHAT else "logprobs")


def test_the_generation_config_has_the_defaults_of_sampling(tmp_path):
    """transformers samples with them, too; `do_sample: false` is its greedy search, and top_k 0 switches top_k off."""

    def sampled(config, endpoint=CHAT, **body):
        plain = served(tmp_path, "a")
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        model = replace(plain, defaults=sampling_defaults(tmp_path))
        found = prepared(endpoint, body if endpoint is not CHAT else CHATTING | body, model).sequences[0].options
        return found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty

    config = dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    assert sampled(config) == (0.6, 20, 0.9, 0.1, 1.1)
    assert sampled(config, ResponseRequest, input="Hi") == sampled(config, COMPLETIONS, prompt="Hi") == sampled(config)
    replaced = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert sampled(config, **replaced) == (1.0, None, None, None, 1.0)
    assert sampled(config, temperature=None, top_p=0.5) == (0.6, 20, 0.5, 0.1, 1.1)  # null is left out
    assert sampled(config | dict(do_sample=False))[0] == 0.0
    assert sampled(dict(temperature=None, top_k=0)) == (1.0, None, None, None, 1.0)
    with pytest.raises(ValueError, match="generation_config.json: temperature=-1 must be"):
        sampled(dict(temperature=-1))
