"""Parallelism of tensors and sequences: groups, ranks, communication operators, parallel layers, and context ranks.

In: tensors of which each rank holds a part, or this rank's blocks of a sequence, in zigzag or contiguous order.
Out: sums and gathers with their gradients; the inputs before each block, and its incoming state.
A token's all-reduces are called in `layers.py` here and in the mixers of the room `layers`, defined in `operators.py`, and
executed by `ranks.py`. Where C runs a tape, `layers/tape_run.py` calls them.
Attention between context ranks is `attention2d`.
"""
