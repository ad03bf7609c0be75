"""The fast path for one token: several layers in one call of C, or the whole step as a CUDA graph.

In: the layers of a model and a cache. Out: the hidden states of the next position.
Every path gives what the layers' own forward gives.
May import: native, ops, parallel, layers.
"""
