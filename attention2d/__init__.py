"""attention2d: exact attention over sequences that are spread over ranks.

Names are imported on first use.
"""

from sparsefusion.lazy import exporting

_HOME = {name: "schedules" for name in ("Attention2D", "Ring", "AllGather", "Ulysses", "USP")} | {
    "Tree": "tree",
    "choose": "choosing",
    "attention": "interface",
    "CoreAttention": "core_attention",
}

__all__, __getattr__, __dir__ = exporting(__name__, _HOME)
