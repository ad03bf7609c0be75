"""Parts of this project for other frameworks: so far, layer specifications of Megatron-Core that use `attention2d`.

In: the arguments of a module, or a layer specification of Megatron-Core.
Out: specifications (`ModuleSpec`) from which Megatron-Core builds its models.
May import: no other sub-package.
"""
