"""The language model (embeddings, layers, head and loss), initial values, LoRA adapters, and formulas for its size.

In: a `Stack`, the tensor-parallel ranks, and the schedule of the context ranks if sequences are split over several.
Out: logits and losses; bytes, operations and messages before anything is started.
No module here is specific to a family; `layers/families` has them.
"""
