"""The language model (embeddings, layers, head and loss), the initial values of its parameters, and LoRA adapters.

In: a `Stack`, the tensor-parallel ranks, and the schedule of the context ranks if sequences are split over several.
Out: logits and losses. `Model.generate`, with the arguments of transformers, imports `inference`.
The package `families` defines the families of models; no module here is specific to one.
"""
