"""The fast paths for tokens with a cache: one call of C for all layers or, for decoding one token, a CUDA graph.

In: a model, token ids and a cache. Out: logits, or hidden states; the cache is advanced in place.
Every path gives what the layers' own forward gives.
"""
