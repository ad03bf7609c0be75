"""How our operators call the CUDA kernels of other packages, on the CPU. Oracle: the reference implementations.

Each kernel is replaced by a stand-in with its signature, which asserts the dtypes and layouts that the kernel's source
requires and computes by a reference implementation. test_cuda_optional_imports.py runs the real kernels on a GPU.
"""

import sys

import pytest
import torch
import torch.nn.functional as F

from cases import oracle
from commfabric.native.library import Library
from megatron_ssm import generate, load
from megatron_ssm.kernels import convolution, cuda_kernels, cuda_scans, kernels
from megatron_ssm.kernels.convolution import causal_conv_ref
from megatron_ssm.kernels.gated_delta import gated_delta, gated_delta_ref, supports_gated_delta
from megatron_ssm.kernels.optional_imports import OptionalImport
from megatron_ssm.kernels.scan import selective_scan_ref, ssd_ref
from scans import KINDS, PREVIOUS, SEQUENCES, delta_inputs, error, everything, in_pieces, inputs_of

__all__ = ["oracle"]
SEVERAL = {"selective": "selective_scan_fn", "ssd": "mamba_chunk_scan_combined", "conv": "causal_conv1d_fn"}
ONE = {"selective": "selective_state_update", "ssd": "selective_state_update", "conv": "causal_conv1d_update"}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # relative: a few rounding errors
kinds = pytest.mark.parametrize("kind", KINDS)


# The stand-ins


def same_dtype(*tensors, dtype=None):
    """Whether all tensors that are not None have one dtype: `dtype`, or else any that the kernels support."""
    types = {t.dtype for t in tensors if t is not None}
    return len(types) == 1 and types <= ({dtype} if dtype else set(cuda_kernels.TYPES))


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """As selective_scan.cpp: inputs are contiguous as (batch, channels, seq); the last state has no gradient."""
    assert same_dtype(u, delta, B, C, z) and same_dtype(A, D, delta_bias, dtype=torch.float32)
    assert all(t.is_contiguous() for t in (u, delta, B, C, z, D, delta_bias) if t is not None)
    assert A.shape == (u.shape[1], B.shape[1]) and A.shape[1] <= 256 and delta_softplus == (delta_bias is not None)
    assert return_last_state
    u, delta, B, C, z = (t if t is None else t.transpose(1, 2) for t in (u, delta, B, C, z))
    y, last = selective_scan_ref(u, delta, torch.log(-A), B, C, D, z, delta_bias)
    return y.transpose(1, 2), last.detach().transpose(1, 2)


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """As selective_state_update.py: no gradients, any strides; overwrites the state and requires dt_bias."""
    assert not torch.is_grad_enabled() and same_dtype(state, A, D, dt_bias, dtype=torch.float32)
    assert dt.shape == x.shape == state.shape[:-1] and A.shape == state.shape[1:] and D.shape == dt_bias.shape
    assert dt_bias.shape == x.shape[1:] and B.shape == C.shape
    if state.ndim == 3:
        args = [t if t is None else t.unsqueeze(1) for t in (x, dt, B, C, z)]
        bias = dt_bias if dt_softplus else None
        assert dt_softplus or not dt_bias.any()
        y, after = selective_scan_ref(*args[:2], torch.log(-A), *args[2:4], D, args[4], bias, state.transpose(1, 2))
        state.copy_(after.transpose(1, 2))
    else:
        assert not dt_softplus and z is None and not dt_bias.any()
        assert dt.stride(-1) == dt_bias.stride(-1) == A.stride(-1) == A.stride(-2) == 0  # what it calls TIE_HDIM
        args = [t.unsqueeze(1) for t in (x, dt[..., 0], B, C)]
        y, after = ssd_ref(*args[:2], torch.log(-A[:, 0, 0]), *args[2:], D[:, 0], state.transpose(2, 3))
        state.copy_(after.transpose(2, 3))
    return y.squeeze(1).to(x.dtype)


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, *, initial_states=None, return_final_states=False):
    """As ssd_combined.py: x, B and C have one dtype; states are (batch, heads, head_dim, N) and differentiable."""
    assert same_dtype(x, B, C) and same_dtype(dt, A, D, initial_states, dtype=torch.float32) and chunk_size == 256
    assert return_final_states and x.shape[2] % B.shape[2] == 0
    state = initial_states if initial_states is None else initial_states.transpose(2, 3)
    y, last = ssd_ref(x, dt, torch.log(-A), B, C, D, state)
    return ChecksGradient.apply(y, offsets_fit), last.transpose(2, 3)


def allows_vector_loads(tensor):
    """Whether a tensor (batch, channels, seq) is channel-last, as causal_conv1d.cpp says, and aligned for vector loads."""
    rows, channel, row = tensor.stride()
    return channel == 1 < row and row % 8 == rows % 8 == 0 and tensor.data_ptr() % 16 == 0


def offsets_fit(tensor):
    """Whether the offset of the last element is at most the largest that a kernel can use."""
    ends = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return sum(ends) <= cuda_kernels.LARGEST_OFFSET


class ChecksGradient(torch.autograd.Function):
    """The identity, whose backward asserts the kernel's conditions on the gradient."""

    @staticmethod
    def forward(ctx, y, *conditions):
        ctx.conditions = conditions
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        assert all(condition(gradient) for condition in ctx.conditions)
        return gradient, *(None for _ in ctx.conditions)


def causal_conv1d_fn(x, weight, bias=None, *, initial_states=None, activation=None):
    """As causal_conv1d.cpp: inputs allow vector loads along channels; the kernel has 2 to 4 taps."""
    assert allows_vector_loads(x) and x.shape[1] % 8 == 0 and weight.shape[1] in (2, 3, 4) and activation == "silu"
    assert same_dtype(x, initial_states) and same_dtype(weight, bias) and (bias is None or bias.stride(0) == 1)
    assert initial_states is None or allows_vector_loads(initial_states) and not torch.is_grad_enabled()
    history = None if initial_states is None else initial_states.transpose(1, 2)
    y, _ = causal_conv_ref(x.transpose(1, 2), weight.unsqueeze(1), bias, history)
    return ChecksGradient.apply(y.contiguous().transpose(1, 2), allows_vector_loads, offsets_fit)


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
    """As causal_conv1d_update.cu: no gradients, any strides; overwrites the state."""
    assert (
        not torch.is_grad_enabled() and same_dtype(x, conv_state) and same_dtype(weight, bias) and activation == "silu"
    )
    assert conv_state.shape == (*x.shape, weight.shape[1] - 1) and weight.shape[1] in (2, 3, 4)
    y, after = causal_conv_ref(x.unsqueeze(1), weight.unsqueeze(1), bias, conv_state.transpose(1, 2))
    conv_state.copy_(after.transpose(1, 2))
    return y.squeeze(1)


def chunk_gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):
    """As fla/ops/gated_delta_rule/chunk.py: q, k and v have one dtype; the states are (batch, heads, K, V)."""
    assert same_dtype(q, k, v) and same_dtype(g, beta, initial_state, dtype=torch.float32)
    assert output_final_state and use_qk_l2norm_in_kernel and k.shape[3] <= 256
    return gated_delta_ref(q, k, v, g, beta, initial_state)


def fused_recurrent_gated_delta_rule(*args, **kwargs):
    """As fused_recurrent.py, which has no gradient of g."""
    assert not torch.is_grad_enabled()
    return chunk_gated_delta_rule(*args, **kwargs)


STAND_INS = [
    selective_scan_fn, selective_state_update, mamba_chunk_scan_combined, causal_conv1d_fn, causal_conv1d_update,
    chunk_gated_delta_rule, fused_recurrent_gated_delta_rule,
]  # fmt: skip


@pytest.fixture
def called(monkeypatch):
    """The names of the kernels that were called. CPU tensors are treated like CUDA tensors, and TF32 is allowed."""
    names = []

    def load_stand_in(name):
        stand_in = next(function for function in STAND_INS if function.__name__ == name)

        def call(*args, **kwargs):
            names.append(name)
            assert all(offsets_fit(t) for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
            return stand_in(*args, **kwargs)

        return OptionalImport("stand-in", call)

    monkeypatch.setattr(kernels, "LIBRARY", Library("megatron_ssm", {}, "/nonexistent"))
    monkeypatch.setattr(cuda_kernels, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(cuda_kernels, "load_kernel", load_stand_in)
    monkeypatch.setattr(cuda_kernels, "may_use_tf32", lambda: True)
    return names


# Results


def inputs_for(kind, **sizes):
    """Inputs in float32, with 16 channels, as the convolution's kernel needs a multiple of 8."""
    return inputs_of(kind, **{"dtype": torch.float32, "channels": 16, "seq": 21, **sizes})


def reference_results(kind, inputs):
    """The outputs and gradients of the reference implementation in float64."""
    inputs = {n: t if t is None else t.detach().double().requires_grad_() for n, t in inputs.items()}
    with torch.enable_grad():
        return everything(KINDS[kind][1], inputs)


def check(ours, theirs, dtype=torch.float32):
    """Assert that each tensor is close to the reference's."""
    __tracebackhide__ = True
    errors = {name: error(tensor.double(), theirs[name]) for name, tensor in ours.items()}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


def detached(inputs):
    return {name: t if t is None else t.detach() for name, t in inputs.items()}


WITHOUT = [("conv", ()), ("conv", ("history",)), ("conv", ("bias",)), ("ssd", ()), ("ssd", ("state",)),
           ("selective", ("state",)), ("selective", ("state", "z")), ("selective", ("state", "dt_bias"))]  # fmt: skip


@pytest.mark.parametrize("kind, absent", WITHOUT)
@pytest.mark.parametrize("seq", (2, 21))
def test_outputs_and_gradients(called, kind, absent, seq):
    """Gradients flow through the final state and reach the initial state too."""
    inputs = inputs_for(kind, seq=seq) | dict.fromkeys(absent)
    if "dt_bias" in absent:
        inputs["dt"] = inputs["dt"].detach().abs().requires_grad_()
    check(everything(KINDS[kind][0], inputs), reference_results(kind, inputs))
    assert called == [SEVERAL[kind]]


@pytest.mark.parametrize("heads, groups", [(4, 1), (4, 4), (6, 3)])
def test_groups(called, heads, groups):
    inputs = inputs_for("ssd", heads=heads, groups=groups, channels=5, size=3)
    check(everything(KINDS["ssd"][0], inputs), reference_results("ssd", inputs))
    with torch.no_grad():
        whole = in_pieces("ssd", detached(inputs), range(18, 21))
    check(dict(zip(("y", "carried"), whole, strict=True)), reference_results("ssd", inputs))
    assert called == ["mamba_chunk_scan_combined"] * 2 + ["selective_state_update"] * 3


def test_the_final_state_alone_has_gradients(called):
    """A discarded final state costs nothing, because y's graph contains no node for it."""
    inputs = inputs_for("selective") | {"state": None}
    wanted = [name for name in inputs if name not in ("state", "D", "z")]
    y, ours = KINDS["selective"][0](**inputs)
    _, plain = KINDS["selective"][1](**inputs)
    for tensors in (ours, plain):
        assert tensors.requires_grad
    given = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0))
    gradients = [torch.autograd.grad(t, [inputs[n] for n in wanted], given, allow_unused=True) for t in (ours, plain)]
    for name, mine, theirs in zip(wanted, *gradients, strict=True):
        assert (mine is None or not mine.any()) if theirs is None else error(mine, theirs) <= 1e-5, name
    assert "_FinalStateGradient" in ours.grad_fn.name() and "_FinalStateGradient" not in y.grad_fn.name()


CUTS = [(), (1,), (16,), (1, 2, 3), (2, 3, 20), (4, 5, 6, 18)]


@kinds
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("dtype", cuda_kernels.TYPES, ids=str)
@torch.no_grad()
def test_pieces(called, kind, cuts, dtype):
    """Chunked prefill and decoding, which continue from a given state."""
    inputs = detached(inputs_for(kind, dtype=dtype))
    inputs = {name: t.to(dtype) if kind == "conv" else t for name, t in inputs.items()}
    y, carried = in_pieces(kind, inputs, cuts)
    lengths = [stop - start for start, stop in zip((0, *cuts), (*cuts, 21), strict=True)]
    assert called == [ONE[kind] if length == 1 else SEVERAL[kind] for length in lengths]
    assert y.dtype is dtype and carried.dtype is (dtype if kind == "conv" else torch.float32)
    check(dict(y=y), reference_results(kind, inputs), dtype)
    check(dict(carried=carried), reference_results(kind, inputs))


@torch.no_grad()
def test_a_state_is_carried_through_many_tokens(called):
    inputs = detached(inputs_for("selective", seq=150, size=16))
    inputs["A_log"] -= 5  # slow enough to matter after 150 tokens
    y, carried = KINDS["selective"][0](**inputs)
    check(dict(y=y, carried=carried), reference_results("selective", inputs))
    without = KINDS["selective"][0](**inputs | {"state": None})
    assert error(without[0][:, 140:], y[:, 140:]) > 1e-2
    zeros = KINDS["selective"][0](**inputs | {"state": torch.zeros_like(inputs["state"])})
    assert torch.equal(zeros[0], without[0]) and torch.equal(zeros[1], without[1])


@kinds
@pytest.mark.parametrize("overwrite", (False, True))
@torch.no_grad()
def test_one_token_on_a_view_of_a_cache(called, kind, overwrite):
    """The state is every second row and one half of the last dimension, like the state of one of Zamba's heads."""
    inputs = detached(inputs_for(kind, seq=1, channels=9))
    given = inputs[PREVIOUS[kind]]
    cache = torch.full((4, *given.shape[1:-1], 18), float("nan"))
    rows = cache[1::2, ..., 9:]
    rows.copy_(given)
    y, carried = KINDS[kind][0](**inputs | {PREVIOUS[kind]: rows}, overwrite=overwrite)
    check(dict(y=y, carried=carried), reference_results(kind, inputs))
    assert (carried.data_ptr() == rows.data_ptr()) == overwrite
    assert torch.equal(rows, carried if overwrite else given)
    assert cache[::2].isnan().all() and cache[..., :9].isnan().all() and called == [ONE[kind]]


@kinds
@torch.no_grad()
def test_one_token_of_a_new_sequence(called, kind):
    inputs = detached(inputs_for(kind, seq=1)) | {PREVIOUS[kind]: None}
    y, carried = KINDS[kind][0](**inputs, overwrite=True)
    check(dict(y=y, carried=carried), reference_results(kind, inputs))
    assert called == [ONE[kind]]


@torch.no_grad()
def test_the_next_history_is_a_copy(called):
    """Overwriting it later does not change the inputs."""
    inputs = detached(inputs_for("conv"))
    kept = inputs["x"].clone()
    _, history = KINDS["conv"][0](**inputs)
    history.zero_()
    assert torch.equal(inputs["x"], kept)


@kinds
@pytest.mark.parametrize("batch, seq, before, between", [(1, 2, 0, 8), (1, 5, 3, 2), (2, 3, 8, 8), (2, 3, 1, 1)])
def test_views_of_wider_tensors(called, kind, batch, seq, before, between):
    """Inputs and gradients are slices, as of in_proj's output; some are not aligned as the convolution needs them."""
    inputs = inputs_for(kind, batch=batch, seq=seq) | ({"state": None} if kind == "selective" else {})
    expected = reference_results(kind, inputs)

    def call(**inputs):
        wide = {
            name: F.pad(t.flatten(2), (before, between), value=float("nan"))[..., before : before + t[0, 0].numel()]
            for name, t in inputs.items()
            if name in set(SEQUENCES[kind]) - ({"dt"} if kind == "ssd" else set()) and t is not None
        }
        y, carried = KINDS[kind][0](**inputs | {n: t.unflatten(-1, inputs[n].shape[2:]) for n, t in wide.items()})
        return F.pad(y.flatten(2), (before, between))[..., before : before + y[0, 0].numel()].view_as(y), carried

    check(everything(call, inputs), expected)
    assert called == [SEVERAL[kind]]


@pytest.mark.parametrize("shape", [(1, 5), (5, 1)])
def test_strides_of_dimensions_of_size_one(shape):
    """torch ignores these strides when it calls a tensor contiguous; the kernel reads them."""
    tensor = torch.randn(*shape, 16).as_strided((*shape, 16), (3, 16, 1) if shape[0] == 1 else (16, 3, 1))
    assert tensor.is_contiguous() and not allows_vector_loads(tensor.transpose(1, 2))
    vectors = convolution._in_vectors(tensor)
    assert allows_vector_loads(vectors.transpose(1, 2)) and torch.equal(vectors, tensor)
    assert convolution._in_vectors(vectors) is vectors


@pytest.mark.parametrize("before, between", [(1, 7), (3, 2), (8, 0)])
def test_misaligned_tensors_are_copied(called, before, between):
    """Inputs and the gradient of the output are copied if their address or strides do not allow vector loads."""
    wide = torch.randn(2, 5, before + 16 + between)
    part = wide[..., before : before + 16]
    aligned = before % 8 == 0 and between % 8 == 0
    assert allows_vector_loads(part.transpose(1, 2)) == aligned == (convolution._in_vectors(part) is part)
    inputs = inputs_for("conv", seq=5) | {"history": None}  # with a history, the gradient would be copied before
    y, _ = KINDS["conv"][0](**inputs)
    plain, _ = KINDS["conv"][1](**inputs)
    ours, theirs = (torch.autograd.grad(t, inputs["x"], part)[0] for t in (y, plain))
    assert error(ours, theirs) <= 1e-5


def test_mixed_dtypes_under_autocast(called):
    """Under autocast the convolution returns float32, but matrix products return bfloat16."""
    for kind, narrow in (("selective", ("dt", "B", "C", "z")), ("ssd", ("x", "C"))):
        inputs = inputs_for(kind) | ({"state": None} if kind == "selective" else {})
        inputs |= {name: inputs[name].detach().bfloat16().requires_grad_() for name in narrow}
        results = everything(KINDS[kind][0], inputs, autocast=True)
        assert [results[name].dtype for name in ("y", "carried")] == [inputs["x"].dtype, torch.float32]
        for name, tensor in results.items():
            limit = TOLERANCE[tensor.dtype] if "x" not in narrow else TOLERANCE[torch.bfloat16]
            assert error(tensor.double(), reference_results(kind, inputs)[name]) <= limit, name
    assert called == ["selective_scan_fn", "mamba_chunk_scan_combined"]


# Offsets

# How many elements of a row the limit on offsets counts. conv: x after its history. selective: two numbers per element
# of a chunk's state. ssd: the products of all pairs of tokens of a chunk, in each of 2 groups.
ROW_SIZE = {"conv": (21 + 3) * 16, "selective": 2 * 256 * 16, "ssd": 2 * 256 * 256}


def inputs_of_rows(kind, **changes):
    """Inputs of five sequences of 21 tokens; the selective scan has the largest states that its kernel takes."""
    sizes = {"batch": 5, **({"size": 256} if kind == "selective" else {}), **changes}
    inputs = inputs_for(kind, **sizes)
    return inputs | ({"state": None} if kind == "selective" else {})


@kinds
@pytest.mark.parametrize("rows, calls", [(1, 5), (2, 3), (4, 2), (5, 1)])
def test_batches_are_split_so_that_offsets_fit(called, monkeypatch, kind, rows, calls):
    """Outputs, final states and gradients are those of the whole batch; the number of calls is the smallest possible."""
    inputs = inputs_of_rows(kind)
    monkeypatch.setattr(cuda_kernels, "LARGEST_OFFSET", rows * ROW_SIZE[kind] - 1)
    check(everything(KINDS[kind][0], inputs), reference_results(kind, inputs))
    assert called == [SEVERAL[kind]] * calls


@kinds
@torch.no_grad()
def test_a_row_that_does_not_fit_is_left_to_torch(called, monkeypatch, kind):
    inputs = detached(inputs_of_rows(kind))
    monkeypatch.setattr(cuda_kernels, "LARGEST_OFFSET", ROW_SIZE[kind] - 2)
    y, carried = KINDS[kind][0](**inputs)
    check(dict(y=y, carried=carried), reference_results(kind, inputs))
    assert not called


STRIDES = [(5, 21, 5, 1), (5, 21, 4, 2), (1, 21, 1, 1), (1, 21, 0, 0), (5, 1, 5, 1), (5, 1, 4, 0)]


@kinds
@pytest.mark.parametrize("batch, seq, rows, calls", STRIDES)
@torch.no_grad()
def test_strides_count_in_offsets(called, monkeypatch, kind, batch, seq, rows, calls):
    """x is a slice of a wider tensor, so `rows` rows fit and no more. A batch of single tokens is never split."""
    inputs = detached(inputs_for(kind, batch=batch, seq=seq))
    x, width = inputs["x"], 2**16
    inputs["x"] = torch.empty(batch, seq, width)[..., : x[0, 0].numel()].unflatten(-1, x.shape[2:]).copy_(x)
    monkeypatch.setattr(cuda_kernels, "LARGEST_OFFSET", ((rows + 1) * seq - 1) * width + x[0, 0].numel() - 2)
    y, carried = KINDS[kind][0](**inputs)
    check(dict(y=y, carried=carried), reference_results(kind, inputs))
    assert called == [(ONE if seq == 1 else SEVERAL)[kind]] * calls


@pytest.mark.parametrize("kind", ("conv", "ssd"))
def test_a_gradient_whose_offsets_do_not_fit_is_copied(called, monkeypatch, kind):
    """The offsets of x fit, but the gradient of the output is a slice of a wider tensor."""
    inputs = inputs_for(kind) | {PREVIOUS[kind]: None}
    monkeypatch.setattr(cuda_kernels, "LARGEST_OFFSET", 2 * ROW_SIZE[kind] - 1)
    x = inputs["x"]
    given = torch.randn(2, 21, ROW_SIZE[kind] // 8)[..., : x[0, 0].numel()].unflatten(-1, x.shape[2:])
    assert not offsets_fit(given)
    ours, theirs = (torch.autograd.grad(form(**inputs)[0], x, given)[0] for form in KINDS[kind])
    assert error(ours, theirs) <= 1e-5 and called == [SEVERAL[kind]]


@pytest.mark.parametrize("budget", (1, 256, 2 * 256, 3 * 256, 7 * 3 * 256, 2**26))
@torch.no_grad()
def test_a_carried_state_takes_no_more_memory_than_its_budget(called, monkeypatch, budget):
    """Budgets below one of the 3 states of 16 x 16 numbers, of one, two and all 3, of 7 tokens, and of all tokens."""
    inputs = detached(inputs_for("selective", batch=3, size=16))
    largest, matmul = [], torch.matmul

    def recording_matmul(read, kept):
        largest.append(kept.numel())
        return matmul(read, kept)

    theirs = reference_results("selective", inputs)
    monkeypatch.setattr(cuda_scans, "RESPONSE_BUDGET", budget)
    monkeypatch.setattr(torch, "matmul", recording_matmul)
    y, carried = KINDS["selective"][0](**inputs)
    monkeypatch.undo()
    check(dict(y=y, carried=carried), theirs)
    assert called == ["selective_scan_fn"]
    assert max(largest) == min(max(budget, 256), 21 * 3 * 256)


# Inputs that are left to torch

LEFT_TO_TORCH = {
    "float64": [(kind, dict(dtype=torch.float64), False) for kind in KINDS],
    "one token with gradients": [(kind, dict(seq=1), True) for kind in KINDS],
    "a state with gradients": [("selective", {}, True)],
    "a large state": [("selective", dict(size=257), False)],
    "taps": [("conv", dict(kernel=taps), False) for taps in (1, 5)],
    "channels": [("conv", dict(channels=channels), grad) for channels in (1, 12) for grad in (False, True)],
}


@pytest.mark.parametrize("kind, sizes, grad", [case for cases in LEFT_TO_TORCH.values() for case in cases])
def test_left_to_torch(called, kind, sizes, grad):
    inputs = inputs_for(kind, **sizes)
    with torch.set_grad_enabled(grad):
        y, carried = KINDS[kind][0](**inputs)
    check(dict(y=y, carried=carried), reference_results(kind, inputs))
    assert not called


@torch.no_grad()
def test_bias_of_another_type_and_odd_channels_of_one_token(called):
    inputs = detached(inputs_for("conv"))
    KINDS["conv"][0](**inputs | {"bias": inputs["bias"].double()})
    assert not called
    one = detached(inputs_for("conv", seq=1, channels=13))
    check(dict(y=KINDS["conv"][0](**one)[0]), reference_results("conv", one))
    assert called == ["causal_conv1d_update"]


@pytest.mark.parametrize("state", (False, True), ids=("from zeros", "continued"))
def test_gated_delta_rule(called, state):
    """Several tokens, with gradients of the states; a token; and tokens one by one, as speculation needs them."""
    inputs = delta_inputs(seq=21, dtype=torch.float32, state=state)
    wide = {n: t if t is None else t.detach().double().requires_grad_() for n, t in inputs.items()}
    check(everything(gated_delta, inputs), everything(gated_delta_ref, wide))
    narrow = {n: t if t is None or n in ("g", "beta", "state") else t.bfloat16() for n, t in detached(inputs).items()}
    with torch.no_grad():
        check(dict(y=gated_delta(**narrow, one_by_one=True)[0]), dict(y=gated_delta_ref(**wide)[0]), torch.bfloat16)
        gated_delta(**{n: t if t is None or n == "state" else t[:, :1] for n, t in narrow.items()})
    assert called == ["chunk_gated_delta_rule"] + 2 * ["fused_recurrent_gated_delta_rule"]


@torch.no_grad()
def test_tf32_only_where_torch_allows_it(called, monkeypatch):
    """A single token needs no matrix products, TF32 represents bfloat16 exactly, and autocast permits lower precision."""
    monkeypatch.undo()
    assert cuda_kernels.may_use_tf32() is False
    ssd, delta = detached(inputs_for("ssd")), detached(delta_inputs(seq=21, dtype=torch.float32, state=True))
    monkeypatch.setattr(cuda_kernels, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(cuda_kernels, "load_kernel", lambda name: OptionalImport("stand-in", mamba_chunk_scan_combined))

    def supported(dtype=None):
        narrow = [inputs | {n: inputs[n].to(dtype) for n in names} for inputs, names in ((ssd, "xBC"), (delta, "qkv"))]
        return cuda_scans.supports_ssd(**narrow[0]), supports_gated_delta(**narrow[1], one_by_one=False)

    assert supported() == (False, False) and supported(torch.bfloat16) == (True, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert supported() == (True, True)
    assert cuda_scans.supports_ssd(**{n: t[:, :1] if n in SEQUENCES["ssd"] else t for n, t in ssd.items()})
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert cuda_kernels.may_use_tf32() is True and supported() == (True, True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@kinds
def test_cpu_tensors_load_no_package(kind, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "load_kernel", lambda name: pytest.fail(name))
    everything(KINDS[kind][0], inputs_of(kind))


# Models


@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups", "zamba-2-heads-biases"))
def test_models(called, name, oracle, monkeypatch):
    """Chunked prefill, decoding and gradients of whole models are those of our operators in torch."""
    directory, ids = oracle(name).directory, oracle(name).ids
    results = []
    for stand_ins in (True, False):
        monkeypatch.setattr(cuda_kernels, "on_cuda", lambda tensor, stand_ins=stand_ins: stand_ins)
        model = load(directory)
        model.requires_grad_(True)
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        with torch.no_grad():
            cache = model.new_cache(len(ids))
            pieces = [model(part, cache=cache) for part in ids.split([40, 1, ids.shape[1] - 41], dim=1)]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((torch.cat(pieces, 1), generate(model, ids[:, :5], max_new_tokens=20), gradients))
        used = set(called)
    ours, theirs = results
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=oracle(name).tolerance)
    assert torch.equal(ours[1], theirs[1]) and ours[2].keys() == theirs[2].keys()
    assert max(error(ours[2][name], theirs[2][name]) for name in theirs[2]) <= 1e-4
    kind = "ssd" if "mamba2" in name else "selective"
    assert {SEVERAL[kind], ONE[kind]} <= used


@torch.no_grad()
def test_a_first_prompt_carries_no_state(called, oracle, monkeypatch):
    """A new cache is known to be zero without waiting for the GPU. The next chunk carries the state."""
    carried, response = [], cuda_scans._response
    monkeypatch.setattr(cuda_scans, "_response", lambda *given: (carried.append(1), response(*given))[1])
    model = load(oracle("mamba").directory)
    cache = model.new_cache(2)
    model(oracle("mamba").ids[:2, :9], cache=cache)
    assert not carried and set(called) >= {SEVERAL["selective"]}
    model(oracle("mamba").ids[:2, 9:15], cache=cache)
    assert len(carried) == len(model.layers)


# Packages that are missing or broken

BROKEN = "raise ImportError('undefined symbol:\\n_ZN3c105ErrorC2E')\n"
WITHOUT_CUDA = "selective_scan_cuda = None\ndef selective_scan_fn(): pass\n"
CASES = [
    ({}, "mamba-ssm is not installed"),
    ({"mamba_ssm/__init__.py": BROKEN},
     "mamba-ssm cannot be used (ImportError: undefined symbol: _ZN3c105ErrorC2E)"),
    ({"mamba_ssm/__init__.py": "import einops_that_is_not_there\n"},
     "mamba-ssm cannot be used (ModuleNotFoundError: No module named 'einops_that_is_not_there')"),
    ({"mamba_ssm/__init__.py": "1 / 0\n"}, "mamba-ssm cannot be used (ZeroDivisionError: division by zero)"),
    ({"mamba_ssm/__init__.py": "", "mamba_ssm/ops/selective_scan_interface.py": WITHOUT_CUDA},
     "mamba-ssm cannot be used (ImportError: it was built without selective_scan_cuda)"),
]  # fmt: skip


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A folder on sys.path for fake packages; none of the real ones is imported or has been looked for."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("mamba_ssm", "causal_conv1d")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    cuda_kernels.load_kernel.cache_clear()
    yield tmp_path
    cuda_kernels.load_kernel.cache_clear()
    for name in [n for n in sys.modules if n.split(".")[0] in ("mamba_ssm", "causal_conv1d")]:
        del sys.modules[name]


def write(folder, files):
    """Write {path: text} below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("files, why", CASES, ids=range(len(CASES)))
@torch.no_grad()
def test_torch_replaces_a_missing_or_broken_package(fresh, monkeypatch, files, why):
    """The first CUDA tensor imports the package; a failure is stored with its reason and not tried again."""
    write(fresh, files)
    monkeypatch.setattr(kernels, "LIBRARY", Library("megatron_ssm", {}, "/nonexistent"))
    monkeypatch.setattr(cuda_kernels, "on_cuda", lambda tensor: True)
    inputs = detached(inputs_for("selective"))
    y, carried = KINDS["selective"][0](**inputs)
    check(dict(y=y, carried=carried), reference_results("selective", inputs))
    assert cuda_kernels.load_kernel("selective_scan_fn") == OptionalImport("mamba-ssm", None, why)
    assert cuda_kernels.load_kernel("selective_scan_fn") is cuda_kernels.load_kernel("selective_scan_fn")


def test_an_installed_package_is_used(fresh):
    write(
        fresh,
        {"causal_conv1d.py": "def causal_conv1d_fn(): return 'fn'\ndef causal_conv1d_update(): return 'update'\n"},
    )
    assert cuda_kernels.load_kernel("causal_conv1d_fn").item() == "fn"
    assert cuda_kernels.load_kernel("causal_conv1d_update").item() == "update"
