"""A small SVG writer for the diagrams of the documentation: boxes, text and arrows on a white card."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "figures"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
INK, MUTED, LINE = "#1b1f24", "#57606a", "#8c959f"
# {name: (fill, stroke)}
COLOURS = {
    "blue": ("#dbe8ff", "#2f5bd0"),
    "orange": ("#ffe8d0", "#b85f0b"),
    "green": ("#dbf3e3", "#1c7f45"),
    "violet": ("#ebe2fb", "#6a3fbf"),
    "red": ("#ffe0de", "#bb2f2a"),
    "grey": ("#f1f3f5", "#8c959f"),
    "white": ("#ffffff", "#8c959f"),
}


class Drawing:
    """Shapes on a white card of width x height pixels; `save` writes them to docs/assets/figures/NAME.svg."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", colour: str = "white", size: float = 15,
        bold: bool = False, dashed: bool = False, radius: float = 6,
    ) -> None:  # fmt: skip
        """Draw a rectangle with lines of text in its middle. (x, y): its upper left corner. bold: the first line."""
        fill, stroke = COLOURS[colour]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.5"{dash}/>'
        )
        if text:
            lines = text.split("\n")
            first = y + height / 2 - (len(lines) - 1) * size * 0.62 + size * 0.35
            for number, line in enumerate(lines):
                self.text(x + width / 2, first + number * size * 1.24, line, size, bold and number == 0, "middle")

    def text(
        self, x: float, y: float, text: str, size: float = 15, bold: bool = False, anchor: str = "start",
        colour: str = INK, italic: bool = False,
    ) -> None:  # fmt: skip
        """Draw one line of text. y: its baseline. anchor: SVG's text-anchor, the part of the text that is at x."""
        style = ' font-weight="600"' * bold + ' font-style="italic"' * italic
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
        self.shapes.append(f"<text {place}{style}>{escape(text)}</text>")

    def note(self, x: float, y: float, text: str) -> None:
        """Draw one line of small, pale text."""
        self.text(x, y, text, 13, colour=MUTED)

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = LINE, width: float = 1.8, arrow: bool = False,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        """Draw a line through points. arrow: with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{dash}/>'
        )
        if arrow:
            self._head(points[-2], points[-1], colour)

    def _head(self, start: tuple[float, float], end: tuple[float, float], colour: str, size: float = 8) -> None:
        (x0, y0), (x1, y1) = start, end
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        back = (x1 - dx * size, y1 - dy * size)
        half = size * 0.5
        corners = [(x1, y1), (back[0] - dy * half, back[1] + dx * half), (back[0] + dy * half, back[1] - dx * half)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.shapes.append(f'<polygon points="{points}" fill="{colour}"/>')

    def save(self, name: str) -> Path:
        """Write the file and return its path."""
        path = FOLDER / f"{name}.svg"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="{FONT}" role="img">'
        )
        card = f'<rect width="{self.width}" height="{self.height}" rx="10" fill="#ffffff"/>'
        path.write_text("\n".join([head, f"<title>{escape(self.title)}</title>", card, *self.shapes, "</svg>", ""]))
        return path
