"""Lets other frameworks build this project's modules: so far Megatron-Core, by its layer specifications.

In: the arguments of a module, or a framework's layer specification.
Out: specifications from which the framework builds its models.
May import: no other sub-package.
"""
