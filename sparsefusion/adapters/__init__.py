"""Connections to the frameworks that own the gradients: torch DDP, Megatron DDP, DeepSpeed; and what each refuses.

In: a framework's object. Out: a `gradients.Session`, which is told when each gradient is ready,
or a ValueError that names the setting that is not supported.
What is refused of DeepSpeed is in `deepspeed_settings.py`, of the other two in `refusals.py`.
May import: fabric, planning, gradients.
"""
