"""The library of programs: attention, decode attention, matrix products, reductions, scans; and operators in Python.

In: sizes. Out: `Program`s, and the functions that compute their tiles.
"""

from commfabric.foundation.lazy import lazy_exports

_HOME = (
    {"attention": ".attention_programs", "decode_attention": ".attention_programs"}
    | dict.fromkeys(("all_gather_matmul", "matmul_reduce_scatter", "weighted_sum"), ".linear_programs")
    | dict.fromkeys(("gated_delta", "selective_scan"), ".scan_programs")
)

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME)
