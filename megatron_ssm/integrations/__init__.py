"""Our layers and weights in other frameworks: Megatron-Core's models and checkpoints, and lm-evaluation-harness.

In: the configuration and process groups of Megatron-Core, or a Hugging Face directory.
Out: specifications (`ModuleSpec`) from which Megatron-Core builds its models, weights in either format, and the answers to
an evaluator.
"""
