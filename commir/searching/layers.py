"""A layer of a model as a graph of operators."""

from collections.abc import Mapping

from commir.ir.program import REDUCED, Axis, Operand, Program, Result
from commir.programs.attention_programs import attention

from .operator_options import GraphNode

SILU = "{0} * sigmoid({0})"


def transformer_layer(
    batch: int = 1, seq: int = 4096, hidden: int = 4096, heads: int = 32, kv_heads: int = 8, ffn: int = 14336,
    dtype: str = "bfloat16", causal: bool = True,
) -> list[GraphNode]:  # fmt: skip
    """The graph of a Llama layer without its norms: attention, a gated MLP, their projections, and residuals.

    Its input comes from a layer like it, in the layout in which that one leaves its output.

    Raises:
        ValueError: a size is below 1, the heads do not divide the hidden size, or as in `attention`.
    """
    sizes, width = (batch, seq, hidden), _width(hidden, heads)
    layer = [_elementwise("residual_in", sizes, dtype, "x0", {"x0": "residual_out"})]
    layer += _attention_block("residual_in", *sizes, heads, kv_heads, width, dtype, causal)
    layer.append(_sum("residual_middle", sizes, dtype, "residual_in", "out_attention"))
    layer += [matrix_product(name, *sizes, ffn, dtype, "residual_middle") for name in ("in_gate", "in_up")]
    text = SILU.format("x0") + " * x1"
    layer.append(_elementwise("gate_mlp", (batch, seq, ffn), dtype, text, {"x0": "in_gate", "x1": "in_up"}))
    layer.append(matrix_product("out_mlp", batch, seq, ffn, hidden, dtype, "gate_mlp"))
    return [*layer, _sum("residual_out", sizes, dtype, "residual_middle", "out_mlp")]


def _width(hidden: int, heads: int) -> int:
    """The elements of a head. Raises ValueError if the heads do not divide the hidden size."""
    if heads < 1 or hidden % heads:
        raise ValueError(f"{hidden} hidden elements do not divide over {heads} heads")
    return hidden // heads


def _attention_block(
    source: str, batch: int, seq: int, hidden: int, heads: int, kv_heads: int, dim: int, dtype: str, causal: bool
) -> list[GraphNode]:
    """Projections to q, k and v, attention, and the output projection."""
    block = [matrix_product(f"in_{name}", batch, seq, hidden, count * dim, dtype, source) for name, count in
             (("q", heads), ("k", kv_heads), ("v", kv_heads))]  # fmt: skip
    program = attention(batch, heads, kv_heads, seq, dim, causal, dtype=dtype, order="contiguous")
    rows = {
        "q": {"batch": "batch", "rows": "q", "cols": "heads"},
        "kv": {"batch": "batch", "rows": "kv", "cols": "heads"},
    }
    inputs = {name: (f"in_{name}", rows["q" if name == "q" else "kv"]) for name in "qkv"}
    block.append(GraphNode("attend", program, inputs))
    back = {"batch": "batch", "q": "rows", "heads": "inner"}
    output = GraphNode("out_attention", _matmul(batch, seq, heads * dim, hidden, dtype), {"a": ("attend", back)})
    return [*block, output]


def matrix_product(name: str, batch: int, rows: int, inner: int, cols: int, dtype: str, source: str) -> GraphNode:
    """A product with parameters, of a tensor (batch, rows, cols of its producer)."""
    renamed = {"batch": "batch", "rows": "rows", "cols": "inner"}
    return GraphNode(name, _matmul(batch, rows, inner, cols, dtype), {"a": (source, renamed)})


def _matmul(batch: int, rows: int, inner: int, cols: int, dtype: str) -> Program:
    """c (batch, rows, cols) = a (batch, rows, inner) times b (inner, cols)."""
    axes = Axis("batch", batch), Axis("rows", rows), Axis("cols", cols), Axis("inner", inner, REDUCED)
    a, b = Operand("a", ("batch", "rows", "inner"), "rows"), Operand("b", ("inner", "cols"), "cols")
    c = Operand("c", ("batch", "rows", "cols"), "rows")
    text = "a[batch, rows, inner] * b[inner, cols]"
    return Program("matmul", axes, (a, b), (c,), (Result("sum", ("c",)),), text, (), dtype)


def _elementwise(
    name: str, sizes: tuple[int, int, int], dtype: str, formula: str, sources: Mapping[str, str]
) -> GraphNode:
    """y (batch, rows, cols) from x0 and x1 of the same shape. sources: {x0 or x1: the operator that makes it}."""
    axes = tuple(Axis(*each) for each in zip(("batch", "rows", "cols"), sizes, strict=True))
    same = {axis.name: axis.name for axis in axes}
    names = [name for name in ("x0", "x1") if name in formula]
    for each in names:
        formula = formula.replace(each, f"{each}[batch, rows, cols]")
    inputs = tuple(Operand(name, tuple(same), "rows") for name in names)
    output = Operand("y", tuple(same), "rows")
    program = Program("elementwise", axes, inputs, (output,), (Result("sum", ("y",)),), formula, (), dtype)
    return GraphNode(name, program, {each: (source, same) for each, source in sources.items()})


def _sum(name: str, sizes: tuple[int, int, int], dtype: str, first: str, second: str) -> GraphNode:
    return _elementwise(name, sizes, dtype, "x0 + x1", {"x0": first, "x1": second})
