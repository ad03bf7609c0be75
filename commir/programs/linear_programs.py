"""Matrix products and reductions as loop programs (paper, sections 2.2 and 8.1)."""

from commir.ir.program import REDUCED, SPATIAL, Axis, Operand, Program, Result

MATMUL = "a[rows, inner] * b[inner, cols]"  # the tile of a matrix product
# {matrix product: the axis along which each operand is kept at home}
HOMES = {
    "all_gather_matmul": {"a": "rows", "b": "cols", "c": "cols"},
    "matmul_reduce_scatter": {"a": "inner", "b": "inner", "c": "rows"},
}


def all_gather_matmul(rows: int, cols: int, inner: int, dtype: str = "float32") -> Program:
    """c = a b: the first product of a tensor-parallel layer with sequence parallelism, whose rows are tokens.

    At home a (rows, inner) is sharded along its rows, b (inner, cols) and c (rows, cols) along columns.
    """
    return _matmul("all_gather_matmul", rows, cols, inner, dtype)


def matmul_reduce_scatter(rows: int, cols: int, inner: int, dtype: str = "float32") -> Program:
    """c = a b: the second product of a tensor-parallel layer with sequence parallelism, whose rows are tokens.

    At home a (rows, inner) and b (inner, cols) are sharded along `inner`, and c (rows, cols) along rows.
    """
    return _matmul("matmul_reduce_scatter", rows, cols, inner, dtype)


def _matmul(name: str, rows: int, cols: int, inner: int, dtype: str) -> Program:
    axes = Axis("rows", rows), Axis("cols", cols), Axis("inner", inner, REDUCED)
    indices = {"a": ("rows", "inner"), "b": ("inner", "cols"), "c": ("rows", "cols")}
    a, b, c = (Operand(operand, indices[operand], home) for operand, home in HOMES[name].items())
    return Program(name, axes, (a, b), (c,), (Result("sum", ("c",)),), MATMUL, (), dtype)


def weighted_sum(rows: int, cols: int, dtype: str = "float32") -> Program:
    """c[i] += a[i, j] * b[j], the paper's example (Table 2): a (rows, cols) is sharded along rows at home, b along cols."""
    axes = Axis("rows", rows, SPATIAL), Axis("cols", cols, REDUCED)
    a, b, c = Operand("a", ("rows", "cols"), "rows"), Operand("b", ("cols",), "cols"), Operand("c", ("rows",), "rows")
    return Program("weighted_sum", axes, (a, b), (c,), (Result("sum", ("c",)),), "a[rows, cols] * b[cols]", (), dtype)
