"""Which rank holds which tokens: the grid of ranks, token orders, the sequence spread over a group, and checks of all three.

In: a process group, the shape of the grid and the length of the sequence.
Out: the positions of a rank's tokens, their causal relations, and whole sequences split and put together again.
May import: no other room.
"""
