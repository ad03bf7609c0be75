"""Tapes: the operations that a model applies to the tokens of a call, as a list that one call of C runs.

In: the operators of a model, which write their operations (`lower`), a cache, and token ids.
Out: logits, or hidden states; the cache is advanced in place.
"""
