"""A hybrid layer as a graph of operators, and the layouts of 3-D parallelism (data x context x tensor) to compare with."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from commir import Mesh
from commir.programs.scan_programs import selective_scan
from commir.searching.graph import GraphPlan, check_edges, search_graph
from commir.searching.layers import SILU, _attention_block, _elementwise, _sum, _width, matrix_product
from commir.searching.operator_options import GraphNode

# The loop that each role of a mesh axis gives to an operator, by the kind that its name begins with.
ROLES = {
    "data": {"attend": "batch", "scan": "batch", "": "batch"},
    "context": {"attend": "q", "scan": "seq", "": "rows"},
    "tensor": {"attend": "heads", "scan": "heads", "in": "cols", "gate": "cols", "out": "inner", "": "rows"},
}


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
