"""Our parts inside other people's frameworks: Megatron-Core's layer specs; later servers and evaluators.

In: a framework's configuration.
Out: modules that the framework builds its models from.
May import: no other room.
"""
