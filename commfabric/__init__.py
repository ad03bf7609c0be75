"""commfabric: moving bytes between ranks, and what that costs.

It exports a quantized all-reduce (`all_reduce`) and predictions of the time that messages take (`Fabric`). Its sub-packages
are listed in docs/architecture.md, and each says which ones it may import. A name is imported on first use, so that
command-line help loads no torch.
"""

from .foundation.lazy import lazy_exports

# The formats of `all_reduce`.
FORMATS = ("fp32", "fp16", "bf16", "int8", "auto")

_HOME = {
    "all_reduce": ".reduction.quantized",
    "Fabric": ".fabric.cost_model",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME, "FORMATS")
