"""megatron-ssm: state-space language models, split over the ranks of a Megatron tensor-parallel group.

Names are imported on first use, so that `import megatron_ssm` and command-line help load no torch.
"""

import importlib

_HOME = {
    "load": "checkpoint",
    "save": "checkpoint",
    "build": "checkpoint",
    "generate": "generation",
    "stream": "generation",
    "Engine": "engine",
    "initialize": "initialization",
    "Config": "config",
    "Model": "model",
    "Cache": "cache",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
