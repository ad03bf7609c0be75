"""Checks of a schedule's arguments. Each raises a ValueError of one sentence with the numbers that do not fit."""

import math

import torch


def check_grid(ranks: int, rows: int, cols: int, ulysses: int, order: str, transpose: bool) -> None:
    """ValueError unless the sizes of the grid multiply to `ranks` and the grid supports this token order."""
    for name, size in dict(ulysses=ulysses, rows=rows, cols=cols).items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} must be an integer of at least 1")
    product = ulysses * rows * cols
    if product != ranks:
        raise ValueError(
            f"ulysses={ulysses}, rows={rows}, cols={cols} make {product} ranks ({ulysses} * {rows} * {cols} = {product}); "
            f"the group has {ranks}"
        )
    if order == "cyclic" and ulysses > 1:
        raise ValueError(f"cyclic order needs ulysses=1, not {ulysses}: a cell's tokens would not be in cyclic order")
    if transpose and order != "cyclic":
        raise ValueError(f"transpose=True needs the cyclic order, not {order}")


def check_heads(heads: int, kv_heads: int, ulysses: int = 1) -> None:
    """ValueError unless both counts are at least 1, kv_heads divides heads, and `ulysses` divides both."""
    check_sizes(heads=heads, kv_heads=kv_heads)
    if heads % kv_heads:
        remainder = f"{heads} % {kv_heads} = {heads % kv_heads}"
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} key/value heads ({remainder})")
    for name, count in dict(query=heads, **{"key/value": kv_heads}).items():
        if count % ulysses:
            remainder = f"{count} % {ulysses} = {count % ulysses}"
            raise ValueError(f"{count} {name} heads do not divide over ulysses={ulysses} ranks ({remainder})")


def check_sizes(**sizes: int) -> None:
    """ValueError unless every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, same_length: bool = True) -> None:
    """ValueError unless q, k and v are non-empty tensors (batch, seq, heads, head_dim) whose shapes and dtypes match.

    same_length: q and k must have the same number of local tokens. If False, they may differ, and k and v may be empty.
    """
    for name, t in dict(q=q, k=k, v=v).items():
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, not {type(t).__name__}")
        if t.dim() != 4:
            raise ValueError(f"{name} must be (batch, seq, heads, head_dim), and has shape {tuple(t.shape)}")
        if not t.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating point, and is {t.dtype}")
        if (t.dtype, t.device) != (q.dtype, q.device):
            raise ValueError(f"q is {q.dtype} on {q.device}, and {name} {t.dtype} on {t.device}: they must be equal")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: they must be equal")
    for dim, name in ((0, "sequences"), (1, "local tokens"), (3, "elements per head")):
        if q.shape[dim] != k.shape[dim] and (dim != 1 or same_length):
            raise ValueError(f"q has {q.shape[dim]} {name}, and k {k.shape[dim]}: they must be equal")
    if not q.numel() or (same_length and not k.numel()):
        raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: no size may be 0")


def check_mask_and_scale(causal: bool, scale: float | None) -> None:
    """ValueError unless `causal` is a bool and `scale` is None or a positive finite number."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal={causal!r} must be True or False")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be positive and finite")


def refuse_features(**features: object) -> None:
    """ValueError that names the first feature in use. A feature whose value is None, False or 0 is not in use."""
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
