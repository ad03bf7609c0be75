"""Adapters of the frameworks that own the gradients: torch DDP, Megatron DDP, DeepSpeed.

In: a framework's object. Out: its gradients, handed over to a `gradients.Session` when they are ready, or a ValueError that
names an unsupported setting, such as ZeRO 2 and 3.
"""
