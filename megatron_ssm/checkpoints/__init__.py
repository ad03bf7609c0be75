"""Checkpoints: Hugging Face directories in and out, training checkpoints, conversion from state-spaces/mamba.

In: files, of which each rank reads its own slices; or a model.
Out: a model; or files, written under a temporary name and renamed.
"""
