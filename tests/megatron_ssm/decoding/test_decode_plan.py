"""When native decoding steps are created, reused and recreated. Oracle: a copy of the model that has decoded nothing.

A step keeps the addresses of its layer's tensors; here the tensors move, change and are freed between two tokens.
"""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook

import megatron_ssm
from megatron_ssm.decoding import decode_plan, native_step
from megatron_ssm.decoding.decode_plan import ModelFingerprint
from megatron_ssm.layers.mamba1 import Convolution
from megatron_ssm.models.model import Block
from megatron_ssm.native import kernels
from megatron_ssm.native.versions import Versions, have_versions
from serving import IDS, counted, hooked, hooked_anew, one_by_one, saved

pytestmark = pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")


@pytest.fixture
def native_calls(monkeypatch):
    """A list with one entry for each token and layer that step.c computes."""
    return counted(native_step.NativeLayers, monkeypatch.setattr)


def moved(model):
    """Every parameter has new data at a new address, so the fields of a matrix are no longer adjacent."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def moved_together(model):
    """All parameters move in one call, as by `.to()`."""
    model._apply(lambda tensor: tensor * 1.5)


def replaced(model):
    """A parameter is replaced by another object."""
    mixer = model.layers[1].mixer
    mixer.A_log = torch.nn.Parameter(mixer.A_log + 1)


def called_otherwise(model):
    """A layer has a forward function of its own."""
    out_proj = model.layers[1].mixer.out_proj
    forward = out_proj.forward
    out_proj.forward = lambda x: 2 * forward(x)


def quantized(model):
    """The parameters have another dtype."""
    model.bfloat16()


def edited(model):
    """The parameters have other values at the same addresses."""
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def stretched(model):
    """A parameter is an expanded view of one number, at the same address."""
    mixer = model.layers[1].mixer
    mixer.D.data = mixer.D.data[:1].expand_as(mixer.D)


def with_a_bias(model):
    """A layer gets a bias."""
    out_proj = model.layers[1].mixer.out_proj
    out_proj.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(out_proj.weight)))


def with_other_eps(model):
    """A setting that is not a tensor changes."""
    model.layers[1].norm.eps = 0.5


def of_another_kind(model):
    """A block has another class, with its own forward."""

    class Doubled(Block):
        def forward(self, *given):
            return 2 * super().forward(*given)

    model.layers[0].__class__ = Doubled


def with_another_final_norm(model):
    """The final norm has another eps."""
    model.norm_f.eps = 0.5


def with_a_hook_on_the_final_norm(model):
    """What the head reads is changed by a hook."""
    model.norm_f.register_forward_hook(lambda _, __, y: 2 * y)


def with_another_head(model):
    """The matrix of the head, which is also that of the embeddings, is replaced."""
    model.embeddings.weight = torch.nn.Parameter(model.embeddings.weight * 1.5)


COMMON_CHANGES = (
    moved,
    moved_together,
    replaced,
    hooked,
    hooked_anew,
    called_otherwise,
    quantized,
    edited,
    stretched,
    with_a_bias,
    with_other_eps,
    with_another_final_norm,
    with_a_hook_on_the_final_norm,
    with_another_head,
)
CHANGES = [
    *product(("mamba", "mamba2"), (*COMMON_CHANGES, of_another_kind)),
    ("zamba2", moved),
    ("zamba2", moved_together),
]


@pytest.fixture(params=("versions", "members"))
def compared(request, monkeypatch):
    """What tells whether a model has changed: the versions of its dictionaries, or as in Python 3.13 all their members."""
    if request.param == "members":
        monkeypatch.setattr(Versions, "are_current", lambda self: False)
    elif not have_versions():
        pytest.skip("the dictionaries of this Python have no versions")


@pytest.mark.parametrize("family, change", CHANGES)
@torch.no_grad()
def test_a_model_may_change_between_two_tokens(family, change, compared, tmp_path):
    """Oracle: a copy of the model and its cache, which has decoded nothing."""
    model = megatron_ssm.load(saved(tmp_path, family))
    cache = model.new_cache(2)
    for tokens in IDS.split([4, 1, 1, 1, 1, 1], dim=1)[:4]:
        model(tokens, cache=cache)
    copied, copied_cache = copy.deepcopy(model), copy.deepcopy(cache)
    before = copy.deepcopy(model)(IDS[:, :1], cache=copy.deepcopy(cache))
    for changed in (model, copied):
        change(changed)
    logits = model(IDS[:, :1], cache=cache)
    torch.testing.assert_close(logits, copied(IDS[:, :1], cache=copied_cache), rtol=0, atol=0)
    assert (logits - before).abs().max() > 1e-3


@pytest.mark.skipif(not have_versions(), reason="the dictionaries of this Python have no versions")
@torch.no_grad()
def test_members_are_compared_only_after_a_change(tmp_path, monkeypatch):
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    comparisons, compare = [], ModelFingerprint._is_same_model
    monkeypatch.setattr(ModelFingerprint, "_is_same_model", lambda self: (comparisons.append(1), compare(self))[1])
    cache = model.new_cache(2)
    for tokens, change, count in (
        (IDS[:, :4], None, 0), (IDS[:, 4:5], None, 0), (IDS[:, 5:6], None, 0),
        (IDS[:, 6:7], model.eval, 1), (IDS[:, 7:8], None, 1), (IDS[:, 8:9], model.train, 2), (IDS[:, :1], None, 2),
    ):  # fmt: skip
        if change is not None:
            change()  # changes attributes of all modules, but nothing that counts
        model(tokens, cache=cache)
        assert len(comparisons) == count


def with_own_dictionary(model):
    """A module has another dictionary of attributes."""
    model.norm_f.__dict__ = {**model.norm_f.__dict__, "eps": 0.5}


CHANGES_OF_ENDS = {
    "dictionary": with_own_dictionary,
    "dtype of quantized embeddings": lambda model: model.embeddings.bfloat16(),
    "ranks": lambda model: setattr(model.embeddings, "ranks", None),
    "start": lambda model: setattr(model.embeddings, "start", 1),
    "width": lambda model: setattr(model.lm_head, "width", 7),
    "embed": lambda model: setattr(model.embeddings, "embed", lambda ids: None),
    "logits": lambda model: setattr(model.lm_head, "logits", lambda x: None),
}


@pytest.mark.parametrize("change", CHANGES_OF_ENDS)
def test_changes_before_and_after_the_layers_are_noticed(change, compared, tmp_path):
    wide = dict(hidden_size=64, num_heads=2, head_dim=64)
    model = megatron_ssm.load(saved(tmp_path, "mamba2", **wide, tie_word_embeddings=False), weights="int8")
    fingerprint = ModelFingerprint(model, Block)
    assert fingerprint.is_current() and fingerprint.is_current()
    CHANGES_OF_ENDS[change](model)
    assert not fingerprint.is_current()


class OtherNorm(torch.nn.Module):
    """A norm without the attributes of ours."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.eps

    def forward(self, x):
        return 2 * self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


def own_method(owner, name, factor):
    """Give an object a method of its own, whose results are `factor` times as large."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *given: factor * method(*given))


def plain(module):
    """The weight of a module is a tensor, but no parameter."""
    weight = 2 * module.weight.detach()
    del module.weight
    module.weight = weight


def of_a_function(model):
    """The matrix of a layer is the result of a function."""
    projection = model.layers[1].mixer.in_proj
    whole = projection.weight
    del projection.weight
    projection.weight = lambda: 1.5 * whole()


def with_a_plain_bias(model):
    """A layer gets a bias that is a tensor, but no parameter."""
    out_proj = model.layers[1].mixer.out_proj
    out_proj.bias = torch.linspace(-1, 1, len(out_proj.weight))


def untied(model):
    """The head has a matrix of its own."""
    model.lm_head = copy.deepcopy(model.embeddings)
    model.lm_head.weight.mul_(3)
    model.config = replace(model.config, tie_embeddings=False)


def exchanged(model):
    """An attribute disappears when a method is replaced."""
    out_proj = model.layers[1].mixer.out_proj
    vars(out_proj).pop("note", None)
    own_method(out_proj, "product", 3)


REPLACED = {
    "embed": lambda model: own_method(model.embeddings, "embed", 3),
    "logits": lambda model: own_method(model.embeddings, "logits", 3),
    "compute": lambda model: own_method(model, "compute", 3),
    "norm": lambda model: setattr(model, "norm_f", OtherNorm(model.norm_f)),
    "layer norm": lambda model: setattr(model.layers[0], "norm", OtherNorm(model.layers[0].norm)),
    "product": lambda model: own_method(model.layers[1].mixer.out_proj, "product", 3),
    "layer": lambda model: model.layers.append(copy.deepcopy(model.layers[0])),
    "plain norm": lambda model: plain(model.norm_f),
    "plain embeddings": lambda model: plain(model.embeddings),
    "plain layer": lambda model: plain(model.layers[0].norm),
    "function": of_a_function,
    "bias": with_a_bias,
    "plain bias": with_a_plain_bias,
    "untied": untied,
    "sparse": lambda model: setattr(model.layers[0], "note", torch.eye(4).to_sparse()),
    "sparse buffer": lambda model: model.layers[0].register_buffer("note", torch.eye(4).to_sparse()),
    "lazy parameter": lambda model: setattr(model.layers[0], "probe", torch.nn.LazyLinear(3)),
    "exchange": exchanged,
}


@pytest.mark.parametrize("change", REPLACED)
@pytest.mark.parametrize("first", (4, 7))
@torch.no_grad()
def test_what_a_caller_replaces_is_called(change, first, tmp_path):
    """Before the model is used, or after it has decoded. Oracle: the whole sequence at once."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2", tie_word_embeddings=True))
    model.layers[1].mixer.out_proj.note = "of the caller's"
    if first > 4:
        one_by_one(model, model)
    REPLACED[change](model)
    for _ in range(2):
        torch.testing.assert_close(one_by_one(model, model), model(IDS), rtol=0, atol=2e-4)


@pytest.mark.parametrize("first", (4, 7))
@torch.no_grad()
def test_methods_of_quantized_embeddings_are_called(first, tmp_path):
    """Before the model is used, or after it has decoded. Oracle: the whole sequence at once."""
    wide = dict(hidden_size=64, num_heads=2, head_dim=64)
    model = megatron_ssm.load(saved(tmp_path, "mamba2", **wide), weights="int8")
    if first > 4:
        one_by_one(model, model)
    own_method(model.embeddings.weight, "rows", 3)
    for _ in range(2):
        by_tokens, at_once = one_by_one(model, model), model(IDS)
        assert (by_tokens - at_once).norm() < 1e-2 * at_once.norm()


@torch.no_grad()
def test_plans_of_the_caches_that_were_used_last_are_kept(tmp_path, monkeypatch):
    """Five caches, of which the first is used in between: its plan stays, and one for each is made."""
    made, plan = [], decode_plan._Plan
    monkeypatch.setattr(decode_plan, "_Plan", lambda *given: (made.append(1), plan(*given))[1])
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    caches = [model.new_cache(2) for _ in range(decode_plan.PLANS + 1)]
    for cache in caches:
        model(IDS[:, :4], cache=cache)
    for index in (0, 1, 2, 3, 0, 4, 0):
        model(IDS[:, 4:5], cache=caches[index])
    assert len(made) == len(caches)


@pytest.mark.parametrize("owner", ("norm_f", "embeddings", "lm_head", "layers.1.norm"))
@torch.no_grad()
def test_plain_tensors_may_be_replaced_between_two_tokens(owner, tmp_path):
    """Oracle: a copy of the cache, for which there is no plan yet."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2", tie_word_embeddings=False))
    module, cache = model.get_submodule(owner), model.new_cache(2)
    plain(module)
    for tokens in IDS.split([4, 1, 1, 3], dim=1)[:3]:
        model(tokens, cache=cache)
    copied_cache = copy.deepcopy(cache)
    module.weight = 3 * module.weight
    junk = [torch.full_like(module.weight, 1e6) for _ in range(100)]  # where the old weight was
    logits = model(IDS[:, 6:7], cache=cache)
    expected = model(IDS[:, 6:7], cache=copied_cache)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    assert len(junk) == 100


@torch.no_grad()
def test_a_final_norm_that_is_too_short(tmp_path):
    """What torch refuses, C does not compute either."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2", tie_word_embeddings=False))
    cache = model.new_cache(2)
    model(IDS[:, :4], cache=cache)
    half = len(model.norm_f.weight) // 2
    model.norm_f.weight = torch.nn.Parameter(model.norm_f.weight[:half].clone())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:, :half].clone())
    for _ in range(3):
        with pytest.raises(RuntimeError):
            model(IDS[:, 4:5], cache=cache)


@torch.no_grad()
def test_a_model_is_untied_between_two_tokens(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba2", tie_word_embeddings=True))
    cache = model.new_cache(2)
    for tokens in IDS.split([4, 1, 1, 3], dim=1)[:3]:
        model(tokens, cache=cache)
    untied(model)
    torch.testing.assert_close(model(IDS[:, 6:7], cache=cache), model(IDS[:, :7])[:, 6:], rtol=0, atol=2e-4)
    model.config = replace(model.config, vocab_size=30)
    with pytest.raises(ValueError, match="token id 40 is outside the vocabulary of 30"):
        model(torch.tensor([[40], [1]]), cache=cache)


@torch.no_grad()
def test_rows_may_leave_a_cache(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    cache = model.new_cache(2)
    for tokens in IDS.split([4, 1, 4], dim=1)[:2]:
        model(tokens, cache=cache)
    left = copy.deepcopy(cache).select([0])
    for layer in cache.layers:
        layer.conv, layer.state = layer.conv[:1], layer.state[:1]
    cache.lengths = cache.lengths[:1]
    logits = model(IDS[:1, 5:6], cache=cache)
    assert logits.shape == (1, 1, model.config.vocab_size)
    torch.testing.assert_close(logits, copy.deepcopy(model)(IDS[:1, 5:6], cache=left), rtol=0, atol=5e-6)


@torch.no_grad()
def test_layers_of_two_types(tmp_path, native_calls):
    """Each layer's step has buffers of its own dtype."""
    model = megatron_ssm.load(saved(tmp_path, "mamba", residual_in_fp32=True), dtype=torch.bfloat16)
    model.layers[1].float()
    by_steps = one_by_one(model, model)
    assert len(native_calls) == 2 * 5
    for layer in model.layers:
        layer.norm.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(by_steps, one_by_one(model, model), rtol=0, atol=0.02)


def test_the_default_device_does_not_matter(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    expected, cache = one_by_one(model, model), model.new_cache(2)
    with torch.no_grad():
        model(IDS[:, :4], cache=cache)
        with torch.device("meta"):
            logits = model(IDS[:, 4:5], cache=cache)
    assert torch.equal(logits, expected[:, 4:5])


@torch.no_grad()
def test_tensors_kept_by_hooks_do_not_change(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    kept, copies = [], []

    def keep(_, given):
        kept.append(given[0])
        copies.append(given[0].clone())

    for module in (model.norm_f, model.layers[1]):
        module.register_forward_pre_hook(keep)
    one_by_one(model, model)
    assert len(kept) == 2 * 6 and all(map(torch.equal, kept, copies))


class Keeping(Convolution):
    """Keeps its last result and a copy of it."""

    def forward(self, *given, **named):
        self.kept = super().forward(*given, **named)
        self.copies = self.kept[0].clone()
        return self.kept


@torch.no_grad()
@pytest.mark.parametrize("how", ("hook", "hook for all", "another module"))
def test_convolution_outputs_that_may_be_kept_do_not_change(tmp_path, how):
    """Where nobody can keep it, the scan overwrites the output of the convolution."""
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    kept = []

    def keep(module, _, given):
        if type(module) is Convolution:
            kept.append((given[0], given[0].clone()))

    conv, handle = model.layers[0].mixer.conv, None
    if how == "hook":
        conv.register_forward_hook(keep)
    elif how == "hook for all":
        handle = register_module_forward_hook(keep)
    else:
        conv.__class__ = Keeping
    try:
        model(IDS)
    finally:
        if handle:
            handle.remove()
    kept = kept or [(conv.kept[0], conv.copies)]
    assert all(torch.equal(*pair) for pair in kept)


@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize(
    "family, dtype", (("mamba", torch.bfloat16), ("mamba", torch.float64), ("mamba2", torch.bfloat16))
)
def test_a_custom_reduce_may_return_another_dtype(ranks, tp, family, dtype, tmp_path):
    """It may also keep the tensors that it receives: they do not change later."""
    directory = saved(tmp_path, family, n_groups=1) if family == "mamba2" else saved(tmp_path, family)

    def run(rank):
        kept, copies = [], []

        def reduce(tensor, group):
            kept.append(tensor)
            copies.append(tensor.clone())
            total = tensor.clone()
            dist.all_reduce(total, group=group)
            return total.to(dtype)

        model = megatron_ssm.load(directory, dist.group.WORLD, reduce=reduce)
        by_steps = one_by_one(model, model)
        unchanged = all(map(torch.equal, kept, copies))
        for layer in model.layers:
            layer.norm.register_forward_hook(lambda *_: None)
        return by_steps, one_by_one(model, model), unchanged

    for by_steps, by_blocks, unchanged in ranks(run, tp):
        torch.testing.assert_close(by_steps, by_blocks, rtol=0, atol=0.1 if dtype == torch.bfloat16 else 5e-6)
        assert unchanged


@torch.no_grad()
def test_steps_are_kept_for_several_caches(tmp_path, monkeypatch):
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    created, of = [], native_step.NativeLayer.of
    monkeypatch.setattr(native_step.NativeLayer, "of", lambda *given: (created.append(1), of(*given))[1])
    caches = [model.new_cache(2) for _ in range(3)]
    for cache in caches:
        model(IDS[:, :4], cache=cache)
    for t in range(4, 9):
        assert len({model(IDS[:, t : t + 1], cache=cache).sum().item() for cache in caches}) == 1
    assert len(created) == 3 * 2 + 2  # the prompts have one plan for all caches


@torch.no_grad()
def test_a_model_that_has_decoded_is_freed_at_once(tmp_path):
    """Without the garbage collector's search for cycles, because the next model may need the memory."""
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    one_by_one(model, model)
    gc.disable()
    try:
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_autocast_and_global_hooks_disable_native_steps(tmp_path, native_calls):
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one_by_one(model, model)
    called = []
    handle = register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        one_by_one(model, model)
    finally:
        handle.remove()
    assert not native_calls and called.count(model.layers[0].norm) == 6
    one_by_one(model, model)
    assert native_calls


@torch.no_grad()
def test_copies_threads_and_caches_do_not_interfere(tmp_path):
    model = megatron_ssm.load(saved(tmp_path, "mamba"))
    expected = one_by_one(model, model)
    first, second = model.new_cache(2), model.new_cache(3)
    model(IDS[:, :4], cache=first)
    model(IDS[:1, :4].expand(2, -1), cache=second.select([1, 2]))
    model(IDS[1:, :2], cache=second.select([0]))
    for t in range(4, 9):
        assert torch.equal(model(IDS[:, t : t + 1], cache=first), expected[:, t : t + 1])
        both = model(IDS[:1, t : t + 1].expand(2, -1), cache=second.select([1, 2]))
        torch.testing.assert_close(both, expected[:1, t : t + 1].expand(2, -1, -1), rtol=0, atol=5e-6)
        alone = model(IDS[1:, t - 2 : t - 1], cache=second.select([0]))
        torch.testing.assert_close(alone, expected[1:, t - 2 : t - 1], rtol=0, atol=5e-5)
    with ThreadPoolExecutor(4) as threads:
        for logits in threads.map(lambda _: one_by_one(model, model), range(100)):
            assert torch.equal(logits, expected)
    assert torch.equal(one_by_one(copy.deepcopy(model), model), expected)


@torch.no_grad()
def test_fields_that_are_not_adjacent_in_memory(tmp_path, native_calls):
    """An optimizer that moves parameters into its own buffer leaves them like this."""
    model = megatron_ssm.load(saved(tmp_path, "mamba2"))
    expected = one_by_one(model, model)
    native_calls.clear()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    torch.testing.assert_close(one_by_one(model, model), expected, rtol=0, atol=5e-5)
    assert not native_calls
