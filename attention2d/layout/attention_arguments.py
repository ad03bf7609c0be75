"""The rules for the arguments of a schedule. Each check raises a ValueError of one sentence with the numbers that do not
fit.
"""

import math

import torch


def check_grid(ranks: int, rows: int, cols: int, ulysses: int, order: str, transpose: bool) -> None:
    """The sizes of the grid must multiply to `ranks`, and the grid must support this token order."""
    for name, size in dict(ulysses=ulysses, rows=rows, cols=cols).items():
        if size < 1:
            raise ValueError(f"{name}={size}: expected at least 1")
    if (product := ulysses * rows * cols) != ranks:
        sizes = f"ulysses={ulysses}, rows={rows}, cols={cols}"
        raise ValueError(f"{sizes} is {ulysses} * {rows} * {cols} = {product} ranks; the group has {ranks}")
    if order == "cyclic" and ulysses > 1:
        raise ValueError(f"cyclic order needs ulysses=1, not {ulysses}: a cell's tokens would not be in cyclic order")
    if transpose and order != "cyclic":
        raise ValueError(f"transpose=True needs the cyclic order, not {order}")


def check_heads(heads: int, kv_heads: int, ulysses: int = 1) -> None:
    """Both counts must be at least 1, kv_heads must divide heads, and `ulysses` must divide both."""
    check_sizes(heads=heads, kv_heads=kv_heads)
    if heads % kv_heads:
        remainder = f"{heads} % {kv_heads} = {heads % kv_heads}"
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} key/value heads ({remainder})")
    for name, count in dict(query=heads, **{"key/value": kv_heads}).items():
        if count % ulysses:
            remainder = f"{count} % {ulysses} = {count % ulysses}"
            raise ValueError(f"{count} {name} heads do not divide over ulysses={ulysses} ranks ({remainder})")


def check_sizes(**sizes: int) -> None:
    """Every size must be at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: expected at least 1")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, same_length: bool = True) -> None:
    """q, k and v must be non-empty tensors (batch, seq, heads, head_dim) whose shapes and dtypes match.

    same_length: q and k must have the same number of local tokens. If False, they may differ, and k and v may be empty.
    """
    for name, t in dict(q=q, k=k, v=v).items():
        if t.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(t.shape)}: expected (batch, seq, heads, head_dim)")
        if not t.dtype.is_floating_point:
            raise ValueError(f"{name} has dtype {t.dtype}: expected a floating-point dtype")
        if (t.dtype, t.device) != (q.dtype, q.device):
            raise ValueError(f"{name} is {t.dtype} on {t.device}: expected {q.dtype} on {q.device}, as q is")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}: expected {tuple(k.shape)}, as k has")
    for dim, name in ((0, "sequences"), (1, "local tokens"), (3, "elements per head")):
        if q.shape[dim] != k.shape[dim] and (dim != 1 or same_length):
            raise ValueError(f"k has {k.shape[dim]} {name}: expected {q.shape[dim]}, as q has")
    if not q.numel() or (same_length and not k.numel()):
        raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: no size may be 0")


def check_causal(causal: bool) -> None:
    if causal not in (True, False):
        raise ValueError(f"causal={causal!r}: expected True or False")


def check_scale(scale: float | None) -> None:
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}: expected a positive, finite number")


def check_mask(mask: torch.Tensor | None, batch: int, seq: int) -> None:
    """`mask` must be None, or a bool tensor (batch or 1, query blocks, key blocks) that divides the sequence equally."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() != 3:
        shown = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"mask is {shown}: expected a bool tensor (batch or 1, query blocks, key blocks)")
    if mask.shape[0] not in (1, batch):
        raise ValueError(f"mask has {mask.shape[0]} sequences: expected 1 or {batch}, as q has")
    for blocks, name in zip(mask.shape[1:], ("query", "key"), strict=True):
        if not 1 <= blocks <= seq or -(-seq // -(-seq // blocks)) != blocks:
            raise ValueError(f"mask has {blocks} {name} blocks: {seq} tokens do not divide into as many equal blocks")


def refuse_features(**features: object) -> None:
    """Raise ValueError naming the first feature in use. A feature that is None, False or 0 is not in use."""
    for name, value in features.items():
        if value is None or (isinstance(value, (bool, int, float)) and not value):
            continue
        shown = f"={value}" if isinstance(value, (bool, int, float, str, tuple)) else ""
        raise ValueError(f"{name}{shown} is not supported by attention2d")


def cast_for_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast the tensors as `torch.nn.functional.scaled_dot_product_attention` would: to autocast's dtype, if it is enabled.

    float64 and integer tensors, and arguments that are not tensors, are returned unchanged.
    """

    def cast(t: torch.Tensor) -> torch.Tensor:
        """One tensor in autocast's dtype of its device, or unchanged."""
        is_floating = isinstance(t, torch.Tensor) and t.is_floating_point()
        if not is_floating or t.dtype == torch.float64 or not torch.is_autocast_enabled(t.device.type):
            return t
        return t.to(torch.get_autocast_dtype(t.device.type))

    return tuple(map(cast, tensors))
