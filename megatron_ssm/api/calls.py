"""From a request's JSON to the sequences that it asks for."""

import json
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_ssm.inference.grammar import Grammar
from megatron_ssm.inference.text import most_characters

from .chat_template import ChatTemplate
from .errors import ApiError, bad_request
from .offsets import prompt_offsets
from .parameters import CHAT, REQUIRED, checked
from .sequences import Arguments, Sequence

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOO_LONG = "context_length_exceeded"
MOST_LOGPROBS = 400_000  # log-probabilities of a request: a reply with so many is made in about a second


@dataclass(frozen=True)
class Served:
    """The model that a server serves. name: what clients call it; stop_tokens: the ids that end a text.

    shares_prefixes: whether the prefix cache is shared by the users of different API keys.
    """

    name: str
    tokenizer: "Tokenizer"
    vocab_size: int
    stop_tokens: tuple[int, ...]
    max_length: int
    template: ChatTemplate
    shares_prefixes: bool = False

    @cached_property
    def most_characters(self) -> int | None:
        """How many characters a prompt may have without having too many tokens; None: that is not known before."""
        return most_characters(self.tokenizer, self.max_length)


@dataclass(frozen=True)
class Call:
    """What a request asks for. prompts: the text and the ids of each; the text of ids that are not repeated is empty.
    sequences: the replies, those to one prompt together.

    values: the parameters, see `parameters.checked`. logprobs: how many alternatives of each token, or None. offsets: where
    the tokens of each prompt begin in its text, if prompts are repeated with log-probabilities.
    """

    endpoint: str
    values: dict[str, Any]
    prompts: list[tuple[str, list[int]]]
    sequences: list[Sequence]
    logprobs: int | None
    offsets: list[list[int]]

    @property
    def is_chat(self) -> bool:
        """Whether the request is for the assistant's next message."""
        return self.endpoint == CHAT

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings at which a reply ends."""
        return _stop_strings(self.values)

    @property
    def drops_tokens(self) -> bool:
        """Whether the new token, which the engine always makes, was not asked for."""
        return self.values["max_tokens"] == 0

    @property
    def count_parameter(self) -> str:
        """The parameter that says how many sequences there are."""
        return "n" if self.values["n"] > 1 else REQUIRED[self.endpoint]

    @property
    def shows_tokens(self) -> bool:
        """Whether the reply shows its tokens one by one, beside its text."""
        return self.logprobs is not None or self.values["return_token_ids"]

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool((self.values["stream_options"] or {}).get("include_usage"))


def read_call(endpoint: str, body: Any, owner: str, served: Served) -> Call:
    """The call that a request's JSON means. owner: who made it, see `Keys.owner`. ApiError 400, or 404 for another model."""
    values = checked(endpoint, body)
    if values["model"] not in (None, served.name):
        raise ApiError(
            404, f"there is no model {values['model'][:100]!r} here, only {served.name!r}", "model", "model_not_found"
        )
    if values["stream_options"] is not None and not values["stream"]:
        raise bad_request("stream_options are for streams only", "stream_options")
    if values.get("best_of") not in (None, values["n"]):
        raise bad_request("best_of is not implemented: it must be equal to n", "best_of")
    logprobs = _logprobs(endpoint, values, served.vocab_size)
    prompts = _chat_prompt(values, served) if endpoint == CHAT else _prompts(values, served)
    most = [_new_tokens(endpoint, values, len(ids), served.max_length) for _, ids in prompts]
    if logprobs is not None:
        _check_size(endpoint, values, logprobs, prompts, most)
    shared: dict[str, Any] = dict(
        temperature=values["temperature"],
        top_k=values["top_k"] or None,
        top_p=values["top_p"] if values["top_p"] < 1 else None,
        repetition_penalty=values["repetition_penalty"],
        stop_tokens=() if values["ignore_eos"] else served.stop_tokens,
        stop_strings=_stop_strings(values),
        logit_bias=_logit_bias(values["logit_bias"], served.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=logprobs is not None and bool(values.get("echo")),
        grammar=_grammar(values),
        prefix_key="" if served.shares_prefixes else owner,
    )
    seed = secrets.randbits(62) if values["seed"] is None else values["seed"]
    rows = [(ids, new) for (_, ids), new in zip(prompts, most, strict=True) for _ in range(values["n"])]
    sequences = [Sequence(Arguments(ids, new, seed + i, **shared), i) for i, (ids, new) in enumerate(rows)]
    offsets = [prompt_offsets(served.tokenizer, *each) for each in prompts] if shared["prompt_logprobs"] else []
    return Call(endpoint, values, prompts, sequences, logprobs, offsets)


def _prompts(values: dict[str, Any], served: Served) -> list[tuple[str, list[int]]]:
    """The text and the ids of each prompt of a completion."""
    prompt = values["prompt"]
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts = []
    for each in [prompt] if is_one else prompt:
        if isinstance(each, str):
            prompts.append((each, _ids(each, served, "prompt")))
            continue
        if len(each) > served.max_length:
            raise _too_many(len(each), "prompt", served.max_length)
        if max(each) >= served.vocab_size:
            raise bad_request(f"token id {max(each)} is outside the vocabulary of {served.vocab_size}", "prompt")
        # `decode` would hold the interpreter's lock, as `encode` does below.
        text = served.tokenizer.decode_batch([each], skip_special_tokens=False)[0] if values["echo"] else ""
        prompts.append((text, each))
    if not all(ids for _, ids in prompts):
        raise bad_request("a prompt has no tokens", "prompt")
    return prompts


def _chat_prompt(values: dict[str, Any], served: Served) -> list[tuple[str, list[int]]]:
    """The prompt of a chat. The template writes the special tokens, so the tokenizer adds none."""
    text = served.template.render([_plain(message) for message in values["messages"]])
    ids = _ids(text, served, "messages", add_special_tokens=False)
    if not ids:
        raise bad_request("the chat template makes an empty prompt of the messages", "messages")
    return [(text, ids)]


def _ids(text: str, served: Served, param: str, add_special_tokens: bool = True) -> list[int]:
    """The ids of a text, which is not read if it is so long that they are certainly too many: that would take long."""
    most = served.most_characters
    if most is not None and len(text) > most:
        message = f"the prompt has {len(text)} characters, which are too many: {_rule(served.max_length)}"
        raise bad_request(message, param, TOO_LONG)
    # `encode` would hold the interpreter's lock, and so stop the engine: for seconds with a megabyte of text.
    return served.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its type and fields that are null or empty lists, whose content is one text."""
    plain = {name: value for name, value in message.items() if name != "type" and value not in (None, [])}
    if isinstance(plain["content"], list):
        plain["content"] = "".join(part["text"] for part in plain["content"])
    return plain


def _new_tokens(endpoint: str, values: dict[str, Any], prompt: int, longest: int) -> int:
    """How many tokens may follow a prompt of this length."""
    wanted, name = values["max_tokens"], "max_tokens"
    if endpoint == CHAT and values["max_completion_tokens"] is not None:
        wanted, name = values["max_completion_tokens"], "max_completion_tokens"
    if wanted == 0 and not values["echo"]:
        raise bad_request("max_tokens=0 is for echo only", "max_tokens")
    if prompt + (wanted != 0) > longest:
        raise _too_many(prompt, REQUIRED[endpoint], longest)
    if wanted is not None and prompt + wanted > longest:
        message = f"the prompt has {prompt} tokens, and {wanted} new ones do not fit: {_rule(longest)}"
        raise bad_request(message, name, TOO_LONG)
    return longest - prompt if wanted is None else max(1, wanted)


def _too_many(tokens: int, param: str, longest: int) -> ApiError:
    return bad_request(f"the prompt has {tokens} tokens, which are too many: {_rule(longest)}", param, TOO_LONG)


def _rule(longest: int) -> str:
    return f"a request may have {longest} tokens, prompt and new ones together"


def _logprobs(endpoint: str, values: dict[str, Any], vocab_size: int) -> int | None:
    """How many alternatives of each token are to be returned with their log-probabilities; None: no log-probabilities."""
    name = "top_logprobs" if endpoint == CHAT else "logprobs"
    count = values[name]
    if endpoint == CHAT and not values["logprobs"]:
        if count is not None:
            raise bad_request("top_logprobs needs logprobs to be true", name)
        return None
    if count is not None and count > vocab_size:
        raise bad_request(f"{name}={count} exceeds the vocabulary of {vocab_size}", name)
    return (count or 0) if endpoint == CHAT else count


def _check_size(
    endpoint: str, values: dict[str, Any], alternatives: int, prompts: list[tuple[str, list[int]]], most: list[int]
) -> None:
    """ApiError 400 if the replies may have more than MOST_LOGPROBS log-probabilities. most: new tokens after each prompt."""
    repeated = sum(len(ids) for _, ids in prompts) if values.get("echo") else 0
    tokens = values["n"] * (repeated + (0 if values["max_tokens"] == 0 else sum(most)))
    if tokens * (1 + alternatives) > MOST_LOGPROBS:
        raise bad_request(
            f"up to {tokens} tokens with the log-probabilities of {1 + alternatives} ids each are more than the "
            f"{MOST_LOGPROBS} log-probabilities that a request may ask for; a smaller max_tokens makes them fewer",
            "top_logprobs" if endpoint == CHAT else "logprobs",
        )


def _stop_strings(values: dict[str, Any]) -> tuple[str, ...]:
    stop = values["stop"] or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(biases: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """{token id: bias} from JSON, whose names are strings. A name has no leading zeros, so no id has two of them."""
    for token in biases or ():
        is_plain = token.isascii() and token.isdecimal() and len(token) < 20 and token == str(int(token))
        if not (is_plain and int(token) < vocab_size):
            raise bad_request(f"logit_bias: {token[:20]!r} is no id of the vocabulary of {vocab_size}", "logit_bias")
    return {int(token): float(bias) for token, bias in biases.items()} if biases else None


def _grammar(values: dict[str, Any]) -> tuple[str, str] | None:
    """The kind and the text of the grammar that the reply must match, or None."""
    found = []
    form = values["response_format"] or {"type": "text"}
    if form["type"] == "json_schema":
        if form.get("json_schema") is None:
            raise bad_request("response_format needs the field json_schema", "response_format")
        found.append(("response_format", ("json_schema", json.dumps(form["json_schema"]["schema"]))))
    elif form["type"] == "json_object":
        found.append(("response_format", ("json_object", "")))
    for name, kind in dict(guided_regex="regex", guided_grammar="lark").items():
        if values[name] is not None:
            found.append((name, (kind, values[name])))
    if len(found) > 1:
        raise bad_request(f"{found[0][0]} and {found[1][0]} exclude each other", found[1][0])
    for name, grammar in found:
        try:
            Grammar(*grammar)
        except ValueError as error:
            raise bad_request(f"{name}: {error}", name) from None
    return found[0][1] if found else None
