"""This project's modules inside other frameworks: so far Megatron-Core's layer specs.

In: the arguments of a module, or a framework's layer specification.
Out: specifications from which the framework builds its models.
May import: no other room.
"""
