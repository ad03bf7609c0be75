"""The floating-point operations of a model, counted from its equations and not from an implementation.

Forward needs for each token

    2 * (elements of the matrices that the token is multiplied with)
    + 7 * inner * state of each state-space layer     the scan
    + 4 * layers * heads * head_dim * seq             scores and weighted sums of attention

A shared block counts once for each layer that invokes it, with the adapters of that layer. The embedding counts only as a
tied head, because its rows are looked up. The factor 7 is Megatron-LM's (`num_floating_point_operations` in
megatron/training/training.py), which omits convolution and norms as well. Attention counts all pairs of tokens, as in PaLM
(Chowdhery et al., 2022, appendix B). Backward needs twice as many operations as forward: for the gradients of activations
and of weights. With LoRA, the model's weights are frozen and need no gradients, but the adapters do. Recomputed activations
do not count.
"""

import math

from megatron_ssm.spec.fields import Field
from megatron_ssm.spec.sizes import Workload
from megatron_ssm.spec.stack import Stack

from .memory import sizes_of

# Dense bf16 TFLOP/s of the vendors' data sheets, by a part of torch's name of the GPU; the first match counts.
BF16_TFLOPS = {
    "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0,
    "A6000": 154.8, "RTX 4090": 165.2,
}  # fmt: skip


def matrix_elements(config: Stack) -> float:
    """The number of elements of the matrices that one token is multiplied with in forward; of experts, the chosen ones."""

    def uses(field: Field) -> int:
        """The number of times that a token is multiplied with this field; 0 if it is no matrix."""
        is_matrix = len(field.shape) == 2 and not field.name.endswith("A_log") or field.apart
        if not is_matrix or ".idle." in field.name:
            return 0
        if field.name == "embeddings.weight":
            return int(config.tie_embeddings)
        if field.name.startswith("shared."):
            return of_block[int(field.name.split(".")[1])]
        return 1

    of_block = [len(config.uses(index)) for index in range(len(config.shared))]
    return sum(uses(field) * field.used * math.prod(field.shape) for field in config.fields())


def expert_elements(config: Stack) -> float:
    """The number of `matrix_elements` in routed experts."""
    return sum(field.used * math.prod(field.shape) for field in config.fields() if field.by_expert)


def forward_flops(config: Stack, seq: int) -> float:
    """Operations for one token in a sequence of `seq` tokens."""
    sizes = sizes_of(config, Workload())
    scans = sum(count * (operator.scan + operator.attention * seq) for operator, count in sizes)
    return 2 * matrix_elements(config) + scans


def training_flops(config: Stack, seq: int, adapter_elements: int = 0) -> float:
    """Operations for one token in a training step, forward and backward.

    The gradient of the first layer's input counts, even if no parameter before it is trained.

    Args:
        config: The model.
        seq: The number of tokens of a sequence.
        adapter_elements: The number of elements of the LoRA adapters that one token is multiplied with, if only they are
            trained; 0 if the whole model is trained.
    """
    whole = 3 * forward_flops(config, seq)
    return whole - 2 * matrix_elements(config) + 6 * adapter_elements if adapter_elements else whole


def known_peak(device_name: str) -> float | None:
    return next((peak for part, peak in BF16_TFLOPS.items() if part in device_name), None)
