"""commir: from loop programs to verified schedules on many ranks, and a search for the best one.

Docstrings call "Mercury: Unlocking Multi-GPU Operator Optimization for LLMs via Remote Memory Scheduling" the paper, and
cite its sections. The sub-packages are listed in docs/architecture.md, and each says which ones it may import.
Importing the package loads neither torch nor its modules; each public name is imported when it is first used.
"""

from commfabric.foundation.lazy import lazy_exports
from commir import programs as programs

_HOME = {name: ".ir.program" for name in ("Axis", "Operand", "Program", "Result")} | {
    "Mesh": ".ir.mesh",
    "Schedule": ".lowering.lower",
    "Plan": ".lowering.plan",
    "place": ".scheduling.placements",
    "Placement": ".scheduling.placements",
    "known": ".scheduling.known_schedules",
    "known_schedules": ".scheduling.known_schedules",
    "interpret": ".execution.interpreter",
    "execute": ".execution.executor",
    "verify": ".execution.verifier",
    "operator": ".programs.operators",
    "In": ".programs.operators",
    "Out": ".programs.operators",
    "grid": ".programs.operators",
    "parallel": ".programs.operators",
    "shift": ".programs.operators",
    "kernel": ".programs.kernels",
    "differentiable": ".execution.gradient",
    "search": ".searching.search",
    "pareto": ".searching.search",
    "best_grid": ".searching.grids",
    "measure_overlap": ".searching.tile_times",
    "measure_tile": ".searching.tile_times",
    "fastest": ".searching.measured",
    "search_graph": ".searching.graph",
    "measure_operators": ".searching.tile_times",
    "GraphNode": ".searching.operator_options",
    "GraphRunner": ".searching.graph_run",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME, "programs")
