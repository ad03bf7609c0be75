"""Our layers and weights in other frameworks: layer specifications for Megatron-Core's models, and their checkpoints.

In: the configuration and process groups of Megatron-Core, or a Hugging Face directory.
Out: specifications (`ModuleSpec`) from which Megatron-Core builds its models, their weights, and Hugging Face directories.
May import: configs, parallel, context, layers, models, checkpoints.
"""
