"""Which callables compute a model's layers: `NativeLayers` where the C kernels support them, otherwise the blocks.

A plan is made for some rows of a cache when these are first decoded, and used until the model or the cache changes: at
every call, everything that was copied from the model is compared with the model. One more plan reads prompts, into any rows
of any cache (`NativePrompt`). Methods that a caller replaces in an object are called; those that are replaced in a class of
the library may not be called, because C does what the library's classes do.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter, contains, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from megatron_ssm.layers.cache import BatchInfo, Cache, LayerCache
from megatron_ssm.native import kernels
from megatron_ssm.native.layouts import Layouts, LayoutsOfKept, can_be_described
from megatron_ssm.native.versions import Versions, have_versions
from megatron_ssm.ops.quantized_matrices import QuantizedMatrix

from .native_prompt import PIECE, NativePrompt
from .native_step import NativeLayer, NativeLayers, can_decode_natively, settings_of
from .native_tokens import NativeTokens

MOST_TOKENS = 16  # of a row
# Attributes of the embeddings, of the final norm and of the head that a plan depends on.
SETTINGS_OF_ENDS = "eps ranks start stop width embed logits".split()
PLANS = 4  # per model and thread: those for the sets of rows that were used last; as many for speculative tokens


class DecodePlans(threading.local):
    """The decode plans of one model in each thread, for the rows of caches that it decoded last, and a plan for prompts.

    A copy has no plans.
    block: the type of the blocks that native layers can replace.
    """

    def __init__(self, block: type[nn.Module]):
        self._block = block
        self._plans: list[_Plan] = []
        self._prompts: _PromptPlan | None = None

    def __reduce__(self) -> tuple:
        return DecodePlans, (self._block,)

    def layers(
        self, model: Any, info: BatchInfo, cache: Cache | None, tokens: int
    ) -> tuple[list[tuple[int, Any]], bool]:
        """[(index of its first block, callable)] for all blocks of the model: `NativeLayers`, or a block itself.

        tokens: how many of each row the call reads. The second value: whether the last callable returns the logits.
        """
        if cache is None or not _is_supported(info) or not cache.layers[0].state.is_cpu:
            return list(enumerate(model.layers)), False
        if not info.decoding and model.ranks.group is None:
            return self._prompt_layers(model, info, cache, tokens) or list(enumerate(model.layers)), False
        if not info.decoding or tokens > MOST_TOKENS:  # so many are too long for the kernels, whatever the rows
            return list(enumerate(model.layers)), False
        ahead = tokens if info.speculative else None
        plan = self._plan_for(info.rows, ahead, cache)
        if plan is None or not plan.is_current(model, cache):
            others = [other for other in self._plans if other is not plan]
            same = [other for other in others if (other.ahead is None) == (ahead is None)]
            self._plans = [other for other in others if other not in same[PLANS - 1 :]]
            self._plans.insert(0, plan := _Plan(model, self._block, info.rows, ahead, cache))
        return plan.layers, plan.gives_logits

    def logits(self, model: Any, ids: Tensor, cache: Cache, speculative: bool) -> Tensor | None:
        """This rank's logits of decoded tokens ids (batch, tokens), by one call of C: see `NativeTokens.logits`.

        One token of each row advances the cache, speculative ones do not. None, with nothing done: there is no such call for
        these rows and so many tokens.
        """
        if not (torch.is_tensor(ids) and ids.ndim == 2 and isinstance(cache.rows, slice) and _may_use_kernels()):
            return None
        ahead = ids.shape[-1] if speculative else None
        plan = self._plan_for(cache.rows, ahead, cache)
        if plan is None or plan.tokens is None or not plan.is_current(model, cache):
            return None
        return plan.tokens.logits(ids, cache)

    def _plan_for(self, rows: slice | Tensor, ahead: int | None, cache: Cache) -> "_Plan | None":
        """The plan for so many tokens of these rows of this cache, which may be outdated; None if there is none.

        It is then the first of the plans.
        """
        for index, plan in enumerate(self._plans):
            if plan.is_for(rows, ahead, cache):
                self._plans.insert(0, self._plans.pop(index))
                return plan
        return None

    def _prompt_layers(self, model: Any, info: BatchInfo, cache: Cache, tokens: int) -> list[tuple[int, Any]] | None:
        """`layers` for tokens of prompts, or None if the blocks are better for so many of them."""
        if self._prompts is None or not self._prompts.fingerprint.is_current():
            self._prompts = _PromptPlan(model, self._block)
        return self._prompts.layers(cache, info.rows, tokens)


def _is_supported(info: BatchInfo) -> bool:
    """Whether this call is for consecutive rows of a cache, without padding, gradients, and global hooks."""
    return info.mask is None and info.sharding is None and isinstance(info.rows, slice) and _may_use_kernels()


def _may_use_kernels() -> bool:
    """Whether C may compute layers: there is a library, and nobody wants gradients, another dtype, or to see each module."""
    return (
        kernels.LIBRARY.functions is not None
        and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
        and not _has_any_global_hook()
    )  # fmt: skip


class _Plan:
    """The callables for some rows of a cache, and the fingerprint of the model for which they were made.

    ahead: how many tokens of each row are decoded speculatively; None: one token, for good. gives_logits: whether the last
    callable returns the logits. tokens: None if C cannot compute all of them in one call.
    """

    def __init__(self, model: Any, block: type[nn.Module], rows: slice | Tensor, ahead: int | None, cache: Cache):
        self._fingerprint, self.ahead = ModelFingerprint(model, block, rows, cache, _cache_tensors), ahead
        self._config = model.config
        workspace: dict = {}
        layers = [
            _native_layer(each, block, layer, rows, workspace, ahead)
            for each, layer in zip(model.layers, cache.layers, strict=True)
        ]
        self.layers = _join(layers, NativeLayers)
        for _, each in self.layers:
            if type(each) is NativeLayers and ahead is not None:
                each.source = self._fingerprint
        last = self.layers[-1][1]
        self.gives_logits = type(last) is NativeLayers and last.add_head(model.norm_f, model.logits_layer)
        self.tokens = NativeTokens.of(model, self.layers, cache)

    def is_for(self, rows: slice | Tensor, ahead: int | None, cache: Cache) -> bool:
        """Whether the plan is for so many tokens of these rows of this cache."""
        return self.ahead == ahead and self._fingerprint.is_for_rows(rows, cache)

    def is_current(self, model: Any, cache: Cache) -> bool:
        """Whether nothing has changed for which the plan was made."""
        return self._config is model.config and self._fingerprint.is_current(cache)


class _PromptPlan:
    """The callables for tokens of prompts, and the fingerprint of the model for which they were made."""

    def __init__(self, model: Any, block: type[nn.Module]):
        self.fingerprint = ModelFingerprint(model, block)
        workspace: dict = {}
        layers = [_native_layer(each, block, None, slice(None), workspace, None, PIECE) for each in model.layers]
        self._layers = _join(layers, NativePrompt)

    def layers(self, cache: Cache, rows: slice | Tensor, tokens: int) -> list[tuple[int, Any]] | None:
        """[(index of its first block, callable)] for a call that reads so many tokens of each of these rows.

        None if C does not support the cache, or is slower for so many tokens.
        """
        found = []
        for index, each in self._layers:
            if type(each) is NativePrompt:
                each = each.call_for(cache.layers[index : index + len(each)], rows, tokens)
            found.append((index, each))
        return None if any(each is None for _, each in found) else found


class ModelFingerprint:
    """What was copied from a model, and from some rows of a cache (None: from none), to detect changes of either.

    block: the type of the blocks whose settings are compared. tensors_of: returns the tensors of a cache whose
    addresses are compared. The fingerprint references all modules and tensors of the model, but not the model itself,
    because the model has the fingerprint, and the cycle would keep it alive.
    """

    def __init__(
        self,
        model: Any,
        block: type[nn.Module],
        rows: slice | Tensor | None = None,
        cache: Cache | None = None,
        tensors_of: Callable[[Any], list[Tensor]] = lambda _: [],
    ):
        self._library, self._rows = kernels.LIBRARY, rows
        self._first, self._tensors_of = None if cache is None else weakref.ref(cache.layers[0]), tensors_of
        self._modules = [module for module in model.modules() if module is not model]
        named = [
            (owner, name, member)
            for module in (model, *self._modules)
            for owner in (module._modules, module._parameters, module._buffers)
            for name, member in owner.items()
        ]
        self._owners, self._names, self._members = zip(*named, strict=True)
        tensors = (member for member in self._members if isinstance(member, Tensor))
        self._tensors = list(filter(can_be_described, tensors))  # C has no addresses of others
        self._own = [module.__dict__ for module in self._modules]
        self._attributes, self._lengths = list(map(tuple, self._own)), list(map(len, self._owners))
        self._kinds, self._old_alterations = list(map(type, self._modules)), self._alterations()
        self._absent = [  # attributes that are None, such as a bias; names that begin with _ are torch's
            (own, name)
            for own in self._own
            for name, value in own.items()
            if value is None and not name.startswith("_")
        ]
        self._quantized = [module for module in self._modules if isinstance(module, QuantizedMatrix)]
        self._ends: list[Any] = [model.embeddings, model.norm_f, model.logits_layer]
        self._blocks: list[Any] = [(each, each.norm, each.mixer) for each in model.layers if type(each) is block]
        self._layouts, self._cache_layouts = LayoutsOfKept(self._tensors), Layouts(tensors_of(cache))
        self._old_settings, self._versions = self._settings(), self._new_versions()

    def is_for_rows(self, rows: slice | Tensor, cache: Cache) -> bool:
        """Whether the fingerprint is that of these rows of this cache."""
        return self._rows == rows and self._first is not None and self._first() is cache.layers[0]

    def is_current(self, cache: Cache | None = None) -> bool:
        """Whether nothing that was copied from the model and the cache has changed."""
        return (
            self._library is kernels.LIBRARY and all(map(is_, map(attrgetter("__dict__"), self._modules), self._own))
            and (self._versions.are_current() or self._is_same_model()) and self.has_addresses(cache)
        )  # fmt: skip

    def has_addresses(self, cache: Cache | None) -> bool:
        """Whether the tensors of the cache, and those that the model had, have the same addresses and layouts."""
        return self._layouts.are_current() and self._cache_layouts.are_those_of(self._tensors_of(cache))

    def _is_same_model(self) -> bool:
        """Whether the modules have the same members, types, hooks and settings, as far as plans depend on them.

        Their attributes also have the same names, and what was None still is. If so, their present versions count.
        """
        is_same = (
            all(map(is_, map(dict.get, self._owners, self._names), self._members))
            and list(map(tuple, self._own)) == self._attributes and list(map(len, self._owners)) == self._lengths
            and all(own.get(name, self) is None for own, name in self._absent)
            and list(map(type, self._modules)) == self._kinds and self._alterations() == self._old_alterations
            and self._settings() == self._old_settings
        )  # fmt: skip
        if is_same and have_versions():
            self._versions = self._new_versions()
        return is_same

    def _new_versions(self) -> Versions:
        """The versions of all dictionaries that `_is_same_model` reads."""
        hooks = [getattr(module, name) for module in self._modules for name in ("_forward_hooks", "_forward_pre_hooks")]
        owners = {id(owner): owner for owner in self._owners}.values()  # each one once
        return Versions([*owners, *self._own, *hooks], self._modules)

    def _alterations(self) -> tuple:
        """How many hooks each module has, and whether its forward was replaced (see `is_altered`)."""
        hooks = (
            list(map(len, map(attrgetter(name), self._modules))) for name in ("_forward_hooks", "_forward_pre_hooks")
        )
        return *hooks, list(map(contains, self._own, repeat("forward")))

    def _settings(self) -> list:
        of_ends = [vars(module).get(name) for module in self._ends for name in SETTINGS_OF_ENDS]
        return [*of_ends, *(each.dtype for each in self._quantized), *(settings_of(*each) for each in self._blocks)]


def _cache_tensors(cache: Cache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.conv, layer.state)]


def _join(layers: Iterable[nn.Module | NativeLayer], kind: type[NativeLayers]) -> list[tuple[int, Any]]:
    """[(index of the first layer, callable)]: consecutive native layers are joined to one `kind`, blocks stay alone."""
    runs: list[tuple[int, list[Any]]] = []
    for index, each in enumerate(layers):
        last = runs[-1][1][-1] if runs else None
        if type(each) is type(last) is NativeLayer and each.use is None and each.sum_dtype is last.sum_dtype:
            runs[-1][1].append(each)
        else:
            runs.append((index, [each]))
    return [(index, kind(run) if type(run[0]) is NativeLayer else run[0]) for index, run in runs]


def _native_layer(
    block: nn.Module,
    kind: type[nn.Module],
    cache: LayerCache | None,
    rows: slice | Tensor,
    workspace: dict,
    ahead: int | None,
    prompt_rows: int = 0,
) -> nn.Module | NativeLayer:
    """The `NativeLayer` of a block of type `kind`, or the block itself if the kernels do not support it.

    cache: None for prompts, which are read into different caches; these are like a new one.
    """
    if type(block) is not kind or not can_decode_natively(block):
        return block
    if cache is None:
        mixer: Any = block.mixer  # for torch's types it is a module or a tensor
        conv, state = mixer.new_cache(1).read()
    else:
        conv, state = cache.read(rows)
    native = NativeLayer.of(block, conv, state, workspace, ahead, prompt_rows)
    return block if native is None else native
