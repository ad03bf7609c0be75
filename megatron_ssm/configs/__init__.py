"""What a model is, before any tensor exists: its configuration, and the layout of every parameter, family by family.

In: a Hugging Face `config.json`.
Out: a `Config`; the names, shapes and splits of all parameters. A family is added here. Loads no torch.
May import: no other room.
"""
