"""The parameters of requests: one table, from which requests are checked and the OpenAPI schema is made.

Each parameter is a JSON schema with a description and, if it has one, a default. null stands for the default everywhere.
"""

from typing import Any

from sparsefusion.foundation.command_line import did_you_mean

from .errors import bad_request
from .schema import NOT_IMPLEMENTED, check

CHAT, COMPLETIONS = "chat/completions", "completions"
MOST_PROMPTS, MOST_CHOICES = 128, 128


def _only(*values: Any) -> dict[str, Any]:
    """The schema of what is not implemented, but has values that change nothing."""
    return {"enum": list(values), NOT_IMPLEMENTED: True, "description": "Not implemented: other values are an error."}


TOKEN = dict(type="integer", minimum=0)
STOP = dict(type="string", minLength=1, maxLength=1000)
CONTENT_PART = dict(
    type="object", required=["type", "text"], additionalProperties=False,
    properties=dict(type=dict(type="string", enum=["text"]), text=dict(type="string")),
)  # fmt: skip
MESSAGE = dict(
    type="object",
    required=["role", "content"],
    additionalProperties=False,
    properties=dict(
        role=dict(type="string", enum=["system", "developer", "user", "assistant"]),
        content=dict(
            anyOf=[dict(type="string"), dict(type="array", items=CONTENT_PART, minItems=1)],
            description="a text, or a list of texts",
        ),
        name=dict(type="string"),
        type=_only("text"),
        tool_calls=_only([]),
    ),
)

SHARED: dict[str, dict[str, Any]] = dict(
    model=dict(type="string", description="The name of the served model, as /v1/models lists it; may be left out."),
    n=dict(type="integer", minimum=1, maximum=MOST_CHOICES, default=1, description="How many replies to a prompt."),
    stream=dict(type="boolean", default=False, description="Whether tokens are sent as they come."),
    stream_options=dict(
        type="object", additionalProperties=False,
        properties=dict(include_usage=dict(type="boolean"), include_obfuscation=_only(False)),
        description="include_usage: send the usage as the last event of a stream.",
    ),
    temperature=dict(type="number", minimum=0, maximum=2, default=1.0, description="0: the likeliest token (greedy)."),
    top_p=dict(type="number", exclusiveMinimum=0, maximum=1, default=1.0, description="Sample from the likeliest tokens "
               "whose probabilities add up to this."),
    top_k=dict(type="integer", minimum=0, maximum=2**31, default=0, description="Sample from this many tokens; 0: all."),
    repetition_penalty=dict(type="number", minimum=0.01, maximum=100, default=1.0, description="Divides the positive logits "
                            "of tokens that occurred before, and multiplies the negative ones."),
    seed=dict(type="integer", minimum=-(2**63), maximum=2**63 - 1, description="Makes sampling repeatable. Reply i to a "
              "request is sampled with seed + i."),
    stop=dict(anyOf=[STOP, dict(type="array", items=STOP, maxItems=16)],
              description="a text that ends the reply, and is not part of it, or a list of such texts"),
    logit_bias=dict(type="object", additionalProperties=dict(type="number", minimum=-100, maximum=100), maxProperties=1024,
                    description="{token id: what is added to its logit}."),
    response_format=dict(
        type="object", required=["type"], additionalProperties=False,
        properties=dict(
            type=dict(type="string", enum=["text", "json_object", "json_schema"]),
            json_schema=dict(
                type="object", required=["schema"], additionalProperties=False,
                properties=dict(name=dict(type="string"), description=dict(type="string"), strict=dict(type="boolean"),
                                schema=dict(type="object")),
            ),
        ),
        description="json_object: the reply is a JSON object; json_schema: JSON that a schema describes.",
    ),
    guided_regex=dict(type="string", minLength=1, maxLength=10_000, description="The reply matches this expression."),
    guided_grammar=dict(type="string", minLength=1, maxLength=100_000, description="The reply matches this grammar, in "
                        "llguidance's variant of Lark's notation."),
    ignore_eos=dict(type="boolean", default=False, description="Do not stop at the tokens that end a text."),
    return_token_ids=dict(type="boolean", default=False, description="Add token_ids to each reply."),
    user=dict(type="string", description="Has no effect."),
)  # fmt: skip
BY_ENDPOINT: dict[str, dict[str, dict[str, Any]]] = {
    COMPLETIONS: dict(
        prompt=dict(
            anyOf=[
                dict(type="string"),
                dict(type="array", items=dict(type="string"), minItems=1, maxItems=MOST_PROMPTS),
                dict(type="array", items=TOKEN, minItems=1),
                dict(type="array", items=dict(type="array", items=TOKEN, minItems=1), minItems=1, maxItems=MOST_PROMPTS),
            ],
            description="a text, a list of texts, a list of token ids, or a list of such lists",
        ),
        max_tokens=dict(type="integer", minimum=0, maximum=2**31, default=16, description="The most new tokens. 0 is "
                        "possible with echo."),
        echo=dict(type="boolean", default=False, description="Whether the reply begins with the prompt."),
        logprobs=dict(type="integer", minimum=0, maximum=20, description="Return log-probabilities: of each token, and of "
                      "this many of the likeliest ones."),
    ),
    CHAT: dict(
        messages=dict(type="array", items=MESSAGE, minItems=1, maxItems=10_000, description="The conversation."),
        max_tokens=dict(type="integer", minimum=1, maximum=2**31, description="The most new tokens; by default as many as "
                        "a request may have."),
        max_completion_tokens=dict(type="integer", minimum=1, maximum=2**31, description="Another name of max_tokens."),
        logprobs=dict(type="boolean", default=False, description="Return the log-probability of each token."),
        top_logprobs=dict(type="integer", minimum=0, maximum=20, description="With logprobs: also those of this many of "
                          "the likeliest tokens."),
    ),
}  # fmt: skip
# Parameters of OpenAI that are not implemented.
OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    COMPLETIONS: dict(
        best_of=dict(type="integer", minimum=1, maximum=MOST_CHOICES, description="Not implemented: must be n."),
        suffix=_only(""), presence_penalty=_only(0), frequency_penalty=_only(0),
    ),
    CHAT: dict(
        presence_penalty=_only(0), frequency_penalty=_only(0), tools=_only([]), tool_choice=_only("none", "auto"),
        functions=_only([]), store=_only(False), parallel_tool_calls=_only(True, False), modalities=_only(["text"]),
        service_tier=_only("auto", "default"),
    ),
}  # fmt: skip
# {kind of a grammar: the parameter that it comes from}
GRAMMAR_PARAMETERS = dict(
    json_schema="response_format", json_object="response_format", regex="guided_regex", lark="guided_grammar"
)
REQUIRED = {COMPLETIONS: "prompt", CHAT: "messages"}


def table(endpoint: str) -> dict[str, dict[str, Any]]:
    """{name: schema} of all parameters of an endpoint, those that are not implemented included."""
    return {**BY_ENDPOINT[endpoint], **SHARED, **OTHERS[endpoint]}


def checked(endpoint: str, body: Any) -> dict[str, Any]:
    """The value of every parameter, from a request's JSON; those left out, or null, have their default, or are None.

    ApiError 400, naming the parameter, for one that is unknown, not implemented, missing, or out of range.
    """
    if not isinstance(body, dict):
        raise bad_request("the body of the request must be a JSON object")
    parameters = table(endpoint)
    for name, value in body.items():
        if name not in parameters:
            raise bad_request(f"there is no parameter {name[:60]}{did_you_mean(name[:60], parameters)}", name[:60])
        if value is not None:
            check(value, parameters[name], name)
    if body.get(REQUIRED[endpoint]) is None:
        raise bad_request(f"{REQUIRED[endpoint]} is missing", REQUIRED[endpoint])
    given = {name: value for name, value in body.items() if value is not None}
    return {name: given.get(name, schema.get("default")) for name, schema in parameters.items()}


def body_schema(endpoint: str) -> dict[str, Any]:
    """The JSON schema of a request's body, for the OpenAPI schema."""
    return {
        "type": "object",
        "required": [REQUIRED[endpoint]],
        "additionalProperties": False,
        "properties": table(endpoint),
    }
