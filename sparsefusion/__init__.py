"""sparsefusion: moving fewer bytes between ranks, and knowing what bytes cost.

Names are imported on first use, so that command-line help loads no torch.
"""

from sparsefusion.foundation.lazy import lazy_exports

# What `all_reduce` takes for its format.
FORMATS = ("fp32", "fp16", "bf16", "int8", "auto")
# What `SparseFusion` takes for its mode and its sparsifier.
MODES = ("dense", "fp16", "layerwise", "bucket", "selective", "interleaved", "offload", "auto")
SPARSIFIERS = ("topk", "dgc", "gaussiank", "redsync", "sidco", "randomk")

_HOME = {
    "all_reduce": "reduction.quantized",
    "Fabric": "fabric.cost_model",
    "SparseFusion": "fusion.sparse_fusion",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME, "FORMATS", "MODES", "SPARSIFIERS")
