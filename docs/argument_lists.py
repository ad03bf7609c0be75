"""A griffe extension: the arguments, fields and errors of a docstring become Markdown lists.

Google's sections (Args, Attributes, Returns, Raises) may have one entry for several names, as "rows, cols: ...". Other
docstrings explain arguments in sentences that begin with the argument's name and a colon.
"""

import re

from griffe import Class, Extension, Function, Object

ENTRY = r"(?:(?<=\n)|(?<=\A)|(?<=[.)] )|(?<=\n    ))(?P<names>\*{0,2}NAME(?:, \*{0,2}NAME)*)(?P<call>\([\w, ]*\))?: "


SECTION = re.compile(r"(Args|Attributes|Returns|Raises):\n((?:    .*(?:\n|\Z))+)")
TITLES = {"Args": "Arguments"}


def known_names(obj: Object) -> set[str]:
    """The arguments of a function; of a class those of its __init__, and its fields."""
    if isinstance(obj, Function):
        return {parameter.name.lstrip("*") for parameter in obj.parameters} - {"self", "cls"}
    if not isinstance(obj, Class):
        return set()
    names = {name for name, member in obj.members.items() if member.is_attribute}
    own = obj.members.get("__init__")
    return names | (known_names(own) if isinstance(own, Function) else set())


def with_lists(text: str, names: set[str]) -> str:
    """The docstring with each explained name as an item; an item ends at an empty line, or at a new sentence's line."""
    either = "(?:" + "|".join(sorted(map(re.escape, names), key=len, reverse=True)) + ")"
    entry = re.compile(ENTRY.replace("NAME", either))
    parts = text.split("\n\n")
    if any(map(SECTION.fullmatch, parts)):
        return "\n\n".join(map(_section, parts))
    return "\n\n".join(_paragraph(part, entry) for part in parts) if names else text


def _section(text: str) -> str:
    """A section of Google's style with a title and an item for each entry; other text as it is."""
    match = SECTION.fullmatch(text)
    if match is None:
        return text
    entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=    \S)", match[2].rstrip())]
    if match[1] != "Returns":
        named = (entry.partition(": ") for entry in entries)
        entries = [", ".join(f"`{name}`" for name in names.split(", ")) + f": {rest}" for names, _, rest in named]
    return f"**{TITLES.get(match[1], match[1])}**\n\n" + "\n".join(f"- {entry}" for entry in entries)


def _paragraph(text, entry) -> str:
    found = list(entry.finditer(text))
    if not found or text.lstrip().startswith(("|", "- ", "```")):
        return text
    pieces = [text[: found[0].start()].strip()]
    ends = [match.start() for match in found[1:]] + [len(text)]
    rest = ""
    for match, end in zip(found, ends, strict=True):
        body = text[match.end() : end].strip()
        if end == len(text):  # what follows the last item, on a line of its own
            split = re.search(r"(?<=[.:])\n(?=[A-Z])", body)
            body, rest = (body[: split.start()], body[split.end() :]) if split else (body, "")
        title = ", ".join(f"`{name}`" for name in match["names"].split(", "))
        pieces.append(f"- {title}{match['call'] or ''}: " + " ".join(body.split()))
    items = "\n".join(pieces[1:])
    return "\n\n".join(part for part in (pieces[0], items, rest) if part)


class ArgumentLists(Extension):
    """Rewrites docstrings once a package is loaded."""

    def on_object(self, *, obj: Object, **_) -> None:
        """Of every class and function."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value, known_names(obj))
