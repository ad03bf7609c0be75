"""Specifications with which other frameworks build this project's modules: so far, Megatron-Core
builds the attention of `attention2d`.

In: the arguments of a module, or a framework's layer specification.
Out: specifications from which the framework builds its models.
May import: no other sub-package.
"""
