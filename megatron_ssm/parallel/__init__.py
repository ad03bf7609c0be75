"""Tensor parallelism: process groups, the ranks of a model, the communication operators, and the parallel layers.

In: tensors of which each rank holds a part. Out: sums and gathers, with their gradients.
A token's all-reduces are called in `layers.py` here and in the mixers of `operators/`, defined in `operators.py`, and
executed by `ranks.py`. Where C runs a tape, `tape/sums.py` calls them.
"""
