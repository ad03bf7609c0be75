"""sparsefusion: gradients on a budget of bytes.

It exports fused sparse gradients (`SparseFusion`), and `all_reduce`, `Fabric` and FORMATS of `commfabric`. Its sub-packages
are listed in docs/architecture.md, and each says which ones it may import. A name is imported on first use, so that
command-line help loads no torch.
"""

from commfabric import FORMATS as FORMATS
from commfabric.foundation.lazy import lazy_exports

# The modes, the exchanges and the sparsifiers of `SparseFusion`.
MODES = ("dense", "fp16", "layerwise", "bucket", "selective", "interleaved", "offload", "auto")
EXCHANGES = ("all_gather", "sparse_all_reduce", "auto")
SPARSIFIERS = ("topk", "dgc", "gaussiank", "redsync", "sidco", "randomk")

_HOME = {
    "all_reduce": "commfabric.reduction.quantized",
    "Fabric": "commfabric.fabric.cost_model",
    "SparseFusion": ".fusion.sparse_fusion",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME, "FORMATS", "MODES", "EXCHANGES", "SPARSIFIERS")
