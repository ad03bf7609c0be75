"""Inputs, outputs and gradients of the scans and of the convolution, for the tests that compare their implementations."""

import torch

from megatron_ssm.kernels.convolution import causal_conv, causal_conv_ref
from megatron_ssm.kernels.scan import selective_scan, selective_scan_ref, ssd, ssd_ref

KINDS = {  # name: (the fast implementation, the plain one)
    "selective": (selective_scan, selective_scan_ref),
    "ssd": (ssd, ssd_ref),
    "conv": (causal_conv, causal_conv_ref),
}
SEQUENCES = {"selective": ("x", "dt", "B", "C", "z"), "ssd": ("x", "dt", "B", "C"), "conv": ("x",)}  # cut in time
PREVIOUS = {"selective": "state", "ssd": "state", "conv": "history"}


def inputs_of(kind, batch=2, seq=5, dtype=torch.float64, channels=3, heads=4, groups=2, size=4, kernel=4, seed=0):
    """{argument: random tensor} for one of KINDS; the tensors are leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    wide = torch.promote_types(dtype, torch.float32)  # the dtype of dt, A, D and of states in a model of `dtype`
    if kind == "conv":
        inputs = dict(
            x=normal(batch, seq, channels),
            weight=normal(channels, 1, kernel),
            bias=normal(channels),
            history=normal(batch, kernel - 1, channels),
        )
    elif kind == "selective":
        inputs = dict(
            x=normal(batch, seq, channels),
            dt=normal(batch, seq, channels),
            A_log=normal(channels, size, dtype=wide),
            B=normal(batch, seq, size),
            C=normal(batch, seq, size),
            D=normal(channels, dtype=wide),
            z=normal(batch, seq, channels),
            dt_bias=normal(channels, dtype=wide),
            state=normal(batch, size, channels, dtype=wide),
        )
    else:
        inputs = dict(
            x=normal(batch, seq, heads, channels),
            dt=normal(batch, seq, heads, dtype=wide).exp() / 4,
            A_log=normal(heads, dtype=wide),
            B=normal(batch, seq, groups, size),
            C=normal(batch, seq, groups, size),
            D=normal(heads, dtype=wide),
            state=normal(batch, heads, size, channels, dtype=wide),
        )
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def delta_inputs(
    batch=2, seq=70, keys=2, values=6, size=8, width=12, dtype=torch.float64, max_beta=1.0, seed=0, state=True
):
    """{argument: tensor} of `gated_delta`, of heads that remember.

    exp(g) is between 0.95 and 0.9999, keys are repeated, and rates are large.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k = normal(batch, seq, keys, size)
    k[:, 1::3] = k[:, ::3][:, : k[:, 1::3].shape[1]]  # every third key is that of the token before it
    decay = 0.95 + 0.0499 * torch.rand(batch, seq, values, generator=generator, dtype=torch.float64)
    inputs = dict(
        q=normal(batch, seq, keys, size), k=k, v=normal(batch, seq, values, width), g=decay.log(),
        beta=max_beta * torch.sigmoid(2 + normal(batch, seq, values)), state=normal(batch, values, size, width),
    )  # fmt: skip
    wide = torch.promote_types(dtype, torch.float32)
    return dict(state=None) | {
        name: t.to(wide if name in ("g", "beta", "state") else dtype).requires_grad_()
        for name, t in inputs.items()
        if state or name != "state"
    }


def everything(function, inputs, autocast=False):
    """{name: tensor}: the output, the state that is carried on, and the gradient of every input through both of them."""
    generator = torch.Generator().manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, carried = function(**inputs)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in (y, carried)]
    loss = (y * weights[0]).sum() + (carried * weights[1]).sum()
    wanted = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    return dict(y=y, carried=carried, **dict(zip(wanted, torch.autograd.grad(loss, wanted.values()), strict=True)))


def error(ours, theirs):
    """||ours - theirs|| / ||theirs||, or ||ours - theirs|| where theirs is zero; they must have equal shapes and dtypes."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    scale = theirs.double().norm()
    return ((ours.double() - theirs.double()).norm() / (scale if scale > 1e-8 else 1)).item()


def worst(ours, theirs):
    """The largest error over a dictionary of tensors."""
    assert list(ours) == list(theirs)
    return max(error(ours[name], theirs[name]) for name in theirs)


def in_pieces(kind, inputs, cuts):
    """The function called on consecutive pieces of the sequence, each continuing from the one before."""
    function, previous = KINDS[kind][0], PREVIOUS[kind]
    outputs, carried = [], inputs[previous]
    for start, stop in zip([0, *cuts], [*cuts, inputs["x"].shape[1]], strict=True):
        piece = {name: t[:, start:stop] if name in SEQUENCES[kind] else t for name, t in inputs.items()}
        y, carried = function(**{**piece, previous: carried})
        outputs.append(y)
    return torch.cat(outputs, 1), carried
