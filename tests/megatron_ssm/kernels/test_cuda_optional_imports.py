"""The kernels of mamba-ssm, causal-conv1d and flash-linear-attention, and FusedAdam, on a GPU.

Oracles: float64 references; torch's AdamW.
"""

import pytest
import torch

from megatron_ssm.checkpoints.folders import find_checkpoints
from megatron_ssm.checkpoints.training import Snapshot, load_training
from megatron_ssm.kernels import cuda_kernels, fused_adam
from megatron_ssm.kernels.gated_delta import gated_delta, gated_delta_ref
from megatron_ssm.parallel.groups import Groups
from scans import KINDS, PREVIOUS, delta_inputs, error, in_pieces, inputs_of
from tiny import curve, options, trainer

pytestmark = pytest.mark.cuda

SEVERAL = {"selective": "selective_scan_fn", "ssd": "mamba_chunk_scan_combined", "conv": "causal_conv1d_fn"}
ONE = {"selective": "selective_state_update", "ssd": "selective_state_update", "conv": "causal_conv1d_update"}
# Relative to the norm. Triton multiplies float32 in TF32 (2**-11); bfloat16 has a few rounding errors of 2**-9.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def restore_tf32():
    """Restore torch's TF32 setting after each test."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture
def called(monkeypatch):
    """The names of the kernels that ran."""
    names, load_kernel = [], cuda_kernels.load_kernel

    def load_recorded(name):
        kernel = load_kernel(name)
        if kernel.item is None:
            pytest.skip(f"on this machine the kernels are torch's: {kernel.why}")
        run = kernel.item
        return type(kernel)(kernel.package, lambda *args, **kwargs: names.append(name) or run(*args, **kwargs))

    monkeypatch.setattr(cuda_kernels, "load_kernel", load_recorded)
    return names


def on_gpu(kind, dtype, **sizes):
    """Inputs on the GPU, leaves that require gradients; states are float32, the convolution's history is `dtype`."""
    inputs = inputs_of(kind, **{"dtype": dtype, "channels": 64, "size": 16, **sizes})
    return {name: tensor.detach().cuda().requires_grad_() for name, tensor in inputs.items()}


def outputs_and_gradients(function, inputs):
    """{name: tensor}: y, the carried state, and each input's gradient of a weighted sum of both, the same on any device."""
    results = function(**inputs)
    generator = torch.Generator().manual_seed(1)
    loss = sum((t * torch.randn(t.shape, generator=generator).to(t)).sum() for t in results)
    wanted = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    gradients = torch.autograd.grad(loss, wanted.values())
    return dict(zip(("y", "carried", *wanted), (*results, *gradients), strict=True))


def reference_results(kind, inputs):
    """The outputs and gradients of the reference implementation in float64, on the CPU."""
    inputs = {n: t if t is None else t.detach().cpu().double().requires_grad_() for n, t in inputs.items()}
    with torch.enable_grad():
        return outputs_and_gradients(KINDS[kind][1], inputs)


def check(ours, theirs, limit):
    """Assert that each tensor is close to the reference's."""
    __tracebackhide__ = True
    errors = {name: error(tensor.detach().cpu().double(), theirs[name].detach()) for name, tensor in ours.items()}
    assert max(errors.values()) <= limit, errors


@dtypes
@kinds
@pytest.mark.parametrize("state", (False, True), ids=("from zeros", "continued"))
@pytest.mark.parametrize("seq", (2, 37, 700))
def test_kernels_outputs_and_gradients(called, kind, dtype, state, seq):
    """Includes the states, with TF32 allowed. Training through a given state of the selective scan is left to torch."""
    torch.backends.cuda.matmul.allow_tf32 = True
    inputs = on_gpu(kind, dtype, seq=seq, **({"channels": 32} if kind == "ssd" else {}))
    inputs |= {} if state else {PREVIOUS[kind]: None}
    theirs = reference_results(kind, inputs)
    limit = max(TOLERANCE[dtype], 2e-3 if kind == "ssd" else 0)
    check(outputs_and_gradients(KINDS[kind][0], inputs), theirs, limit)
    assert called == ([] if state and kind == "selective" else [SEVERAL[kind]])


@dtypes
@pytest.mark.parametrize("state", (False, True), ids=("from zeros", "continued"))
def test_gated_delta_rule(called, dtype, state):
    """Outputs, states and gradients of several tokens; and the tokens one by one."""
    torch.backends.cuda.matmul.allow_tf32 = True
    given = delta_inputs(seq=200, size=64, width=128, dtype=dtype, state=state)
    inputs = {n: t if t is None else t.detach().cuda().requires_grad_() for n, t in given.items()}
    wide = {n: t if t is None else t.detach().double().requires_grad_() for n, t in given.items()}
    theirs = outputs_and_gradients(gated_delta_ref, wide)
    check(outputs_and_gradients(gated_delta, inputs), theirs, max(TOLERANCE[dtype], 1e-2))
    with torch.no_grad():
        y, carried = gated_delta(**inputs, one_by_one=True)
    check(dict(y=y, carried=carried), theirs, TOLERANCE[dtype])
    assert called == ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


@dtypes
@kinds
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3), (300,), (5, 6, 7, 310, 311)], ids=str)
@torch.no_grad()
def test_kernels_in_pieces(called, kind, dtype, cuts):
    """Chunked prefill and decoding, which continue from a given state."""
    torch.backends.cuda.matmul.allow_tf32 = True
    inputs = {name: t.detach() for name, t in on_gpu(kind, dtype, seq=400).items()}
    theirs = reference_results(kind, inputs)
    y, carried = in_pieces(kind, inputs, cuts)
    check(dict(y=y, carried=carried), theirs, max(TOLERANCE[dtype], 2e-3 if kind == "ssd" else 0))
    lengths = [stop - start for start, stop in zip((0, *cuts), (*cuts, 400), strict=True)]
    assert called == [ONE[kind] if length == 1 else SEVERAL[kind] for length in lengths]


@dtypes
@kinds
@torch.no_grad()
def test_kernels_overwrite_a_view(called, kind, dtype):
    """The state is every second row and half of the channels of a cache; single tokens never use TF32."""
    inputs = {name: t.detach() for name, t in on_gpu(kind, dtype, seq=1, channels=24).items()}
    given = inputs[PREVIOUS[kind]]
    cache = torch.full((4, *given.shape[1:-1], 48), float("nan"), dtype=given.dtype, device="cuda")
    rows = cache[1::2, ..., 24:]
    rows.copy_(given)
    theirs = reference_results(kind, inputs)
    y, carried = KINDS[kind][0](**inputs | {PREVIOUS[kind]: rows}, overwrite=True)
    check(dict(y=y, carried=carried), theirs, TOLERANCE[dtype])
    assert carried.data_ptr() == rows.data_ptr() and torch.equal(rows, carried)
    assert cache[::2].isnan().all() and cache[..., :24].isnan().all() and called == [ONE[kind]]


@kinds
def test_kernels_on_batches_that_are_split_so_that_offsets_fit(called, monkeypatch, kind):
    """With a limit of two rows per call, five rows give the outputs and gradients of the whole batch."""
    inputs = on_gpu(kind, torch.bfloat16, batch=5, seq=37, **({"channels": 32} if kind == "ssd" else {}))
    inputs |= {"state": None} if kind == "selective" else {}
    row = {"conv": (37 + 3) * 64, "selective": 37 * 64, "ssd": 2 * 256 * 256}[kind]
    monkeypatch.setattr(cuda_kernels, "LARGEST_OFFSET", 2 * row - 1)
    check(outputs_and_gradients(KINDS[kind][0], inputs), reference_results(kind, inputs), TOLERANCE[torch.bfloat16])
    assert called == [SEVERAL[kind]] * 3


@pytest.mark.parametrize("kind", ("conv", "ssd"))
@torch.no_grad()
def test_kernels_on_offsets_beyond_32_bits(called, kind):
    """x is a slice of a tensor so wide (12 GB) that the offset of its fourth row exceeds 2**32 elements."""
    shape, dtype = (4, 700, 2**21), torch.bfloat16
    if torch.cuda.mem_get_info()[0] < 2**34:
        pytest.skip("fewer than 16 GiB are free")
    inputs = {name: t.detach() for name, t in on_gpu(kind, dtype, batch=shape[0], seq=shape[1]).items()}
    theirs, x = reference_results(kind, inputs), inputs["x"]
    wide = torch.empty(shape, dtype=dtype, device="cuda")[..., : x[0, 0].numel()]
    inputs["x"] = wide.unflatten(-1, x.shape[2:]).copy_(x)
    y, carried = KINDS[kind][0](**inputs)
    check(dict(y=y, carried=carried), theirs, TOLERANCE[dtype])
    assert called == [SEVERAL[kind]] * 4


def test_ssd_in_float32_is_left_to_torch(called):
    """The kernel would use TF32, which is not allowed here."""
    inputs = on_gpu("ssd", torch.float32, seq=300)
    torch.backends.cuda.matmul.allow_tf32 = False
    check(outputs_and_gradients(KINDS["ssd"][0], inputs), reference_results("ssd", inputs), TOLERANCE[torch.float32])
    assert not called


def test_fused_adam_equals_torch_adamw(tmp_path, monkeypatch):
    """Both give the same training curve, and each reads the checkpoints of the other."""
    *_, last = fused_adam.fused_adams()
    if last.item is None:
        pytest.skip(f"on this machine AdamW is torch's: {'; '.join(each.why for each in fused_adam.fused_adams())}")
    run = options(params_dtype="float32")

    def gpu_trainer(fused):
        monkeypatch.setattr(fused_adam, "on_cuda", lambda parameter: fused)
        made = trainer(run, Groups())
        made.model.cuda()
        assert isinstance(made.optimizer, last.item) == fused
        return made

    ours, theirs = (curve(gpu_trainer(fused), 6) for fused in (True, False))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    for writer, reader in ((True, False), (False, True)):
        first, second = gpu_trainer(writer), gpu_trainer(reader)
        before = curve(first, 3)
        Snapshot.of(tmp_path, 3, first.model, first.optimizer, {}).write()
        load_training(find_checkpoints(tmp_path)[-1], 3, second.model, second.optimizer)
        torch.testing.assert_close(torch.cat([before, curve(second, 6, 3)], 1), theirs, rtol=1e-4, atol=0)
