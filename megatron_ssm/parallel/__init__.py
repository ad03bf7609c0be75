"""Tensor parallelism: process groups, the ranks of a model, the communication operators, and the parallel layers.

In: tensors of which each rank holds a part. Out: sums and gathers, with their gradients.
`layers.py` here calls a token's all-reduces, by the operators of `operators.py`, through `ranks.py`; where C decodes
several layers at once, `decoding/native_step.py` does.
May import: native, ops.
"""
