"""The fast paths of calls with a cache: one call of C for all layers, or a CUDA graph that decodes one token.

In: a model, token ids and a cache. Out: logits, or hidden states; the cache is updated in place.
Each path has the results of the layers' own `forward`.
"""
