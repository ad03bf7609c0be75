"""The figure of selective sparsification: one backward pass whose gradients are sent in three ways, over time."""

from pathlib import Path

from svg import MUTED, Drawing

LEFT, UNIT = 110, 28  # the x coordinate of time 0; pixels per unit of time
LONGEST = 22.4
# Gradients in the order in which backward computes them: (name, time to compute it, time to select from it).
GRADIENTS = (
    ("g4", 2.0, 0.9), ("b", 0.6, 0.6), ("g3", 2.0, 0.9), ("b", 0.6, 0.6), ("g2", 2.0, 0.9), ("b", 0.6, 0.6),
    ("g1", 2.0, 0.9),
)  # fmt: skip
DENSE, SPARSE, SMALL = (
    4.6,
    0.9,
    0.6,
)  # the time of a message with a whole matrix, with selected elements, and with a small gradient


def lane(drawing: Drawing, y: float, name: str) -> None:
    """Draw the name and the line of a lane, in which work is shown over time."""
    drawing.text(LEFT - 12, y + 19, name, 13.5, False, "end", MUTED)
    drawing.line([(LEFT, y + 31), (LEFT + LONGEST * UNIT, y + 31)], "#e3e6ea", 1)


def work(drawing: Drawing, y: float, start: float, length: float, text: str, colour: str) -> float:
    """Draw a piece of work that begins at time `start` in the lane at `y`. Returns the time at which it ends."""
    drawing.box(LEFT + start * UNIT, y, length * UNIT - 2, 28, text, colour, 12, radius=4)
    return start + length


def dense(drawing: Drawing, y: float) -> None:
    """Draw a step that sends every gradient whole."""
    lane(drawing, y, "compute")
    lane(drawing, y + 38, "network")
    at = link = 0.0
    for name, length, _ in GRADIENTS:
        at = work(drawing, y, at, length, name, "blue")
        link = work(drawing, y + 38, max(link, at), SMALL if name == "b" else DENSE, name, "orange")


def one_by_one(drawing: Drawing, y: float) -> None:
    """Draw a step that sends selected elements of every gradient, each gradient in its own message."""
    lane(drawing, y, "compute")
    lane(drawing, y + 38, "network")
    at = link = 0.0
    for name, length, select in GRADIENTS:
        at = work(drawing, y, at, length, name, "blue")
        at = work(drawing, y, at, select, "", "green")
        link = work(drawing, y + 38, max(link, at), SPARSE, name, "orange")


def selective(drawing: Drawing, y: float) -> None:
    """Draw a step with two fused buffers, which sends small gradients whole."""
    lane(drawing, y, "compute")
    lane(drawing, y + 38, "network")
    at = link = 0.0
    for buffer, whole in ((GRADIENTS[:6], 1.0), (GRADIENTS[6:], 0.0)):
        for name, length, _ in buffer:
            at = work(drawing, y, at, length, name, "blue")
        large = [each for each in buffer if each[0] != "b"]
        for _, _, select in large:
            at = work(drawing, y, at, select, "", "green")
        link = max(link, at)
        if whole:
            link = work(drawing, y + 38, link, whole, "3 b", "orange")
        names = f"{large[0][0]}-{large[-1][0]}" if len(large) > 1 else large[0][0]
        link = work(drawing, y + 38, link, 0.5 + 0.5 * len(large), names, "orange")


def selective_sparsification() -> Path:
    """Draw the three steps below each other."""
    drawing = Drawing(760, 510, "One backward pass: dense, sparse one by one, and selective in fused buffers")
    plans = (
        ("Dense: every number is sent", dense),
        ("Sparse, one by one: every gradient costs a selection and a message", one_by_one),
        ("Selective: two fused buffers; small gradients are sent dense", selective),
    )
    for number, (title, draw) in enumerate(plans):
        top = 20 + 128 * number
        drawing.text(20, top + 14, title, 15, True)
        draw(drawing, top + 28)
    drawing.line([(LEFT, 404), (LEFT + LONGEST * UNIT, 404)], arrow=True)
    drawing.text(LEFT + LONGEST * UNIT, 422, "time", 13, False, "end", MUTED)
    for x, colour, name in ((LEFT, "blue", "backward"), (240, "green", "select"), (360, "orange", "message")):
        drawing.box(x, 412, 18, 14, colour=colour, radius=3)
        drawing.note(x + 26, 424, name)
    drawing.note(
        20,
        462,
        "g: gradients of matrices, in the order in which backward has them ready; b: small gradients (biases, norms).",
    )
    drawing.note(
        20, 484, "The lengths are schematic. The slower the network, the longer the orange boxes of the dense step."
    )
    return drawing.save("selective-sparsification")
