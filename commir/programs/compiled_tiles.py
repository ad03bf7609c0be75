"""Tiles in plain operations under `torch.compile`, which fuses them for each shape of their blocks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from commir.ir.program import Program

Tensors = Mapping[str, torch.Tensor]
_COMPILED: dict[object, Callable[..., Any]] = {}


def compiled(plain: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    """The tile `plain`, compiled."""

    def tile(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, torch.Tensor]:
        """Compute a tile, and compile it before if these shapes are new."""
        blocks, places = list(inputs.values()), list(indices.values())
        key = program, tuple((name, x.shape, x.dtype, x.device) for name, x in (*inputs.items(), *indices.items()))
        if key not in _COMPILED:

            def traced(blocks: list[torch.Tensor], places: list[torch.Tensor]) -> dict[str, torch.Tensor]:
                """The tile, as a function of tensors alone."""
                return plain(program, dict(zip(inputs, blocks, strict=True)), dict(zip(indices, places, strict=True)))

            from torch.fx.experimental.proxy_tensor import make_fx  # takes a second, and most plans do not need it

            _COMPILED[key] = torch.compile(make_fx(traced)(blocks, places), dynamic=False)
        found: dict[str, torch.Tensor] = _COMPILED[key](blocks, places)
        return found

    return tile
