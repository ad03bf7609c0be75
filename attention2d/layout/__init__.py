"""Which rank holds which tokens: the grid of ranks, token orders, sharding of a sequence, and checks of arguments.

In: a process group, the shape of the grid and the length of the sequence.
Out: the positions of a rank's tokens, which blocks of queries and keys are multiplied, and sequences sharded and unsharded.
"""
