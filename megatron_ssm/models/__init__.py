"""The language model: embedding, residual blocks, head and loss; and the initial values of its parameters.

In: a `Config` and the tensor-parallel ranks. Out: logits, losses, and generated tokens.
May import: configs, parallel, layers, decoding, inference.
"""
