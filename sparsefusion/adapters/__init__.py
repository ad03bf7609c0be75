"""Connections to the frameworks that own the gradients: torch DDP, Megatron DDP, DeepSpeed; and what each refuses.

In: a framework's object. Out: a `gradients.Session`, which is told when each gradient is ready,
or a ValueError that names the setting that is not supported.
What is refused, such as ZeRO 2 and 3, is in `refusals.py`.
"""
