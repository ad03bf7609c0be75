"""Layers of models as graphs of operators, and the layouts of 3-D parallelism (data x context x tensor) to compare with."""

from collections.abc import Sequence
from itertools import product

from commir.ir.mesh import Mesh
from commir.ir.program import REDUCED, Axis, Operand, Program, Result
from commir.programs.attention_programs import attention
from commir.programs.scan_programs import selective_scan

from .graph import GraphPlan, Operator, search_graph

# The loop that each role of a mesh axis gives to an operator, by the kind that its name begins with.
ROLES = {
    "data": {"attend": "batch", "scan": "batch", "": "batch"},
    "context": {"attend": "q", "scan": "seq", "": "rows"},
    "tensor": {"attend": "heads", "scan": "heads", "in": "cols", "out": "inner", "": "rows"},
}


def transformer_layer(
    batch: int = 1, seq: int = 4096, hidden: int = 4096, heads: int = 32, kv_heads: int = 8, ffn: int = 14336,
    dtype: str = "bfloat16",
) -> list[Operator]:  # fmt: skip
    """A layer of a Llama: projections to q, k and v, attention, output projection, two products of the MLP, residuals."""
    dim = hidden // heads
    layer = [_add("residual_in", batch, seq, hidden, dtype)]
    layer += _attention_block("residual_in", batch, seq, hidden, heads, kv_heads, dim, dtype)
    layer.append(_add("residual_middle", batch, seq, hidden, dtype, "residual_in", "out_attention"))
    layer.append(_product("in_mlp", batch, seq, hidden, ffn, dtype, "residual_middle"))
    layer.append(_product("out_mlp", batch, seq, ffn, hidden, dtype, "in_mlp"))
    return [*layer, _add("residual_out", batch, seq, hidden, dtype, "residual_middle", "out_mlp")]


def zamba_layer(
    batch: int = 1, seq: int = 4096, hidden: int = 2560, heads: int = 80, dim: int = 64, state: int = 64,
    attention_heads: int = 32, dtype: str = "bfloat16",
) -> list[Operator]:  # fmt: skip
    """A hybrid layer of Zamba2: the shared attention block, whose result a Mamba-2 mixer's input includes, and residuals."""
    layer = [_add("residual_in", batch, seq, hidden, dtype)]
    width = hidden // attention_heads
    layer += _attention_block("residual_in", batch, seq, hidden, attention_heads, attention_heads, width, dtype)
    layer.append(_add("residual_middle", batch, seq, hidden, dtype, "residual_in", "out_attention"))
    columns = {"x": (heads * dim, "heads"), "dt": (heads, "heads"), "B": (state, "state"), "C": (state, "state")}
    layer += [
        _product(f"in_{name}", batch, seq, hidden, count, dtype, "residual_middle")
        for name, (count, _) in columns.items()
    ]
    inputs = {
        name: (f"in_{name}", {"batch": "batch", "rows": "seq", "cols": axis}) for name, (_, axis) in columns.items()
    }
    layer.append(Operator("scan", selective_scan(batch, seq, heads, dim, state, dtype), inputs))
    back = {"batch": "batch", "seq": "rows", "heads": "inner"}
    layer.append(Operator("out_mixer", _matmul(batch, seq, heads * dim, hidden, dtype), {"a": ("scan", back)}))
    return [*layer, _add("residual_out", batch, seq, hidden, dtype, "residual_middle", "out_mixer")]


def best_3d_parallel(operators: Sequence[Operator], mesh: Mesh, memory: int | None = None) -> GraphPlan:
    """The best layout in which each mesh axis has one role for all operators: data, context or tensor parallelism.

    ValueError: none divides the sizes and fits into `memory` bytes of parameters of one operator.
    """
    found: list[GraphPlan] = []
    for roles in product(ROLES, repeat=len(mesh.axes)):
        allowed = {each.name: [tuple(_loop(role, each.name) for role in roles)] for each in operators}
        try:
            found.append(search_graph(operators, mesh, memory, allowed))
        except ValueError:
            continue
    if not found:
        raise ValueError(f"no 3-D layout divides the operators over {mesh!r} within memory={memory}")
    return min(found, key=lambda plan: plan.seconds)


def _loop(role: str, operator: str) -> str:
    kinds = ROLES[role]
    return next(loop for kind, loop in kinds.items() if operator.startswith(kind))


def _attention_block(
    source: str, batch: int, seq: int, hidden: int, heads: int, kv_heads: int, dim: int, dtype: str
) -> list[Operator]:
    """Projections to q, k and v, attention, and the output projection."""
    block = [_product(f"in_{name}", batch, seq, hidden, count * dim, dtype, source) for name, count in
             (("q", heads), ("k", kv_heads), ("v", kv_heads))]  # fmt: skip
    program = attention(batch, heads, kv_heads, seq, dim, causal=True, dtype=dtype)
    rows = {
        "q": {"batch": "batch", "rows": "q", "cols": "heads"},
        "kv": {"batch": "batch", "rows": "kv", "cols": "heads"},
    }
    inputs = {name: (f"in_{name}", rows["q" if name == "q" else "kv"]) for name in "qkv"}
    block.append(Operator("attend", program, inputs))
    back = {"batch": "batch", "q": "rows", "heads": "inner"}
    output = Operator("out_attention", _matmul(batch, seq, heads * dim, hidden, dtype), {"a": ("attend", back)})
    return [*block, output]


def _product(name: str, batch: int, rows: int, inner: int, cols: int, dtype: str, source: str) -> Operator:
    """A product with parameters, of a tensor (batch, rows, cols of its producer)."""
    renamed = {"batch": "batch", "rows": "rows", "cols": "inner"}
    return Operator(name, _matmul(batch, rows, inner, cols, dtype), {"a": (source, renamed)})


def _matmul(batch: int, rows: int, inner: int, cols: int, dtype: str) -> Program:
    """c (batch, rows, cols) = a (batch, rows, inner) times b (inner, cols)."""
    axes = Axis("batch", batch), Axis("rows", rows), Axis("cols", cols), Axis("inner", inner, REDUCED)
    a, b = Operand("a", ("batch", "rows", "inner"), "rows"), Operand("b", ("inner", "cols"), "cols")
    c = Operand("c", ("batch", "rows", "cols"), "rows")
    text = "a[batch, rows, inner] * b[inner, cols]"
    return Program("matmul", axes, (a, b), (c,), (Result("sum", ("c",)),), text, (), dtype)


def _add(name: str, batch: int, rows: int, cols: int, dtype: str, *sources: str) -> Operator:
    """The sum of tensors (batch, rows, cols), or a tensor from outside of the graph."""
    axes = Axis("batch", batch), Axis("rows", rows), Axis("cols", cols)
    names = [f"x{number}" for number in range(len(sources))] or ["x0"]
    inputs = tuple(Operand(each, ("batch", "rows", "cols"), "rows") for each in names)
    out = Operand("y", ("batch", "rows", "cols"), "rows")
    text = " + ".join(f"{each}[batch, rows, cols]" for each in names)
    program = Program("add", axes, inputs, (out,), (Result("sum", ("y",)),), text, (), dtype)
    same = {axis.name: axis.name for axis in axes}
    return Operator(name, program, {each: (source, same) for each, source in zip(names, sources, strict=False)})
