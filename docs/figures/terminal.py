"""A terminal window with the demo and a chat with its model, as they stand on the tutorial's page."""

import re
import textwrap
from html import escape
from pathlib import Path

from svg import FOLDER

TUTORIAL = FOLDER.parents[1] / "tutorials" / "first-model.md"
COLUMNS, SIZE, LINE = 80, 14, 20  # characters of a line; pixels of the font and from line to line
WIDTH, TOP = 24 + round(COLUMNS * SIZE * 0.602) + 24, 62
COMMAND, OUTPUT, CARD = "#8fd6a8", "#d5d9e2", "#1b1f27"


def terminal() -> Path:
    """Draw the blocks of the tutorial that begin with a command: the end of the demo, and a chat with its model."""
    blocks = re.findall(r"^```text\n(\$ .*?)^```", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    lines = []
    for row in "\n".join(blocks).splitlines():
        colour = COMMAND if row.startswith(("$ ", "> ")) else OUTPUT
        lines += [(line, colour) for line in textwrap.wrap(row, COLUMNS, subsequent_indent="    ") or [""]]
    height = TOP + LINE * len(lines) + 2
    shapes = [
        f'<circle cx="{24 + 20 * n}" cy="22" r="6" fill="{c}"/>'
        for n, c in enumerate(("#e5695e", "#e0b04a", "#67b26a"))
    ]
    shapes += [
        f'<text x="24" y="{TOP + LINE * number}" fill="{colour}" xml:space="preserve">{escape(line)}</text>'
        for number, (line, colour) in enumerate(lines)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="{SIZE}" role="img">'
    )
    card = f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{CARD}"/>'
    path = FOLDER.parent / "pictures" / "demo.svg"
    title = "<title>The end of the demo in a terminal, and a chat with its model</title>"
    path.write_text("\n".join([head, title, card, *shapes, "</svg>", ""]))
    return path
