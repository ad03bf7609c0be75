"""Generation: text and tokens, sampling, requests, continuous batching, the prefix cache, beam search.

In: a `LanguageModel` (the interface in `language_model.py`) and prompts.
Out: tokens or text, the same on every rank. An HTTP server would call `Engine` from `integrations`.
May import: configs, parallel, layers.
"""
