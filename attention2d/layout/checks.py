"""What does not fit, each in one sentence with its numbers."""

import math

import torch


def check_grid(ranks: int, rows: int, cols: int, ulysses: int, order: str, transpose: bool) -> None:
    """ValueError unless `ranks` make such a grid, and the order may be used on it."""
    for name, size in dict(rows=rows, cols=cols, ulysses=ulysses).items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} must be an integer of at least 1")
    product = ulysses * rows * cols
    if product != ranks:
        raise ValueError(
            f"ulysses={ulysses}, rows={rows}, cols={cols} make {product} ranks ({ulysses} * {rows} * {cols} = {product}); "
            f"the group has {ranks}"
        )
    if order == "cyclic" and ulysses > 1:
        raise ValueError(f"cyclic order needs ulysses=1, not {ulysses}: its neighbours' tokens are no cell's")
    if transpose and order != "cyclic":
        raise ValueError(f"transpose=True is of the cyclic order, not of {order}")


def check_heads(heads: int, kv_heads: int, ulysses: int = 1) -> None:
    """ValueError unless key/value heads serve equally many query heads, and both divide over the ranks that share them."""
    if heads < 1 or kv_heads < 1:
        raise ValueError(f"heads={heads} and kv_heads={kv_heads} must be at least 1")
    if heads % kv_heads:
        left = f"{heads} % {kv_heads} = {heads % kv_heads}"
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} key/value heads ({left})")
    for name, count in dict(query=heads, **{"key/value": kv_heads}).items():
        if count % ulysses:
            left = f"{count} % {ulysses} = {count % ulysses}"
            raise ValueError(f"{count} {name} heads do not divide over ulysses={ulysses} ranks ({left})")


def check_tensors(q, k, v, same_length=True) -> None:
    """ValueError unless q, k and v are (batch, seq, heads, head_dim) and belong together; none may be empty."""
    for name, t in dict(q=q, k=k, v=v).items():
        if t.dim() != 4:
            raise ValueError(f"{name} must be (batch, seq, heads, head_dim), and has shape {tuple(t.shape)}")
        if not t.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating point, and is {t.dtype}")
        if (t.dtype, t.device) != (q.dtype, q.device):
            raise ValueError(f"q is {q.dtype} on {q.device}, and {name} {t.dtype} on {t.device}: they must be alike")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: they must be equal")
    for dim, name in ((0, "sequences"), (1, "local tokens"), (3, "numbers per head")):
        if q.shape[dim] != k.shape[dim] and (dim != 1 or same_length):
            raise ValueError(f"q has {q.shape[dim]} {name}, and k {k.shape[dim]}: they must be equal")
    if not q.numel() or (same_length and not k.numel()):
        raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: no size may be 0")


def check_options(causal, scale) -> None:
    """Of every call."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal={causal!r} must be True or False")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be positive and finite")


def refuse(**features) -> None:
    """ValueError that names the first feature that is asked for: whose value is not None, False or 0."""
    for name, value in features.items():
        if value is None or (isinstance(value, (bool, int, float)) and not value):
            continue
        shown = f"={value}" if isinstance(value, (bool, int, float, str, tuple)) else ""
        raise ValueError(f"{name}{shown} is not supported by attention2d")


def autocast(*tensors):
    """What torch's attention would be given under autocast, if there is one."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)
