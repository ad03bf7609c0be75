"""Our layers and weights in other frameworks: layer specifications for Megatron-Core's models and their checkpoints, and a
model class for lm-evaluation-harness.

In: the configuration and process groups of Megatron-Core, or a Hugging Face directory.
Out: specifications (`ModuleSpec`) from which Megatron-Core builds its models, their weights, Hugging Face directories, and
answers to an evaluator.
"""
