"""The layers of the models: Mamba-1 and Mamba-2 mixers, Zamba's shared attention block, the residual block, the cache.

In: hidden states (the same on every rank) and this rank's part of the cache.
Out: hidden states; the cache is advanced in place.
"""
