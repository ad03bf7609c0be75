"""Layers of models as graphs of operators, and the layouts of 3-D parallelism (data x context x tensor) to compare with."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from commir.ir.mesh import Mesh
from commir.ir.program import REDUCED, Axis, Operand, Program, Result
from commir.programs.attention_programs import attention
from commir.programs.scan_programs import selective_scan

from .graph import GraphPlan, check_edges, search_graph
from .operator_options import GraphNode

# The loop that each role of a mesh axis gives to an operator, by the kind that its name begins with.
ROLES = {
    "data": {"attend": "batch", "scan": "batch", "": "batch"},
    "context": {"attend": "q", "scan": "seq", "": "rows"},
    "tensor": {"attend": "heads", "scan": "heads", "in": "cols", "gate": "cols", "out": "inner", "": "rows"},
}
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


def zamba_layer(
    batch: int = 1, seq: int = 4096, hidden: int = 2560, heads: int = 80, dim: int = 64, state: int = 64,
    attention_heads: int = 32, dtype: str = "bfloat16", causal: bool = True,
) -> list[GraphNode]:  # fmt: skip
    """The graph of a hybrid layer of Zamba2: the shared attention block, whose result enters a Mamba-2 mixer, and residuals.

    It lacks the norms, the convolution (whose messages are three tokens), and the activation of step sizes. Its input comes
    from a layer like it.

    Raises:
        ValueError: as in `transformer_layer`.
    """
    sizes, inner = (batch, seq, hidden), heads * dim
    layer = [_elementwise("residual_in", sizes, dtype, "x0", {"x0": "residual_out"})]
    width = _width(hidden, attention_heads)
    layer += _attention_block("residual_in", *sizes, attention_heads, attention_heads, width, dtype, causal)
    layer.append(_sum("residual_middle", sizes, dtype, "residual_in", "out_attention"))
    columns = {"x": (inner, "heads"), "dt": (heads, "heads"), "B": (state, "state"), "C": (state, "state")}
    counts = {name: count for name, (count, _) in columns.items()} | {"z": inner}
    layer += [matrix_product(f"in_{name}", *sizes, count, dtype, "residual_middle") for name, count in counts.items()]
    inputs = {
        name: (f"in_{name}", {"batch": "batch", "rows": "seq", "cols": axis}) for name, (_, axis) in columns.items()
    }
    layer.append(GraphNode("scan", selective_scan(batch, seq, heads, dim, state, dtype, "contiguous"), inputs))
    gated = _elementwise("gate_mixer", (batch, seq, inner), dtype, "x0 * " + SILU.format("x1"), {"x1": "in_z"})
    back = {"batch": "batch", "seq": "rows", "heads": "cols"}
    layer.append(replace(gated, inputs={**gated.inputs, "x0": ("scan", back)}))
    layer.append(matrix_product("out_mixer", batch, seq, inner, hidden, dtype, "gate_mixer"))
    return [*layer, _sum("residual_out", sizes, dtype, "residual_middle", "out_mixer")]


def _width(hidden: int, heads: int) -> int:
    """The elements of a head. Raises ValueError if the heads do not divide the hidden size."""
    if heads < 1 or hidden % heads:
        raise ValueError(f"{hidden} hidden elements do not divide over {heads} heads")
    return hidden // heads


def best_3d_parallel(
    operators: Sequence[GraphNode], mesh: Mesh, memory: int | None = None, times: Mapping[str, float] | None = None
) -> GraphPlan:
    """Find the best layout in which each mesh axis has one role for all operators: data, context or tensor parallelism.

    The loop that a role divides follows from the beginning of an operator's name (ROLES), as the layers of this module have
    them.

    Args:
        operators, mesh, memory, times: as in `search_graph`.

    Raises:
        ValueError: no layout divides the sizes within `memory`, or as in `search_graph`.
    """
    check_edges(operators)
    found: list[GraphPlan] = []
    for roles in product(ROLES, repeat=len(mesh.axes)):
        allowed = {operator.name: [tuple(_loop(role, operator.name) for role in roles)] for operator in operators}
        try:
            found.append(search_graph(operators, mesh, memory, allowed, times))
        except ValueError:
            continue
    if not found:
        raise ValueError(f"no 3-D layout divides the operators over {mesh!r} within memory={memory}")
    return min(found, key=lambda plan: plan.seconds)


def _loop(role: str, operator: str) -> str:
    kinds = ROLES[role]
    return next(loop for kind, loop in kinds.items() if operator.startswith(kind))


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
    """The sum of what two operators make."""
    return _elementwise(name, sizes, dtype, "x0 + x1", {"x0": first, "x1": second})
