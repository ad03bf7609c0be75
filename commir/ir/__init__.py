"""The programs and the ranks: loop programs, how partial results combine, and meshes of ranks.

In: sizes. Out: immutable values that every other sub-package reads. May be read without torch.
"""
