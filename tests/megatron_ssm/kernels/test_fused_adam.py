"""AdamW by FusedAdam, on the CPU. Oracles: torch's AdamW, and a run that was never interrupted.

A stand-in replaces FusedAdam. It has the signature and behaviour of Transformer Engine's and apex's, as in their sources.
"""

import dataclasses
import sys

import pytest
import torch

import tiny
from megatron_ssm.checkpoints.folders import find_checkpoints
from megatron_ssm.checkpoints.training import Snapshot, load_training
from megatron_ssm.kernels import fused_adam
from megatron_ssm.kernels.optional_imports import OptionalImport
from megatron_ssm.train.trainer import Trainer

STEPS, CUT = 6, 3


class FusedAdam(torch.optim.Optimizer):
    """Counts steps per parameter group, keeps moments in float32, and has apex's zero_grad."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=False,
                 weight_decay=0.0):  # fmt: skip
        super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                                      weight_decay=weight_decay))  # fmt: skip
        assert adam_w_mode

    def zero_grad(self):
        """Set the gradients to None."""
        super().zero_grad()

    @torch.no_grad()
    def step(self):
        """AdamW [Loshchilov and Hutter, algorithm 2]."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            assert all(p.numel() for p in group["params"])  # Transformer Engine raises otherwise, apex skips others
            for parameter in (p for p in group["params"] if p.grad is not None):
                self._update(parameter, group)

    def _update(self, p, group):
        state, (beta1, beta2), t = self.state[p], group["betas"], group["step"]
        if not state:
            state.update({name: torch.zeros_like(p).float() for name in ("exp_avg", "exp_avg_sq")})
        assert state.keys() == {"exp_avg", "exp_avg_sq"} and {m.dtype for m in state.values()} == {torch.float32}
        m, v, g = state["exp_avg"], state["exp_avg_sq"], p.grad.float()
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        change = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"]) + group["weight_decay"] * p.float()
        p.copy_(p.float() - group["lr"] * change)


@pytest.fixture
def trainer(monkeypatch):
    """trainer(fused): a trainer of a tiny float32 model, whose AdamW is the stand-in or torch's."""
    monkeypatch.setattr(fused_adam, "fused_adams", lambda: (OptionalImport("stand-in", FusedAdam),))

    def make(fused, **changes):
        monkeypatch.setattr(fused_adam, "on_cuda", lambda parameter: fused)
        made = tiny.trainer(tiny.options(**{"params_dtype": "float32", "num_layers": 1, **changes}))
        kind = FusedAdam if fused and made.model.dtype is not torch.float64 else torch.optim.AdamW
        assert type(made.optimizer) is kind
        return made

    return make


def test_fused_adam_gives_the_same_curve(trainer):
    ours, theirs = (tiny.curve(trainer(fused), STEPS) for fused in (True, False))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)


def test_gradients_keep_their_addresses(trainer):
    """DDP's gradients are views of its buckets, so they must not be replaced."""
    ours = trainer(True)
    tiny.curve(ours, 1)
    addresses = [p.grad.data_ptr() for p in ours.model.parameters()]
    tiny.curve(ours, 2, start=1)
    assert addresses == [p.grad.data_ptr() for p in ours.model.parameters()]
    assert not any(p.grad.any() for p in ours.model.parameters())


@pytest.mark.parametrize("writer, reader", [(True, True), (True, False), (False, True)])
def test_resuming_with_another_optimizer(trainer, writer, reader, tmp_path):
    uninterrupted = tiny.curve(trainer(writer), STEPS)
    first = trainer(writer)
    before = tiny.curve(first, CUT)
    Snapshot.of(tmp_path, CUT, first.model, first.optimizer, {}).write()
    second = trainer(reader, seed=8)
    load_training(find_checkpoints(tmp_path)[0], CUT, second.model, second.optimizer)
    for mine, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(second.optimizer.state[mine][moment], first.optimizer.state[theirs][moment])
    second.options = first.options  # the seed of the options selects the data
    after = tiny.curve(second, STEPS, start=CUT)
    torch.testing.assert_close(torch.cat([before, after], 1), uninterrupted, rtol=1e-4, atol=0)


def test_moments_of_bfloat16_parameters(trainer, tmp_path):
    """FusedAdam keeps float32 moments and torch bfloat16 ones: loading converts them."""
    first, second = trainer(True), trainer(False)
    for each in (first, second):
        each.model.bfloat16()
    tiny.curve(first, 2)
    Snapshot.of(tmp_path, 2, first.model, first.optimizer, {}).write()
    load_training(find_checkpoints(tmp_path)[0], 2, second.model, second.optimizer)
    for mine, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
        held = second.optimizer.state[mine]
        assert (
            torch.equal(held["exp_avg"], first.optimizer.state[theirs]["exp_avg"].to(mine.dtype)) and held["step"] == 2
        )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_parameters_without_elements(trainer, monkeypatch, dtype):
    """A rank may have no row of a small vocabulary. FusedAdam does not get such parameters, but they have moments."""
    results = []
    for fused in (True, False):
        monkeypatch.setattr(fused_adam, "on_cuda", lambda parameter, fused=fused: fused)
        parameters = [torch.nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in ((0, 3), (2, 3), (4,), (0,))]
        groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
        optimizer = fused_adam.adamw(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8)
        assert [len(group["params"]) for group in groups] == [2, 2]  # the caller's groups are unchanged
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, step - 0.5)
            optimizer.step()
        fused_adam.zero_gradients(optimizer)
        assert not any(parameter.grad.any() for parameter in parameters)
        for parameter in parameters:
            moment = optimizer.state[parameter]["exp_avg"]
            assert moment.shape == parameter.shape and moment.dtype is (torch.float32 if fused else dtype)
        results.append(torch.cat([parameter.detach().float().flatten() for parameter in parameters]))
    torch.testing.assert_close(*results, rtol=1e-5 if dtype is torch.float32 else 2**-6, atol=0)


def test_resuming_with_parameters_without_elements(trainer, tmp_path, monkeypatch):
    """Either optimizer reads a checkpoint with such parameters, and the run continues as if never interrupted."""
    initialize = Trainer.__init__

    def with_an_empty_parameter(self, model, groups, options, *report):
        empty = torch.nn.Parameter(torch.zeros(0, 3, dtype=model.dtype))
        empty.field = dataclasses.replace(next(model.parameters()).field, name="empty", shape=(0, 3))
        empty.grad = torch.zeros_like(empty)
        model.register_parameter("empty", empty)
        initialize(self, model, groups, options, *report)

    monkeypatch.setattr(Trainer, "__init__", with_an_empty_parameter)
    first = trainer(True)
    assert sum(p.numel() == 0 for p in first.model.parameters()) == 1
    tiny.curve(first, CUT)
    Snapshot.of(tmp_path, CUT, first.model, first.optimizer, {}).write()
    after = tiny.curve(first, STEPS, start=CUT)
    for fused in (True, False):
        second = trainer(fused, seed=8)
        load_training(find_checkpoints(tmp_path)[0], CUT, second.model, second.optimizer)
        assert all(set(second.optimizer.state[p]) >= {"exp_avg", "exp_avg_sq"} for p in second.model.parameters())
        second.options = first.options
        torch.testing.assert_close(tiny.curve(second, STEPS, start=CUT), after, rtol=1e-4, atol=0)


def test_float64_is_left_to_torch(trainer):
    trainer(True, params_dtype="float64")
    assert fused_adam.adamw_on_cuda(torch.float64) == ("torch", "FusedAdam has no float64")


# Packages that are missing or broken

ADAM = "class FusedAdam: pass\n"
APEX = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": "from .fused_adam import FusedAdam\n",
    "apex/optimizers/fused_adam.py": ADAM,
}
APPLIER = "class multi_tensor_applier: available = {}\n"
MISSING = [f"{package} is not installed" for package in ("transformer-engine", "apex")]
CASES = {
    "none": ({}, None, MISSING),
    "PyPI's apex": (
        {"apex/__init__.py": "raise SystemExit('this must not run')\n"},
        None,
        [MISSING[0], "apex cannot be used (ImportError: it is not NVIDIA's project)"],
    ),
    "NVIDIA's apex": ({**APEX, "apex/multi_tensor_apply.py": APPLIER.format(True)}, "apex", [MISSING[0], ""]),
    "NVIDIA's without CUDA": (
        {**APEX, "apex/multi_tensor_apply.py": APPLIER.format(False)},
        None,
        [MISSING[0], "apex cannot be used (ImportError: it was built without its CUDA extensions)"],
    ),
    "both": (
        {**APEX, "transformer_engine/pytorch/optimizers.py": ADAM},
        "transformer_engine",
        [""],
    ),
    "a broken Transformer Engine": (
        {"transformer_engine/__init__.py": "raise OSError('libcudnn.so.9: cannot open')\n"},
        None,
        ["transformer-engine cannot be used (OSError: libcudnn.so.9: cannot open)", MISSING[1]],
    ),
}


def forget_packages():
    """Unload both packages and clear the cached result of the search for them."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("apex", "transformer_engine")]:
        del sys.modules[name]
    fused_adam.fused_adams.cache_clear()


@pytest.mark.parametrize("case", CASES)
def test_the_first_working_package_is_used(case, tmp_path, monkeypatch):
    """Every failure is reported with its reason; if no package works, AdamW is torch's."""
    files, source, whys = CASES[case]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    forget_packages()
    try:
        found = fused_adam.fused_adams()
        assert [each.why for each in found] == whys
        assert (found[-1].item and found[-1].item.__module__.split(".")[0]) == source
        assert fused_adam.adamw_on_cuda()[1] == "; ".join(filter(None, whys))
    finally:
        forget_packages()
