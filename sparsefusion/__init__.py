"""sparsefusion: moving fewer bytes between ranks, and knowing what bytes cost.

Names are imported on first use, so that command-line help loads no torch.
"""

import importlib

# What `all_reduce` takes for its format.
FORMATS = ("fp32", "fp16", "bf16", "int8", "auto")

_HOME = {
    "all_reduce": "reduction",
    "Fabric": "fabric",
}

__all__ = sorted(["FORMATS", *_HOME])


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
