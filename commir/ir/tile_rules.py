"""What the library's tiles need of a program: the names of its operands, and its options with their values."""

from collections.abc import Collection, Mapping
from typing import Any

# {tile, a function in `commir.programs.tiles`: (inputs, outputs, options)}
TILES = {
    "attention": ("q k v", "out lse", "causal scale"),
    "attention_backward": ("dout out q k v lse delta", "dq dk dv", "causal scale"),
    "selective_scan": ("x dt B C A", "y", ""),
    "gated_delta": ("v g beta q k", "y", ""),
}
SCALES = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the smallest and the largest normal number of float32


def check_tile(
    name: str, tile: str, inputs: Collection[str], outputs: Collection[str], options: Mapping[str, Any]
) -> None:
    """ValueError: the operands or options of a program, `name`, are not those of its tile, or an option has another value.

    Scores are scaled in float32 after hidden ones were set to -inf, so a scale of 0 there, or below, would give NaN. It is
    refused without a mask, too: a program may get one (`Program.with_options`), and `verify` tries it with one.
    """
    for what, found, needed in zip(
        ("inputs", "outputs", "options"), (inputs, outputs, options), TILES[tile], strict=True
    ):
        if sorted(found) != sorted(needed.split()):
            given = ", ".join(found) or "none"
            raise ValueError(
                f"{name}: the tile {tile} has the {what} {', '.join(needed.split()) or 'none'}, not {given}"
            )
    if "causal" in options and type(options["causal"]) is not bool:
        raise ValueError(f"{name}: option causal is {options['causal']!r}; it must be True or False")
    if "scale" in options:
        scale, (least, most) = options["scale"], SCALES
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not least <= scale <= most:
            raise ValueError(f"{name}: option scale is {scale!r}; it must be a positive and finite number of float32")
