"""Attention as loop programs: forward, backward and decoding (paper, section 2.2)."""

from commir.ir.program import REDUCED, SPATIAL, WHOLE, Axis, Operand, Program, Result


def attention(
    batch: int = 1, heads: int = 8, kv_heads: int | None = None, seq: int = 4096, head_dim: int = 64, causal: bool = True,
    backward: bool = False, dtype: str = "float32", order: str | None = None, scale: float | None = None,
) -> Program:  # fmt: skip
    """Exact attention: q (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim) -> out, lse.

    lse is (batch, seq, heads), in at least fp32. At home all operands are sharded along the sequence.

    Args:
        kv_heads: the number of key/value heads (None: heads); each serves heads / kv_heads consecutive query heads.
        causal: a query sees the keys up to its own position.
        backward: compute the gradients dq, dk and dv instead, from q, k, v, out, lse and dout, the gradient of out.
        dtype: of the elements, by which bytes are counted.
        order: the tokens that a rank holds, "zigzag" (the default if causal, which balances the work) or "contiguous".
        scale: of the scores, positive and finite (None: 1/sqrt(head_dim)).

    Raises:
        ValueError: kv_heads does not divide heads, a size is below 1, or an argument has an unknown value.
    """
    if causal not in (True, False):
        raise ValueError(f"causal={causal!r}: expected True or False")
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} heads do not divide over {kv_heads} key/value heads")
    order = ("zigzag" if causal else "contiguous") if order is None else order
    axes = (
        Axis("batch", batch),
        Axis("heads", heads),
        Axis("q", seq, REDUCED if backward else SPATIAL, order),
        Axis("kv", seq, REDUCED, order),
        Axis("dim", head_dim, WHOLE),
    )
    groups = (("heads", heads // kv_heads),)
    of_q, of_kv, row = ("batch", "q", "heads", "dim"), ("batch", "kv", "heads", "dim"), ("batch", "q", "heads")
    q = Operand("q", of_q, "q")
    k, v = (Operand(name, of_kv, "kv", groups) for name in "kv")
    out, lse = Operand("out", of_q, "q"), Operand("lse", row, "q", is_wide=True)
    options = ("causal", causal), ("scale", head_dim**-0.5 if scale is None else float(scale))
    if not backward:
        result = Result("softmax", ("out", "lse"))
        return Program("attention", axes, (q, k, v), (out, lse), (result,), "attention", options, dtype)
    delta = Operand("delta", row, "q", is_wide=True, source=("dout", "out"))
    inputs = (
        Operand("dout", of_q, "q"), Operand("out", of_q, "q", in_tile=False), q, k, v, lse, delta,
    )  # fmt: skip
    dq = Operand("dq", of_q, "q", has_wide_partials=True)
    dk, dv = (Operand(f"d{name}", of_kv, "kv", groups, has_wide_partials=True) for name in "kv")
    results = Result("sum", ("dq",)), Result("sum", ("dk", "dv"))
    return Program("attention_backward", axes, inputs, (dq, dk, dv), results, "attention_backward", options, dtype)


ATTENTION_TILES = ("attention", "attention_backward")
SAVED = ("q", "k", "v", "out", "lse")  # saved by the forward pass for the backward pass


def is_self_attention(program: Program) -> bool:
    """Return True for a forward program that `attention` makes, with its operands, their homes and groups."""
    try:
        return program == self_attention_like(program)
    except ValueError:  # it lacks an axis or an operand
        return False


def self_attention_like(program: Program, backward: bool = False) -> Program:
    """The program of `attention` with the sizes, key/value heads, order, options and dtype of another.

    Raises ValueError if that program has no such axis or operand.
    """
    heads, q, options = program.axis("heads").size, program.axis("q"), dict(program.options)
    return attention(
        program.axis("batch").size, heads, heads // program.operand("k").divisor("heads"), q.size, program.axis("dim").size,
        options.get("causal", True), backward, program.dtype, q.order, options.get("scale"),
    )  # fmt: skip


def decode_attention(
    batch: int = 1, heads: int = 8, kv_heads: int | None = None, seq: int = 4096, head_dim: int = 64, queries: int = 1,
    dtype: str = "float32",
) -> Program:  # fmt: skip
    """A few last tokens attend to all keys: q (batch, queries, heads, head_dim), the same on every rank at home -> out, lse.

    k, v: (batch, seq, kv_heads, head_dim), sharded along the sequence at home. Every rank gets the outputs, and every query
    sees all keys. Raises ValueError as `attention` does.
    """
    base = attention(batch, heads, kv_heads, seq, head_dim, causal=False, dtype=dtype)
    axes = tuple(Axis("q", queries) if axis.name == "q" else axis for axis in base.axes)
    row = ("batch", "q", "heads")
    q, out = Operand("q", (*row, "dim")), Operand("out", (*row, "dim"))
    outputs = out, Operand("lse", row, is_wide=True)
    return Program(
        "decode_attention", axes, (q, *base.inputs[1:]), outputs, base.results, base.tile, base.options, dtype
    )
