"""Tensor parallelism: process groups, the ranks of a model, the communication operators, and the parallel layers.

In: tensors of which each rank holds a part. Out: sums and gathers, with their gradients.
A token's all-reduces happen in `layers.py`, by the operators of `operators.py`, through `ranks.py`.
May import: native, ops.
"""
