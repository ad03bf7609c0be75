"""The fast path for tokens with a cache: several layers in one call of C, or, for decoding one token, a CUDA graph.

In: the layers of a model and a cache. Out: the hidden states of the next positions, or their logits.
Every path gives what the layers' own forward gives.
"""
