"""The operators of the models (Mamba-1, Mamba-2, attention, MLP, a shared block), residual units, states and the cache.

In: hidden states (the same on every rank) and this rank's part of the cache.
Out: hidden states; the cache is advanced in place.
"""
