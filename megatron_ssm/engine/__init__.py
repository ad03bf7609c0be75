"""Generation: tokens and text, sampling, beam search, continuous batching of requests, and the prefix cache.

In: a `Model` and prompts. Out: tokens or text, the same on every rank.
"""
