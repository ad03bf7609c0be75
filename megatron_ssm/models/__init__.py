"""The language model: embedding, residual blocks, head and loss; and the initial values of its parameters.

In: a `Stack`, the tensor-parallel ranks, and the schedule of the context ranks if sequences are spread over several.
Out: logits and losses; `inference` is imported for `Model.generate`, which has the arguments of transformers.
How a family differs from another is in `families`; there is no module per family here.
"""
