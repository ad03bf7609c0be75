"""The schedules that users name: the 2-D grid, ring, Ulysses, USP, all-gather and Tree, and the choice between them.

In: `torch.nn.functional.scaled_dot_product_attention`'s arguments, or Megatron's.
Out: the attention output of this rank's tokens.
May import: layout, compute, cost.
"""
