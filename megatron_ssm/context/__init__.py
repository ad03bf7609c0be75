"""State-space layers over a sequence that is spread over several ranks, the context ranks: what they exchange.

In: this rank's blocks of a sequence, in zigzag or contiguous order, and the group of ranks that share it.
Out: the inputs before each block, its incoming state, and the gradients of both; the same as on one rank.
Attention between these ranks is `attention2d`, which `models/context_attention.py` calls.
"""
