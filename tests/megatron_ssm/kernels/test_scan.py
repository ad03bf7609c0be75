"""The scans and the convolution. Oracles: token-by-token references with autograd, and finite differences."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ssm.kernels.convolution import causal_conv, causal_conv_ref
from megatron_ssm.kernels.kernels import LIBRARY
from megatron_ssm.kernels.scan import SELECTIVE_CHUNK, SSD_CHUNK
from scans import KINDS, PREVIOUS, error, everything, in_pieces, inputs_of, worst

EXACT = 1e-10  # in float64; most cases agree to 1e-14, but in a gradient of one number large terms may cancel
kinds = pytest.mark.parametrize("kind", KINDS)


# The fast implementation against its reference

CHUNKS = {"selective": SELECTIVE_CHUNK, "ssd": SSD_CHUNK, "conv": 4}
CHUNK_BOUNDARIES = [
    pytest.param(kind, seq, id=f"{kind}-{seq}")
    for kind, chunk in CHUNKS.items()
    for seq in (1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1)
]


@pytest.mark.parametrize("kind, seq", CHUNK_BOUNDARIES)
def test_reference_at_every_chunk_boundary(kind, seq):
    fast, plain = KINDS[kind]
    inputs = inputs_of(kind, seq=seq)
    assert worst(everything(fast, inputs), everything(plain, inputs)) <= EXACT


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, EXACT), (torch.float32, 5e-6), (torch.bfloat16, 1e-2)])
@kinds
def test_dtypes(kind, dtype, tolerance):
    fast, plain = KINDS[kind]
    inputs = inputs_of(kind, seq=70, dtype=dtype)
    ours = everything(fast, inputs)
    assert worst(ours, everything(plain, inputs)) <= tolerance
    assert ours["y"].dtype == dtype
    if kind != "conv":
        assert ours["carried"].dtype == ours["state"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind, seq", [(kind, seq) for kind in KINDS for seq in (1, 70)])
def test_a_batch_without_rows(kind, seq, dtype):
    fast, plain = KINDS[kind]
    inputs = inputs_of(kind, batch=0, seq=seq, dtype=dtype)
    ours = everything(fast, inputs)
    assert worst(ours, everything(plain, inputs)) == 0
    assert all(
        tensor.shape == inputs[name].shape and not tensor.any() for name, tensor in ours.items() if name in inputs
    )
    with torch.no_grad():
        assert fast(**inputs)[0].shape == inputs["x"].shape


@pytest.mark.parametrize("kind", ("selective", "ssd"))
def test_bf16_inputs_are_summed_in_fp32(kind):
    inputs = inputs_of(kind, seq=200, dtype=torch.bfloat16)
    narrow, wide = KINDS[kind][0](**inputs), KINDS[kind][1](**{name: t.double() for name, t in inputs.items()})
    assert error(narrow[0].double(), wide[0]) <= 2**-8  # the rounding of y
    assert error(narrow[1].double(), wide[1]) <= 1e-6  # the state is not rounded


@pytest.mark.parametrize("kind", ("selective", "ssd"))
def test_autocast_does_not_reach_the_state(kind):
    inputs = inputs_of(kind, seq=70, dtype=torch.float32)
    ours = everything(KINDS[kind][0], inputs, autocast=True)
    assert worst(ours, everything(KINDS[kind][1], inputs)) <= 5e-6


@kinds
def test_no_initial_state_is_a_state_of_zeros(kind):
    """The argument is None at the start of a sequence."""
    inputs = inputs_of(kind, seq=20)
    zeros = torch.zeros_like(inputs.pop(PREVIOUS[kind]))
    for function in KINDS[kind]:
        from_zeros = partial(function, **{PREVIOUS[kind]: zeros})
        assert worst(everything(function, inputs), everything(from_zeros, inputs)) == 0


def test_convolution_without_bias():
    inputs = {**inputs_of("conv"), "bias": None}
    assert worst(everything(causal_conv, inputs), everything(causal_conv_ref, inputs)) <= EXACT


@pytest.mark.parametrize("kind", ("selective", "ssd"))
@pytest.mark.parametrize("steps", (1e-6, 1.0, 1e4))
def test_very_small_and_very_large_steps(kind, steps):
    """A state that hardly decays, or decays to zero at once, gives no overflow, and no 0 * inf in a gradient."""
    inputs = inputs_of(kind, seq=2 * SSD_CHUNK + 1, dtype=torch.float32)
    inputs["dt"] = (inputs["dt"].detach() * steps).requires_grad_()
    ours = everything(KINDS[kind][0], inputs)
    assert all(tensor.isfinite().all() for tensor in ours.values())
    exact = everything(KINDS[kind][1], {name: t.detach().double().requires_grad_() for name, t in inputs.items()})
    assert worst({name: t.double() for name, t in ours.items()}, exact) <= 1e-5


@pytest.mark.parametrize("channels", (3, 64))
def test_a_state_that_overflows(channels):
    """Without dt_bias, steps may be negative. A state that overflows leaves the channel's other states as they are."""
    x, dt, B = torch.full((1, 1, channels), 0.5), torch.full((1, 1, channels), -6.0), torch.ones(1, 1, 2)
    A_log = torch.tensor([1.0, 16.0]).log().expand(channels, 2).contiguous()
    state = torch.ones(1, 2, channels, requires_grad=True)
    inputs = (x, dt, A_log, B, B, torch.ones(channels), None, None, state)
    scan, reference = KINDS["selective"]
    _, after = scan(*inputs)
    _, exact = reference(*(t if t is None else t.double() for t in inputs))
    torch.testing.assert_close(after[:, 0].double(), exact[:, 0], rtol=1e-5, atol=0)
    assert (after[:, 1] > 1e38).all()
    (gradient,) = torch.autograd.grad(after.sum(), state)
    torch.testing.assert_close(gradient[:, 0], torch.full((1, channels), math.exp(6)), rtol=1e-5, atol=0)
    assert (gradient[:, 1] > 1e38).all()
    with torch.no_grad():
        assert torch.equal(scan(*inputs)[1], after)


SHAPES = st.fixed_dictionaries(
    dict(
        batch=st.integers(1, 3),
        seq=st.integers(1, 2 * SSD_CHUNK + 3),
        channels=st.integers(1, 5),
        size=st.integers(1, 6),
        kernel=st.integers(2, 5),
        seed=st.integers(0, 99),
    )
)


def check_shape(kind, shape, groups, repeat):
    """Compare the fast implementation with its reference on inputs of this shape."""
    inputs = inputs_of(kind, heads=groups * repeat, groups=groups, **shape)
    fast, plain = KINDS[kind]
    assert worst(everything(fast, inputs), everything(plain, inputs)) <= EXACT


any_shape = given(shape=SHAPES, groups=st.integers(1, 3), repeat=st.integers(1, 3))
test_any_shape = kinds(settings(max_examples=30, deadline=None)(any_shape(check_shape)))
test_any_shape_often = pytest.mark.full(kinds(settings(max_examples=400, deadline=None)(any_shape(check_shape))))


# One call, or several


def check_pieces(kind, seq, data):
    """Compare random pieces with one call: the outputs, and the gradients through the states between the pieces."""
    cuts = sorted(data.draw(st.sets(st.integers(1, seq - 1), max_size=4)))
    inputs = inputs_of(kind, seq=seq)
    pieces = everything(lambda **inputs: in_pieces(kind, inputs, cuts), inputs)
    assert worst(pieces, everything(KINDS[kind][0], inputs)) <= EXACT


any_pieces = given(seq=st.integers(2, SSD_CHUNK + 20), data=st.data())
test_any_pieces = kinds(settings(max_examples=30, deadline=None)(any_pieces(check_pieces)))
test_any_pieces_often = pytest.mark.full(kinds(settings(max_examples=400, deadline=None)(any_pieces(check_pieces))))


@kinds
def test_token_by_token(kind):
    """Decoding calls the functions this way."""
    inputs = inputs_of(kind, seq=SSD_CHUNK + 3)
    steps = everything(lambda **inputs: in_pieces(kind, inputs, range(1, SSD_CHUNK + 3)), inputs)
    assert worst(steps, everything(KINDS[kind][0], inputs)) <= EXACT


# Backward


@kinds
@pytest.mark.parametrize("seq", (1, 5, 18))
def test_finite_differences(kind, seq):
    inputs = inputs_of(kind, batch=1, seq=seq, channels=2, heads=2, groups=1, size=2)

    def positional(*values):
        return KINDS[kind][0](**dict(zip(inputs, values, strict=True)))

    assert torch.autograd.gradcheck(positional, tuple(inputs.values()))


@kinds
@pytest.mark.parametrize("used", (0, 1), ids=("only the output", "only the state"))
def test_a_gradient_of_only_one_result(kind, used):
    """The gradient of the other result is None or zero, and backward must accept that."""
    inputs = inputs_of(kind, seq=20)
    gradients = []
    for function in KINDS[kind]:
        result = function(**inputs)[used]
        wanted = [t for t in inputs.values() if t.requires_grad]
        gradients.append(torch.autograd.grad(result.square().sum(), wanted, allow_unused=True, materialize_grads=True))
    for ours, theirs in zip(*gradients, strict=True):
        assert error(ours, theirs) <= EXACT


def bytes_saved(function, inputs):
    """The bytes of the distinct storages that autograd saves for backward."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(**inputs)
    del result
    return sum(storages.values())


@pytest.mark.parametrize("kind", ("selective", "ssd"))
def test_backward_does_not_save_the_state_of_every_token(kind):
    """Saved are the inputs and, for the selective scan, a state per SELECTIVE_CHUNK tokens; the reference saves all states.

    Without C kernels, three tensors like x between softplus, scan and gate are saved too.
    """
    seq = 256
    inputs = inputs_of(kind, batch=1, seq=seq, dtype=torch.float32, channels=64, heads=4, groups=1, size=16)
    given = sum(t.nbytes for t in inputs.values())
    state = inputs["state"].nbytes
    between = 0
    if kind == "selective":
        between = state * math.ceil(seq / SELECTIVE_CHUNK) + (0 if LIBRARY else 3 * inputs["x"].nbytes)
    fast, plain = (bytes_saved(function, inputs) for function in KINDS[kind])
    assert fast <= given + between + 4096
    assert fast < seq * state / 2
    assert plain > seq * state
