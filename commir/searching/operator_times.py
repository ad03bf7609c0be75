"""`measure_operators`: the times of the tiles of a graph's operators, for `search_graph`, in a small JSON file."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commfabric.collectives.agreement import on_first
from commfabric.collectives.counted import all_reduce
from commir.ir.mesh import Mesh
from commir.ir.program import Program

from .operator_options import GraphNode, options_of, tile_name
from .tile_times import tile_seconds


def measure_operators(
    operators: Sequence[GraphNode], mesh: Mesh, path: str | Path, group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:  # fmt: skip
    """Measure the tiles that the operators of a graph have in all placements on a mesh: {tile: seconds}.

    Times that the file has are not measured again; new ones are added to it by the first rank. All ranks of the group call
    it, measure at the same time, and return the times of the slowest rank.

    Args:
        operators, mesh: as in `search_graph`.
        path: a JSON file of this machine and device, which need not exist.
        group: the ranks of the mesh (None: this process alone).
        device: of the tiles.

    Raises:
        ValueError: on every rank, if the file is no JSON object of times, or an operator has no option.
    """
    path = Path(path)
    known = on_first(lambda: _read(path), group)
    tiles: dict[str, Program] = {}

    def collect(tile: Program) -> float:
        """Remember a tile that an option has."""
        tiles[tile_name(tile)] = tile
        return 0.0

    for operator in operators:
        options_of(operator, mesh, None, None, collect)
    missing = [name for name in tiles if name not in known]
    measured = torch.tensor([tile_seconds(tiles[name], device) for name in missing], dtype=torch.float64, device=device)
    if missing:
        slowest = all_reduce(measured, group, op=dist.ReduceOp.MAX).tolist()
        known |= dict(zip(missing, slowest, strict=True))
        on_first(lambda: path.write_text(json.dumps(known, indent=1)), group)
    return known


def _read(path: Path) -> dict[str, float]:
    try:
        saved = json.loads(path.read_text()) if path.exists() else {}
        return {str(name): float(seconds) for name, seconds in saved.items()}
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{path} is no JSON object of times of tiles") from None
