"""Figures of a state-space block: how it is split over ranks, how many all-reduces it needs, how context ranks share it."""

from pathlib import Path

from svg import MUTED, Drawing

RANKS = (("rank 0: channels 0 to I/2", "blue"), ("rank 1: channels I/2 to I", "orange"))


def splitting_an_ssm() -> Path:
    """Draw a Mamba-1 block on two ranks: what each rank holds, and the two all-reduces."""
    drawing = Drawing(760, 700, "A Mamba-1 block split by channel over two tensor-parallel ranks")
    left, width, gap = 150, 280, 20
    columns = [left, left + width + gap]
    for x, (name, _) in zip(columns, RANKS, strict=True):
        drawing.text(x + width / 2, 32, name, 15, True, "middle")
    rows = [
        (50, "hidden states x, H numbers per token: the same on every rank", None),
        (106, "in_proj (column-parallel): x, z", ""),
        (162, "convolution, SiLU", "K-1 inputs cached"),
        (218, "x_proj (row-parallel): partial sums", ""),
        (274, "ALL-REDUCE 1: dt, B, C (R + 2N numbers per token)", None),
        (330, "dt_proj, softplus: step sizes dt", ""),
        (386, "selective scan", "state cached"),
        (442, "gate: y * silu(z)", ""),
        (498, "out_proj (row-parallel): partial y", ""),
        (554, "ALL-REDUCE 2: y (H numbers per token)", None),
        (610, "hidden states x + y: the same on every rank", None),
    ]
    for top, name, note in rows:
        if note is None:
            colour = "red" if name.startswith("ALL") else "grey"
            drawing.box(left, top, 2 * width + gap, 38, name, colour, 15, colour == "red")
        else:
            for x, (_, colour) in zip(columns, RANKS, strict=True):
                drawing.box(x, top, width, 38, f"{name} ({note})" if note else name, colour, 14)
        if top > 50:
            for x in columns:
                drawing.line([(x + width / 2, top - 18), (x + width / 2, top - 1)], arrow=True)
    for top, bottom, lines in (
        (106, 256, ("local:", "nothing", "is sent")),
        (330, 536, ("local:", "nothing", "is sent")),
    ):
        drawing.line([(138, top), (130, top), (130, bottom), (138, bottom)], MUTED)
        for number, line in enumerate(lines):
            drawing.text(120, (top + bottom) / 2 - 14 + 19 * number, line, 14, False, "end", MUTED)
    drawing.note(
        left, 678, "H: hidden size; I: inner channels; N: state size; R: rank of dt; K: taps of the convolution"
    )
    return drawing.save("splitting-an-ssm")


def all_reduce_count() -> Path:
    """Draw three blocks beside each other, with two all-reduces, one, and two."""
    drawing = Drawing(860, 605, "All-reduces of a block by family")
    columns = [
        ("Mamba-1, Falcon-Mamba", "2 per block", [
            ("in_proj", ""), ("convolution", ""), ("x_proj", ""), ("ALL-REDUCE", "R + 2N numbers"), ("scan", ""),
            ("gate", ""), ("out_proj", ""), ("ALL-REDUCE", "H numbers"),
        ]),
        ("Mamba-2, 1 group", "1 per block", [
            ("in_proj: also B, C, dt", ""), ("convolution", ""), ("scan (SSD)", ""), ("gate, norm without scale", ""),
            ("out_proj", ""), ("ALL-REDUCE", "H + 1 numbers: y, sum of squares"), ("scale by the norm", ""),
        ]),
        ("Mamba-2, 1 < groups < T", "2 per block", [
            ("in_proj: also B, C, dt", ""), ("convolution", ""), ("scan (SSD)", ""), ("gate", ""),
            ("ALL-REDUCE", "sums of squares, G numbers"), ("norm", ""), ("out_proj", ""), ("ALL-REDUCE", "H numbers"),
        ]),
    ]  # fmt: skip
    width, gap, left = 256, 24, 22
    for number, (name, count, steps) in enumerate(columns):
        x = left + number * (width + gap)
        drawing.text(x + width / 2, 34, name, 14, True, "middle")
        drawing.text(x + width / 2, 56, count, 14, False, "middle", MUTED)
        top = 72
        for place, (step, numbers) in enumerate(steps):
            high = 52 if numbers else 38
            text, colour = (f"{step}\n{numbers}", "red") if numbers else (step, "green")
            drawing.box(x, top, width, high, text, colour, 13.5, bool(numbers))
            top += high
            if place + 1 < len(steps):
                drawing.line([(x + width / 2, top), (x + width / 2, top + 13)], arrow=True)
                top += 14
    notes = (
        "T: tensor-parallel ranks; G: groups of heads that share B and C. Numbers are per token; green steps send nothing.",
        "Mamba-2 with G % T = 0: the norm is local, and out_proj's all-reduce, of H numbers, is the only one.",
        "Zamba: as Mamba-1, without the first all-reduce while T is at most the number of Mamba heads. Zamba2: as Mamba-2.",
        "Each use of Zamba's or Zamba2's shared attention block adds two all-reduces of H numbers.",
    )
    for number, line in enumerate(notes):
        drawing.note(left, 528 + 21 * number, line)
    return drawing.save("all-reduce-count")


def passing_states() -> Path:
    """Draw a sequence of eight blocks on four ranks in zigzag order: who holds what, and what travels."""
    drawing = Drawing(860, 330, "A sequence of eight blocks on four context ranks in zigzag order")
    colours, width, left, top = ("blue", "orange", "green", "violet"), 92, 40, 62
    drawing.text(left, 32, "One sequence, in eight blocks, on four context ranks", bold=True)
    for block in range(8):
        rank = min(block, 7 - block)
        x = left + block * (width + 6)
        drawing.box(x, top, width, 56, f"block {block}\nrank {rank}", colours[rank], 14)
        if block < 7:
            drawing.line([(x + width - 14, top + 70), (x + width + 20, top + 70)], arrow=True)
    drawing.note(left, top + 94, "The last K-1 inputs of the convolution go to the next block, from rank to rank.")
    drawing.text(
        left, 202, "States: every rank computes the recurrence over all blocks for a quarter of the channels", bold=True
    )
    steps = (
        "each block's final\nstate from zeros,\nand its sum of dt",
        "exchange: a quarter\nof the channels\nof all blocks",
        "8 steps of\nH ← E·H + S",
        "exchange back: the\nstate that enters\neach own block",
        "the scan of\neach block",
    )
    for index, step in enumerate(steps):
        x = left + index * 160
        drawing.box(x, 222, 140, 74, step, "grey" if "exchange" in step else "white", 13, dashed="exchange" in step)
        if index < len(steps) - 1:
            drawing.line([(x + 141, 259), (x + 158, 259)], arrow=True)
    return drawing.save("passing-states")


def unit() -> Path:
    """A residual unit: what its operators share."""
    drawing = Drawing(760, 330, "A unit: one copy of the input and one sum for all its operators")
    drawing.box(20, 130, 90, 50, "x", "grey", bold=True)
    drawing.box(150, 130, 90, 50, "norm", "white")
    drawing.box(150, 30, 120, 56, "shared block\n(side)", "violet", 14)
    drawing.box(280, 130, 90, 50, "copy to\nthe ranks", "orange", 14)
    for number, (name, y) in enumerate((("operator 1", 60), ("operator 2", 190))):
        drawing.box(410, y, 130, 60, f"{name}\nproject, mix", "blue", 14, bold=True)
        drawing.line([(370, 155), (390, 155), (390, y + 30), (410, y + 30)], arrow=True)
        drawing.line([(540, y + 30), (565, y + 30), (565, 155), (585, 155)], arrow=number == 0)
        drawing.text(475, y + 78, "state", 13, anchor="middle", italic=True)
    drawing.box(585, 130, 90, 50, "one sum\nover ranks", "orange", 14)
    drawing.line([(110, 155), (150, 155)], arrow=True)
    drawing.line([(240, 155), (280, 155)], arrow=True)
    drawing.line([(65, 130), (65, 58), (150, 58)], arrow=True, dashed=True)
    drawing.line([(195, 86), (195, 130)], arrow=True, dashed=True)
    drawing.line([(65, 180), (65, 290), (710, 290), (710, 165)], arrow=True)
    drawing.line([(675, 155), (697, 155)], arrow=True)
    drawing.box(697, 142, 26, 26, "+", "grey", bold=True, radius=13)
    drawing.note(230, 312, "the residual stream: the same on every rank")
    return drawing.save("unit")
