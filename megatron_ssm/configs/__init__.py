"""What a model is, before any tensor exists: its configuration, and the layout of every parameter, family by family.

In: a Hugging Face `config.json`.
Out: a `Config`; the names, shapes and splits of all parameters. Loads no torch.
A family is added here; a new kind of mixer also needs a module in `layers`, and `models.model` chooses it.
"""
