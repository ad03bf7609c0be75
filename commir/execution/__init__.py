"""Running plans, with all ranks in one process or on a process group, and verifying them.

In: plans and tensors. Out: outputs, counted bytes and memory, and errors that name the first wrong element.
"""
