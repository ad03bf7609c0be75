"""The public schedules: the 2-D grid, ring, Ulysses, USP, all-gather and tree, and the choice of the cheapest.

In: queries, keys and values of this rank's tokens, also in the layouts of torch's and Megatron's attention.
Out: the attention output of this rank's tokens.
"""
