"""Parses and checks the JSON of a request, tokenizes its prompts, and makes the sequences for the engine."""

import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_ssm.engine import grammar as grammars
from megatron_ssm.engine.grammar import Grammar
from megatron_ssm.engine.options import GenerationOptions
from megatron_ssm.engine.text import most_characters
from megatron_ssm.engine.thinking import BEGIN, END, Thinking

from .chat_template import ChatTemplate
from .errors import ApiError, bad_request
from .offsets import prompt_offsets
from .request_models import (
    Body,
    ChatRequest,
    CompletionRequest,
    Conversation,
    GenerationRequest,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolChoice,
    parse_body,
)
from .response_request import ResponseChat, ResponseRequest
from .sequences import Sequence
from .tool_calls import CallParser, Schemas, calls_schema

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOO_LONG = "context_length_exceeded"
MAX_REPLIES = 256  # to all prompts of a request
ANY_OBJECT = {"type": "object"}
INSTRUCTING = ("system", "developer")  # roles
MAX_LOGPROBS = 400_000  # log-probabilities of a request: a reply with this many is made in about a second

# (text, token ids). The text is "" if the client sent ids and `echo` is off.
Prompt = tuple[str, list[int]]


@dataclass(frozen=True)
class ServedModel:
    """The model that a server serves, with its LoRA adapters.

    Args:
        name: The name of the model without adapters.
        stop_tokens: The ids that end a text.
        max_length: The maximum number of tokens of a request.
        shares_prefixes: True if the users of different API keys share the prefix cache.
        fingerprint: A name of the model, the software and its settings.
        tool_parser: The parser for the model's format of tool calls; None if the format is not known.
        hidden_size: The dimension of embeddings.
        defaults: Parameters of requests that leave them out, from generation_config.json (see `sampling_defaults`).
        root: The name of the model's directory.
        adapters: {name of an adapter: the name of its directory}.
        aliases: Further names of the model without adapters.
    """

    name: str
    tokenizer: "Tokenizer"
    vocab_size: int
    stop_tokens: tuple[int, ...]
    max_length: int
    template: ChatTemplate
    shares_prefixes: bool = False
    fingerprint: str = ""
    tool_parser: type[CallParser] | None = None
    hidden_size: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    root: str = ""
    adapters: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    @property
    def roots(self) -> dict[str, str]:
        """{name that requests may give as their model: the name of its directory}, the model without adapters first."""
        return {**dict.fromkeys((self.name, *self.aliases), self.root), **self.adapters}

    @cached_property
    def max_prompt_characters(self) -> int | None:
        """The number of characters beyond which a prompt certainly has too many tokens; None: there is none."""
        return most_characters(self.tokenizer, self.max_length)

    def adapter_of(self, name: str) -> str:
        """The adapter that a request's `model` names; "": the model itself, also without a name. ApiError 404 for others."""
        if name and name not in self.roots:
            names = ", ".join(map(repr, self.roots))
            raise ApiError(404, f"there is no model {name[:100]!r} here, only {names}", "model", "model_not_found")
        return name if name in self.adapters else ""

    def check_ids(self, ids: list[int], param: str) -> None:
        """ApiError 400 if the vocabulary does not have one of the token ids."""
        if ids and max(ids) >= self.vocab_size:
            raise bad_request(f"token id {max(ids)} is outside the vocabulary of {self.vocab_size}", param)


@dataclass(frozen=True)
class PreparedRequest:
    """A request that was checked, and whose prompts are token ids.

    Args:
        sequences: The sequences to generate, `body.n` consecutive ones for each prompt.
        offsets: Where the tokens of each prompt begin in its text, if prompts are repeated with log-probabilities.
        is_thinking: True if the prompt has begun the reasoning, False if replies may begin it, None if the model has none.
    """

    body: Body
    prompts: list[Prompt]
    sequences: list[Sequence]
    offsets: list[list[int]]
    is_thinking: bool | None = None

    @property
    def drops_tokens(self) -> bool:
        """True if max_tokens is 0: the engine generates one token anyway, which the reply leaves out."""
        return self.body.max_tokens == 0

    @property
    def shows_tokens(self) -> bool:
        """Return True if the reply shows its tokens one by one, beside its text."""
        return self.body.num_logprobs is not None or self.body.return_token_ids


def prepare_request(
    model: type[Body | ResponseRequest], text: bytes | str, owner: str, served: ServedModel
) -> PreparedRequest:
    """Check a request and tokenize its prompts.

    Args:
        model: The pydantic class of the body.
        text: The body, as JSON.
        owner: Who made the request, see `Keys.owner`.

    Raises:
        ApiError: 400, or 404 for another model.
    """
    parsed = parse_body(model, text)
    left_out = served.defaults.keys() - parsed.model_fields_set
    parsed = parsed.model_copy(update={name: served.defaults[name] for name in left_out})
    body = ResponseChat.of(parsed) if isinstance(parsed, ResponseRequest) else parsed
    adapter = served.adapter_of(body.model)
    _check_combinations(body, served.vocab_size)
    if isinstance(body, ChatRequest):
        _check_tools(body, served)
    elif len(body.prompts) * body.n > MAX_REPLIES:
        raise bad_request(f"{len(body.prompts)} prompts with n={body.n}: the limit is {MAX_REPLIES} replies", "n")
    prompts = _chat_prompt(body, served) if isinstance(body, ChatRequest) else _prompts(body, served)
    is_thinking = _has_begun_thinking(body, prompts[0][0], served.template) if isinstance(body, ChatRequest) else None
    new_tokens = [_new_tokens(body, len(ids), served.max_length) for _, ids in prompts]
    _check_size(body, prompts, new_tokens)
    grammar_parameter, grammar = _grammar(body, served)
    options = GenerationOptions.of(
        temperature=body.temperature,
        top_k=body.top_k if body.top_k > 0 else None,
        top_p=body.top_p if body.top_p < 1 else None,
        min_p=body.min_p or None,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        min_new_tokens=body.min_tokens,
        stop_tokens=(*body.stop_token_ids, *(() if body.ignore_eos else served.stop_tokens)),
        stop_strings=body.stop,
        logit_bias=_logit_bias(body.logit_bias, served.vocab_size),
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_logprobs is not None and body.echo,
        grammar=grammar,
        thinking=_thinking(body, is_thinking, grammar, served),
        prefix_key=" ".join(filter(None, ("" if served.shares_prefixes else owner, body.cache_salt))),
        adapter=adapter,
    )
    seed = secrets.randbits(62) if body.seed is None else body.seed
    rows = [(ids, new) for (_, ids), new in zip(prompts, new_tokens, strict=True) for _ in range(body.n)]
    sequences = [
        Sequence(ids, replace(options, max_new_tokens=new, seed=seed + i), i, grammar_parameter)
        for i, (ids, new) in enumerate(rows)
    ]
    offsets = [prompt_offsets(served.tokenizer, *prompt) for prompt in prompts] if options.prompt_logprobs else []
    return PreparedRequest(body, prompts, sequences, offsets, is_thinking)


def _check_combinations(body: Body, vocab_size: int) -> None:
    """ApiError 400 for parameters that do not go together."""
    if body.includes_usage and not body.stream:
        raise bad_request("stream_options are for streams only", "stream_options")
    for token in body.stop_token_ids:
        if token >= vocab_size:
            raise bad_request(f"stop_token_ids: {token} is not a token id (vocab_size={vocab_size})", "stop_token_ids")
    if body.best_of not in (None, body.n):
        raise bad_request("best_of is not implemented: it must be equal to n", "best_of")
    if isinstance(body, ChatRequest):
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    elif body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens=0 is for echo only", "max_tokens")
    if (body.num_logprobs or 0) > vocab_size:
        name = body.logprobs_field
        raise bad_request(f"{name}={body.num_logprobs} exceeds the vocabulary of {vocab_size}", name)


def _check_tools(body: ChatRequest, served: ServedModel) -> None:
    """ApiError 400 for tools that cannot be called."""
    choice, names = body.tool_choice, {tool.function.name for tool in body.tools}
    if len(names) < len(body.tools):
        raise bad_request("tools: two of them have the same name", "tools")
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise bad_request(f"tool_choice: there is no tool {choice.function.name!r}", "tool_choice")
    if choice == "required" and not names:
        raise bad_request("tool_choice=required needs tools", "tool_choice")
    if choice == "auto" and names and served.tool_parser is None:
        rule = "tools need a chat template that writes calls in a known format, --tool-parser, or tool_choice=required"
        raise bad_request(rule, "tools")


def _prompts(body: CompletionRequest, served: ServedModel) -> list[Prompt]:
    """The prompts of a completion."""
    prompts: list[Prompt] = []
    for prompt in body.prompts:
        text, ids = prompt, read_prompt(prompt, served, "prompt")
        if not isinstance(text, str):
            # `decode` would hold the interpreter's lock, as `encode` does below.
            text = served.tokenizer.decode_batch([ids], skip_special_tokens=False)[0] if body.echo else ""
        prompts.append((text, ids))
    if not all(ids for _, ids in prompts):
        raise bad_request("a prompt has no tokens", "prompt")
    return prompts


def read_prompt(prompt: str | list[int], served: ServedModel, param: str) -> list[int]:
    """Return the ids of a text, or given ids. ApiError 400, which names `param`, if there are too many, or wrong ones."""
    if isinstance(prompt, str):
        return _token_ids(prompt, served, param)
    if len(prompt) > served.max_length:
        raise too_many(len(prompt), param, served.max_length)
    served.check_ids(prompt, param)
    return prompt


def _chat_prompt(body: ChatRequest, served: ServedModel) -> list[Prompt]:
    """The prompt of a chat. The template writes the special tokens, so the tokenizer adds none."""
    text = chat_text(body, served)
    ids = _token_ids(text, served, body.prompt_field, add_special_tokens=False)
    if not ids:
        raise bad_request("the chat template makes an empty prompt of the messages", body.prompt_field)
    return [(text, ids)]


def chat_text(body: Conversation, served: ServedModel) -> str:
    """Return the text that the chat template makes of a conversation. ApiError 400 for a wrong one."""
    messages = _with_one_instruction([message.for_template() for message in body.messages])
    for message in messages:
        if message["role"] == "developer" and "developer" not in served.template.text:
            message["role"] = "system"
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    starts_message = (
        not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    )
    tools = [tool.model_dump(exclude_unset=True) for tool in body.usable_tools]
    variables = {
        "documents": body.documents or None, **body.template_variables, "tools": tools or None,
        "add_generation_prompt": starts_message,
    }  # fmt: skip
    try:
        text = served.template.render(messages, variables, body.prompt_field)
    except ApiError:
        later = [message for message in messages[1:] if message["role"] in INSTRUCTING]
        if not later:
            raise
        for message in later:
            message["role"] = "user"  # many templates allow instructions only at the beginning
        text = served.template.render(messages, variables, body.prompt_field)
    if body.continue_final_message:
        text = _without_end(text, messages[-1]["content"])
    return text


def _with_one_instruction(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system and developer messages at the beginning, because many templates allow only one."""
    leading = list(itertools.takewhile(lambda message: message["role"] in INSTRUCTING, messages))
    if not leading:
        return messages
    content = "\n\n".join(message["content"] for message in leading)
    return [{**leading[0], "content": content}, *messages[len(leading) :]]


def _without_end(prompt: str, content: str) -> str:
    """Cut a prompt after the content of its last message. The template may have stripped white space from that content."""
    place = prompt.rfind(content.strip()) if content.strip() else -1
    if place < 0:
        message = "continue_final_message needs a last message with content that the chat template shows"
        raise bad_request(message, "continue_final_message")
    whole = content.lstrip()
    return prompt[:place] + (whole if prompt.startswith(whole, place) else content.strip())


def _has_begun_thinking(body: ChatRequest, prompt: str, template: ChatTemplate) -> bool | None:
    """See `PreparedRequest.is_thinking`."""
    if not template.reasons:
        return None
    last = body.messages[-1].for_template()["content"] if body.continue_final_message else ""
    return prompt.rstrip().endswith(BEGIN) or last.rfind(BEGIN) > last.rfind(END)


def _thinking(body: Body, is_thinking: bool | None, grammar: Grammar | None, served: ServedModel) -> Thinking | None:
    """The engine's `Thinking`. None unless the reasoning has a budget, or a grammar applies to the text
    after it.
    """
    if not isinstance(body, ChatRequest) or is_thinking is None:
        return None
    if not is_thinking if grammar is not None else body.budget is None:
        return None
    ids = tuple(served.tokenizer.encode_batch([END], add_special_tokens=False)[0].ids)
    return Thinking(ids, is_thinking, body.budget)


def _token_ids(text: str, served: ServedModel, param: str, add_special_tokens: bool = True) -> list[int]:
    """The ids of a text. A longer text than `served.max_prompt_characters` is refused without tokenizing it, which would
    take seconds.
    """
    max_characters = served.max_prompt_characters
    if max_characters is not None and len(text) > max_characters:
        message = f"the prompt has {len(text)} characters, which are too many: {_rule(served.max_length)}"
        raise bad_request(message, param, TOO_LONG)
    # `encode` would hold the interpreter's lock, and so stop the engine: for seconds with a megabyte of text.
    return served.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


def _new_tokens(body: Body, prompt: int, max_length: int) -> int:
    """The maximum number of tokens after a prompt of this length."""
    name, wanted = body.new_tokens
    if prompt + (wanted != 0) > max_length:
        raise too_many(prompt, body.prompt_field, max_length)
    if wanted is not None and prompt + wanted > max_length:
        message = f"the prompt has {prompt} tokens, and {wanted} new ones do not fit: {_rule(max_length)}"
        raise bad_request(message, name, TOO_LONG)
    return max_length - prompt if wanted is None else max(1, wanted)


def too_many(tokens: int, param: str, max_length: int) -> ApiError:
    """Return the error for a prompt that is too long."""
    return bad_request(f"the prompt has {tokens} tokens, which are too many: {_rule(max_length)}", param, TOO_LONG)


def _rule(max_length: int) -> str:
    return f"a request may have {max_length} tokens, prompt and new ones together"


def _check_size(body: Body, prompts: list[Prompt], new_tokens: list[int]) -> None:
    """ApiError 400 if the replies may have more than MAX_LOGPROBS log-probabilities. new_tokens: The maximum number of new
    tokens for each prompt.
    """
    if body.num_logprobs is None:
        return
    echoed_tokens = sum(len(ids) for _, ids in prompts) if body.echo else 0
    tokens = body.n * (echoed_tokens + (0 if body.max_tokens == 0 else sum(new_tokens)))
    each = 1 + body.num_logprobs
    if tokens * each > MAX_LOGPROBS:
        raise bad_request(
            f"{tokens} tokens x {each} log-probabilities exceed the limit of {MAX_LOGPROBS}; lower max_tokens",
            body.logprobs_field,
        )


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float] | None:
    """{token id: bias} from JSON, whose names are strings. Names with leading zeros are refused, so that no id occurs
    twice.
    """
    for token in biases:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", token) or int(token) >= vocab_size:
            message = f"logit_bias: {token[:20]!r} is not a token id (vocab_size={vocab_size})"
            raise bad_request(message, "logit_bias")
    return {int(token): float(bias) for token, bias in biases.items()} or None


def _schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    """The JSON schema that a reply of this form must match, or None."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ANY_OBJECT
    if form.json_schema is None:
        raise bad_request("response_format needs the field json_schema", "response_format")
    return form.json_schema.schema_


def schemas_of(tools: Iterable[Tool]) -> Schemas:
    """Return the JSON schemas of the tools' arguments, which are objects."""
    return {tool.function.name: {"type": "object", **tool.function.parameters} for tool in tools}


def _forced_calls(body: GenerationRequest) -> dict[str, Any] | None:
    """The JSON schema of the tool calls that the reply must consist of, or None."""
    if not isinstance(body, ChatRequest) or not body.forced_tools:
        return None
    return calls_schema(schemas_of(body.forced_tools), body.max_calls)


def _grammar(body: GenerationRequest, served: ServedModel) -> tuple[str, Grammar | None]:
    """The parameter that gives the grammar of the reply, and the grammar; ("", None) if there is none.

    Calls that are forced leave no room for another grammar. Where the reply may call tools, it is calls or JSON.
    """
    outputs, forced = body.structured_outputs or StructuredOutputs(), _forced_calls(body)
    given: list[tuple[str, Callable[..., Grammar], Any]] = [
        ("tools", grammars.json_schema, forced),
        (body.format_field, grammars.json_schema, _schema(body.response_format)),
        ("structured_outputs.json", grammars.json_schema, outputs.json_),
        ("structured_outputs.json_object", grammars.json_schema, ANY_OBJECT if outputs.json_object else None),
        ("structured_outputs.choice", grammars.choice, outputs.choice),
        ("structured_outputs.regex", grammars.regex, outputs.regex),
        ("structured_outputs.grammar", grammars.lark, outputs.grammar),
        ("guided_json", grammars.json_schema, body.guided_json),
        ("guided_choice", grammars.choice, body.guided_choice),
        ("guided_regex", grammars.regex, body.guided_regex),
        ("guided_grammar", grammars.lark, body.guided_grammar),
    ]
    found = [row for row in given if row[2] is not None][: None if forced is None else 1]
    if not found:
        return "", None
    name, make, value = found[0]
    others = [other for other, *same in found[1:] if same != [make, value]] + ["min_tokens"] * (body.min_tokens > 0)
    if others:
        raise bad_request(f"{name} and {others[0]} exclude each other", others[0])
    try:
        grammar = make(value)
        if forced is None and isinstance(body, ChatRequest) and body.usable_tools:
            grammar = _or_calls(name, grammar, body, served)
        return name, grammar
    except ValueError as error:
        raise bad_request(f"{name}: {error}", name) from None


def _or_calls(name: str, grammar: Grammar, body: ChatRequest, served: ServedModel) -> Grammar:
    """The grammar of a reply that is JSON or calls tools. name: the parameter that gives the grammar."""
    if grammar.kind != "json_schema":
        raise bad_request(f"tools and {name} exclude each other, unless tool_choice is none", name)
    assert served.tool_parser is not None, "the request was checked"
    rules, schemas = served.tool_parser.rules, schemas_of(body.tools)
    added = served.tokenizer.get_added_tokens_decoder()
    start = f"start: answer | calls\nanswer: %json {grammar.text}\n"
    try:
        grammars.lark(start + rules(schemas, body.max_calls))  # checks it, in a process that has no special tokens
    except ValueError as error:
        raise bad_request(f"tools: {str(error).splitlines()[0]}", "tools") from None

    def mark(text: str) -> str:
        special = [id for id, token in added.items() if token.special and token.content == text]
        return f"<[{special[0]}]>" if special else json.dumps(text)

    return Grammar.unchecked("lark", start + rules(schemas, body.max_calls, mark))
