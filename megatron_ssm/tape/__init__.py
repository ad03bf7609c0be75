"""Tapes: what a model does with the tokens of a call, as a list of operations that one call of C runs.

In: the operators of a model, which write their operations (`lower`), a cache, and token ids.
Out: logits, or hidden states; the cache is advanced in place.
"""
