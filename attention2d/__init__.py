"""attention2d: exact attention over sequences that are sharded over ranks.

Docstrings call "Attention2D: Communication Efficient Distributed Self-Attention Mechanism" the paper, and cite its sections.
Its sub-packages are listed in docs/architecture.md, and each says which ones it may import.
Importing the package loads neither torch nor any submodule; each public name is imported when it is first used.
"""

from commfabric.foundation.lazy import lazy_exports

_HOME = {name: ".schedules.family" for name in ("Attention2D", "Ring", "AllGather", "Ulysses", "USP")} | {
    "Tree": ".schedules.tree",
    "candidates": ".schedules.choosing",
    "choose": ".schedules.choosing",
    "attention": ".schedules.sdpa",
    "CoreAttention": ".schedules.megatron",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME)
