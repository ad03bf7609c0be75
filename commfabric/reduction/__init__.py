"""The quantized all-reduce: a sum over ranks sent in float16, bfloat16 or 8-bit integers, with the same bits on every rank.
(`collectives` has the collectives that it consists of; `gradients` reduces the gradients of a training step.)

In: a tensor, a process group and a wire format.
Out: the sum as a new tensor, on every rank.
"""
