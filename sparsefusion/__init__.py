"""sparsefusion: fewer bytes between ranks, and a cost model of the network.

It exports a quantized all-reduce (`all_reduce`), fused sparse gradients (`SparseFusion`), and predictions of the time that
messages take (`Fabric`). Its sub-packages are listed in docs/architecture.md, and each says which ones it may import.
A name is imported on first use, so that command-line help loads no torch.
"""

from sparsefusion.foundation.lazy import lazy_exports

# The formats of `all_reduce`.
FORMATS = ("fp32", "fp16", "bf16", "int8", "auto")
# The modes, the exchanges and the sparsifiers of `SparseFusion`.
MODES = ("dense", "fp16", "layerwise", "bucket", "selective", "interleaved", "offload", "auto")
EXCHANGES = ("all_gather", "sparse_all_reduce", "auto")
SPARSIFIERS = ("topk", "dgc", "gaussiank", "redsync", "sidco", "randomk")

_HOME = {
    "all_reduce": "reduction.quantized",
    "Fabric": "fabric.cost_model",
    "SparseFusion": "fusion.sparse_fusion",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME, "FORMATS", "MODES", "EXCHANGES", "SPARSIFIERS")
