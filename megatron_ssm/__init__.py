"""megatron-ssm: state-space language models, split over the ranks of a Megatron tensor-parallel group.

Its sub-packages are listed in docs/architecture.md, and each says which ones it may import.
Names are imported on first use, so that `import megatron_ssm` and command-line help load no torch.
"""

from commfabric.foundation.lazy import lazy_exports

_HOME = {
    "load": ".checkpoints.hf",
    "save": ".checkpoints.hf",
    "build": ".checkpoints.hf",
    "generate": ".engine.generation",
    "stream": ".engine.generation",
    "Engine": ".engine.engine",
    "initialize": ".model.initialization",
    "add_lora": ".model.adapters",
    "merge_lora": ".model.adapters",
    "parameter_groups": ".model.parameters",
    "load_lora": ".checkpoints.peft",
    "save_lora": ".checkpoints.peft",
    "with_lora": ".checkpoints.peft",
    "families": ".layers.families",
    "Memory": ".model.memory",
    "TrainingMemory": ".model.activations",
    "json_schema": ".engine.grammar",
    "Trainer": ".train.trainer",
    "average_replicated_gradients": ".train.gradients",
    "clip_gradients": ".train.gradients",
    "grad_norm": ".train.gradients",
    "Stack": ".spec.stack",
    "Model": ".model.model",
    "Cache": ".layers.cache",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME)
