"""State-space layers over a sequence that is split over several ranks, the context ranks, and their messages.

In: this rank's blocks of a sequence, in zigzag or contiguous order, and the group of ranks that share it.
Out: the inputs before each block, its incoming state, and the gradients of both, as on one rank.
Attention between these ranks is `attention2d`, which `operators/context_attention.py` calls.
"""
