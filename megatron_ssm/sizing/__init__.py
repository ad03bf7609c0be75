"""How much memory a rank needs, and how many ranks to use, before anything is started. Loads no torch.

In: a `Config`, a number of ranks and lengths.
Out: bytes per rank; bytes read and sent per decoded token.
May import: configs.
"""
