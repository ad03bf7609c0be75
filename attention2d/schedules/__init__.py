"""The schedules that users name: the 2-D grid, ring, Ulysses, USP, all-gather and tree, and the choice between them.

In: the arguments of `torch.nn.functional.scaled_dot_product_attention`, or of Megatron's core attention.
Out: the attention output of this rank's tokens.
May import: layout, compute, cost.
"""
