"""Tensor parallelism: Megatron's process groups, the ranks of a model, the communication operators, parallel layers.

In: tensors of which each rank holds a part. Out: sums and gathers, with their gradients.
A token's all-reduces happen in `layers.py`, through `ranks.py`.
May import: native, ops.
"""
