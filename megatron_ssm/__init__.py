"""megatron-ssm: state-space language models, split over the ranks of a Megatron tensor-parallel group.

Names are imported on first use, so that `import megatron_ssm` and command-line help load no torch.
"""

from sparsefusion.lazy import exporting

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

__all__, __getattr__, __dir__ = exporting(__name__, _HOME)
