"""Generation: tokens and text, sampling, beam search, continuous batching of requests, and the prefix cache.

In: a `LanguageModel` (the interface in `language_model.py`) and prompts. Out: tokens or text, the same on every rank.
"""
