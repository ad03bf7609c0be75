"""What a model is, before any tensor exists: its parameters, units and layers as data, read from a Hugging Face config.json.

In: the fields of a config.json, as a family reads them. Out: a `Stack`, from which models, checkpoints and sizes are made.
"""
