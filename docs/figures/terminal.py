"""A terminal window with the demo's commands and what they print, as it stands on the tutorials' pages."""

import re
import textwrap
from html import escape
from pathlib import Path

from svg import FOLDER

TUTORIALS = FOLDER.parents[1] / "tutorials"
COLUMNS, SIZE, LINE = 58, 14, 20  # characters of a line; pixels of the font and from line to line
WIDTH, TOP = 24 + round(COLUMNS * SIZE * 0.602) + 24, 62
COMMAND, OUTPUT, CARD = "#8fd6a8", "#d5d9e2", "#1b1f27"


def terminal() -> Path:
    """Draw the end of the training log, a sample, and the start of the server."""
    first, serve = (TUTORIALS.joinpath(name).read_text() for name in ("first-model.md", "serve.md"))
    (log,) = re.findall(r'^\{.*"held_out.*\}$', first, re.MULTILINE)
    (sample,) = re.findall(r"^--- --seed 2\n(.*?)\n--- ", first, re.MULTILINE | re.DOTALL)
    (served,) = re.findall(r"^megatron-ssm: serving .*$", serve, re.MULTILINE)
    session = {
        "make demo; tail -n 1 demo/train.jsonl": log,
        'megatron-ssm generate --model demo/model --tp 2 \\\n    --prompt "If the argument is" --max-new-tokens 40 \\\n'
        "    --temperature 0.5 --seed 2": sample,
        "megatron-ssm serve --model demo/model --tp 2": served,
    }
    lines = []
    for command, printed in session.items():
        lines += [("", OUTPUT)] * bool(lines) + [(line, COMMAND) for line in f"$ {command}".splitlines()]
        lines += [(line, OUTPUT) for row in printed.splitlines() for line in textwrap.wrap(row, COLUMNS) or [""]]
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
    title = "<title>The demo in a terminal: the loss, a sample, and the server</title>"
    path.write_text("\n".join([head, title, card, *shapes, "</svg>", ""]))
    return path
