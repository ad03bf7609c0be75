"""Tool calls in the text of replies: the formats in which models write calls, and the JSON schema of forced calls.

A parser reads a reply while it comes. However the text is split, it returns the same content and the same calls.
"""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ssm.engine.schemas import map_schema

Schemas = dict[str, dict[str, Any]]  # {name of a tool: the JSON schema of its arguments}
COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass
class ToolCall:
    """A tool call, or a further piece of its arguments. index: its place among the calls; name: "" in later pieces."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


Part = str | ToolCall


class CallParser:
    """Splits a reply into content and tool calls between two marks; a call is returned when it is complete.

    Text that begins like a call and is malformed is content. White space around calls is left out.

    begin, end: the marks of the format; with end "", calls last until the end of the reply. tools: the schemas of the
    request's tools. max_calls: the maximum number of calls; further ones are left out. None: no limit.
    """

    begin: str
    end: str

    def __init__(self, tools: Schemas, max_calls: int | None = None):
        self._tools, self._max_calls = tools, max_calls
        self._held = self._space = (
            ""  # _held: text that may be part of a mark or of a call. _space: the white space before it
        )
        self._is_inside, self._count = False, 0

    @classmethod
    def rules(cls, tools: Schemas, max_calls: int | None, mark: Callable[[str], str] = json.dumps) -> str:
        """Return the rule `calls` of a grammar in llguidance's notation: one or more calls in this format.

        mark: the notation of a mark; by default that of its text.
        """
        raise NotImplementedError

    def read(self, body: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the name and the arguments of each call between the marks. ValueError for a malformed call."""
        raise NotImplementedError

    def push(self, text: str) -> list[Part]:
        """Add text of the reply; returns the content and the calls that no later text can change."""
        parts: list[Part] = []
        searched = max(0, len(self._held) - len(self.end if self._is_inside else self.begin))
        self._held += text
        while True:
            mark = self.end if self._is_inside else self.begin
            place = self._held.find(mark, searched) if mark else -1
            if place < 0:
                break
            before, self._held = self._held[:place], self._held[place + len(mark) :]
            parts += self._calls(before, mark) if self._is_inside else self._content(before)
            self._is_inside, searched = not self._is_inside, 0
        if not self._is_inside:
            certain = len(self._held) - begun_length(self._held, self.begin)
            parts += self._content(self._held[:certain])
            self._held = self._held[certain:]
        return parts

    def finish(self) -> list[Part]:
        """Return the rest, after the last text of the reply."""
        parts = self._calls(self._held, "") if self._is_inside else self._content(self._held)
        space = "" if self._count else self._space
        self._held = self._space = ""
        return [*parts, space] if space else parts

    def _content(self, text: str) -> list[Part]:
        """Content that ends with this text. Its last white space is held back, because it is left out if a call follows."""
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        return [content] if content else []

    def _calls(self, body: str, end: str) -> list[Part]:
        """The calls in the text between the marks; if it is malformed, the text and its marks are content. end: the mark
        after the text, if any.
        """
        try:
            calls = self.read(body)
        except (ValueError, RecursionError):
            return self._content(self.begin + body + end)
        self._space = ""
        left = None if self._max_calls is None else max(0, self._max_calls - self._count)
        parts: list[Part] = []
        for name, arguments in calls[:left]:
            parts.append(ToolCall(self._count, json.dumps(arguments, ensure_ascii=False), _new_id(), name))
            self._count += 1
        return parts


class HermesParser(CallParser):
    """Calls of Hermes, Qwen and Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    begin, end = "<tool_call>", "</tool_call>"

    @classmethod
    def rules(cls, tools: Schemas, max_calls: int | None, mark: Callable[[str], str] = json.dumps) -> str:
        """Return a rule for a call, which repeats."""
        call = f'{mark(cls.begin)} "\\n" %json {json.dumps(call_schema(tools))} "\\n" {mark(cls.end)}'
        return _repeated(call, max_calls)

    def read(self, body: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the call in an object."""
        return [_json_call(json.loads(body))]


class XmlParser(CallParser):
    """Calls of Qwen3-Coder and Nemotron 3. Each argument is text between marks:

    `<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>`.
    """

    begin, end = "<tool_call>", "</tool_call>"
    function = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
    parameter = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    @classmethod
    def rules(cls, tools: Schemas, max_calls: int | None, mark: Callable[[str], str] = json.dumps) -> str:
        """Return a rule for a call, whose parameters are in the order of the schema and may have any text."""
        functions = [json.dumps(f"{name}>\n") + _xml_parameters(schema) for name, schema in tools.items()]
        call = f'{mark(cls.begin)} "\\n<function=" ({" | ".join(functions)}) "</function>\\n" {mark(cls.end)}'
        return _repeated(call, max_calls) + '\nvalue[suffix="</parameter>"]: /(?s:.*)/'

    def read(self, body: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the call, with arguments of the types that the tool's schema gives them."""
        found = self.function.fullmatch(body)
        if found is None or self.parameter.sub("", found[2]).strip():
            raise ValueError("not a call")
        properties = self._tools.get(found[1], {}).get("properties")
        schemas = properties if isinstance(properties, dict) else {}
        parameters = self.parameter.findall(found[2])
        return [(found[1], {name: _typed(value, schemas.get(name)) for name, value in parameters})]


class NemotronParser(CallParser):
    """Calls of Nemotron Nano 2: `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`."""

    begin, end = "<TOOLCALL>", "</TOOLCALL>"

    @classmethod
    def rules(cls, tools: Schemas, max_calls: int | None, mark: Callable[[str], str] = json.dumps) -> str:
        """Return a rule for a list of calls."""
        end = mark(cls.end) if cls.end else ""
        return f"calls: {mark(cls.begin)} %json {json.dumps(calls_schema(tools, max_calls))} {end}"

    def read(self, body: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls in a list."""
        calls = json.loads(body)
        if not isinstance(calls, list) or not calls:
            raise ValueError("not a list of calls")
        return list(map(_json_call, calls))


class GraniteParser(NemotronParser):
    """Calls of Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]` at the end of the reply."""

    begin, end = "<|tool_call|>", ""


# {name: (parser, text in a chat template that tells the format)}; the first one that a template contains decides.
PARSERS: dict[str, tuple[type[CallParser], str]] = {
    "qwen3_coder": (XmlParser, "<function="),
    "granite": (GraniteParser, "<|tool_call|>"),
    "nemotron": (NemotronParser, "<TOOLCALL>"),
    "hermes": (HermesParser, "<tool_call>"),
}


def detect_parser(template: str) -> type[CallParser] | None:
    """Return the parser of the calls that a chat template writes; None if no known format occurs in it."""
    return next((parser for parser, text in PARSERS.values() if text in template), None)


class ForcedCallParser:
    """Reads a reply that follows `calls_schema`; the arguments of a call are returned piece by piece, as they come."""

    _header = re.compile(r'[\[\s,}]*\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')

    def __init__(self) -> None:
        self._held, self._count = "", 0
        self._depth, self._is_string, self._is_escaped = 0, False, False  # within the arguments

    def push(self, text: str) -> list[Part]:
        """Add text of the reply; returns the calls, and the pieces of their arguments."""
        parts: list[Part] = []
        self._held += text
        while self._held:
            if self._depth == 0:
                header = self._header.match(self._held)
                if header is None:
                    break
                parts.append(ToolCall(self._count, "", _new_id(), header[1]))
                self._count, self._held = self._count + 1, self._held[header.end() :]
            length = self._length_of_arguments()
            parts.append(ToolCall(self._count - 1, self._held[:length]))
            self._held = self._held[length:]
        return parts

    def finish(self) -> list[Part]:
        """Return the text of a reply that has ended before its first call."""
        return [self._held] if self._held and not self._count else []

    def _length_of_arguments(self) -> int:
        """The number of characters of the text that belong to the arguments, up to the bracket that closes them."""
        for place, character in enumerate(self._held):
            if self._is_string:
                self._is_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return len(self._held)


def call_schema(tools: Schemas) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these tools, on one line.

    References in the schema of a tool are changed to stay within that schema. Objects that list their properties have no
    others, unless the schema says so or combines schemas. Keywords that llguidance does not know are ignored.
    """
    places = {name: f"#/$defs/tool{i}" for i, name in enumerate(tools)}
    definitions = {place[8:]: _embedded(tools[name], place) for name, place in places.items()}
    calls = [
        {
            "type": "object", "properties": {"name": {"const": name}, "arguments": {"$ref": place}},
            "required": ["name", "arguments"], "additionalProperties": False,
        }
        for name, place in places.items()
    ]  # fmt: skip
    return {"$defs": definitions, "anyOf": calls, "x-guidance": {"whitespace_pattern": " ", "lenient": True}}


def calls_schema(tools: Schemas, max_calls: int | None) -> dict[str, Any]:
    """Return the JSON schema of a list of one or more calls of these tools; see `call_schema`."""
    call = call_schema(tools)
    most = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "items": {"anyOf": call.pop("anyOf")}, "minItems": 1, **most, **call}


def _repeated(call: str, max_calls: int | None) -> str:
    """The rule `calls`: one call, or one or more on lines of their own."""
    return "calls: call" + (' ("\\n" call)*' if max_calls is None else "") + f"\ncall: {call}"


def begun_length(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that begins a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


def _xml_parameters(schema: dict[str, Any]) -> str:
    """The parameters of a call, as part of a rule: those that the schema lists, in its order; or any, if it lists none."""
    properties, required = schema.get("properties"), schema.get("required") or []
    if not isinstance(properties, dict) or COMBINING & schema.keys():
        return r' ("<parameter=" /[^>\s]+/ ">\n" value "\n")*'
    marks = {name: json.dumps(f"<parameter={name}>\n") for name in properties}
    return "".join(rf' ({mark} value "\n")' + "?" * (name not in required) for name, mark in marks.items())


def _embedded(schema: dict[str, Any], place: str) -> Any:
    """The schema of a tool for embedding at a place in another schema, as `call_schema` says."""
    parts: list[dict[str, Any]] = []
    map_schema(schema, parts.append)  # collects each schema in it; the copy is not used
    combines = any("allOf" in part or ("properties" in part and COMBINING & part.keys()) for part in parts)

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            part["$ref"] = place + reference[1:]
        return part if combines or "properties" not in part else {"additionalProperties": False, **part}

    return map_schema(schema, changed)


def _json_call(call: Any) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a call that is a JSON object; arguments may also be the text of one."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("not a call")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    return call["name"], arguments


def _typed(text: str, schema: Any) -> Any:
    """The value that a text stands for in a property of this schema: a string, or JSON."""
    types = _types(schema)
    if "string" in types and not ("null" in types and text == "null"):
        return text
    try:
        return json.loads(text.lower() if "boolean" in types and text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text


def _types(schema: Any) -> set[str]:
    """The types that a schema allows, as far as it names them."""
    if not isinstance(schema, dict):
        return set()
    values = [*_elements(schema.get("enum")), schema.get("const")]
    types = {"string"} if any(isinstance(value, str) for value in values) else set()
    types |= {str(name) for name in _elements(schema.get("type"))}
    return types.union(*map(_types, [*_elements(schema.get("anyOf")), *_elements(schema.get("oneOf"))]))


def _elements(value: Any) -> list[Any]:
    """The elements of a list; a value that is no list is one element."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
