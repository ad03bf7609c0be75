"""Takes tokens through several layers by the C code of native/step.c: x + mixer(norm(x)) for each layer.

A `NativeLayers` replaces consecutive `Block`s while sequences are decoded, by one token each, or speculatively by several;
a `NativePrompt` (native_prompt.py) while prompts are read.
It gives C the addresses of the layers' tensors and caches, and C goes from layer to layer without Python. (The weights evict
Python's own data from the CPU's caches, so Python would read it from memory again for every layer.) C also does the
all-reduces that go through shared memory; for other all-reduces it returns to Python.
"""

import ctypes
import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_ssm.layers.cache import BatchInfo, Cache, LayerCache
from megatron_ssm.layers.mamba1 import Convolution, MambaMixer
from megatron_ssm.layers.mamba2 import Mamba2Mixer
from megatron_ssm.layers.pending_tokens import KeptTokens
from megatron_ssm.native import kernels, products
from megatron_ssm.native.arguments import address, are_float32
from megatron_ssm.native.kernels import LARGEST_STATE, LONGEST_KERNEL, TYPES, usable
from megatron_ssm.ops.quantized_matrices import Int4Weight, Int8Weight, QuantizedMatrix
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    Packed,
    RMSNorm,
    RowParallelLinear,
    has_plain_tensors,
    is_altered,
)
from sparsefusion.native.library import SIZE

from .native_head import NativeHead
from .native_sums import LayerSum, SentInC
from .structs import NO_MEMORY, Layer, Layers, Matrix

INLINED_MODULES = (  # step.c computes what these do, so their forward is not called
    MambaMixer,
    Mamba2Mixer,
    RMSNorm,
    ColumnParallelLinear,
    RowParallelLinear,
    Convolution,
    Packed,
    Int8Weight,
    Int4Weight,
)


def can_decode_natively(block: Any) -> bool:
    """Whether step.c can decode a block: all its modules are INLINED_MODULES, without hooks, which would not be called.

    The fields of packed parameters must be adjacent in memory; otherwise they would be copied for every token.
    """
    mixer, inside = block.mixer, (*block.norm.modules(), *block.mixer.modules())
    if not all(type(module) in INLINED_MODULES for module in inside) or any(map(is_altered, (block, *inside))):
        return False
    if not all(module.is_packed for module in inside if type(module) is Packed):
        return False
    if any(map(has_plain_tensors, inside)):
        return False
    if not all("weight" in module._modules for module in inside if type(module) is ColumnParallelLinear):
        return False
    if type(mixer) is MambaMixer:
        return mixer.channels // mixer.heads % 2 == 0 or mixer.heads == 1  # the kernel reads bfloat16 elements in pairs
    return mixer.local_norm or mixer.fused_norm


def settings_of(block: Any, norm: nn.Module, mixer: nn.Module) -> tuple:
    """What a `NativeLayer` copies from a block besides its tensors, and what a caller may change afterwards."""
    own = vars(mixer)
    return (
        getattr(norm, "eps", None), block.residual_in_fp32, block.use, own.get("ranks"), own.get("head_ranks"),
        own.get("inner_norm_eps"), own.get("eps"), own.get("dt_limit"), own.get("group_channels"),
        getattr(getattr(mixer, "out_proj", None), "ranks", None),
    )  # fmt: skip


class NativeLayer:
    """A block as step.c computes it for some tokens of each of some sequences per call. layer: step.c's `Layer`. dtype: that
    of the block's activations.

    conv, state: the sequences' rows of the layer's cache, which are updated in place. workspace: temporaries {(name, dtype,
    shape): tensor}, which consecutive layers share. A call decodes one token of each sequence; or `ahead` tokens, if that
    is not None, speculatively; or tokens of prompts, in all at most prompt_rows, if that is not 0.
    """

    @classmethod
    def of(
        cls, block: Any, conv: Tensor, state: Tensor, workspace: dict, ahead: int | None = None, prompt_rows: int = 0
    ) -> "NativeLayer | None":
        """The layer of a block that `can_decode_natively`, or None if the kernels do not support its tensors."""
        mixer = block.mixer
        in_bias = None if mixer.in_proj.bias is None else mixer.in_proj.bias()
        weight, bias = mixer.conv.tensors()
        typed = dict(norm=block.norm.weight, conv=weight, conv_bias=bias, in_bias=in_bias, out_bias=mixer.out_proj.bias,
                     history=conv)  # fmt: skip
        float32 = dict(A_log=mixer.A_log, D=mixer.D, dt_bias=mixer.dt_bias, state=state)
        matrices = dict(in_proj=mixer.in_proj.weight(), out_proj=mixer.out_proj.weight)
        if type(mixer) is Mamba2Mixer:
            typed["gated_weight"] = mixer.norm_weight
        else:
            matrices |= dict(x_proj=mixer.x_proj, dt_proj=mixer.dt_proj)
        supported = _is_supported(typed, float32, matrices, len(conv) * (ahead or 1), mixer.heads)
        return cls(block, typed, float32, matrices, workspace, ahead, prompt_rows) if supported else None

    def __init__(
        self, block: Any, typed: dict[str, Any], float32: dict[str, Tensor], matrices: dict[str, Any], workspace: dict,
        ahead: int | None, prompt_rows: int,
    ):  # fmt: skip
        mixer, norm, conv, state = block.mixer, block.norm, typed["history"], float32["state"]
        self.use, self.sum_dtype, mamba2 = block.use, block.sum_dtype, type(mixer) is Mamba2Mixer
        least_dt, most_dt = mixer.dt_limit if mamba2 and prompt_rows else (-math.inf, math.inf)
        self.layer = Layer(
            **{name: Matrix.of(weight) for name, weight in matrices.items()},
            **{name: address(tensor) for name, tensor in {**typed, **float32}.items()},
            batch=len(conv), tokens=prompt_rows or ahead or 1, size=len(norm.weight), N=mixer.state_size,
            taps=mixer.kernel, mamba2=mamba2, history_stride=conv.stride(0), state_stride=state.stride(0),
            eps=norm.eps, type=TYPES[norm.weight.dtype],
            sum_type=TYPES[self.sum_dtype], speculative=ahead is not None, least_dt=least_dt, most_dt=most_dt,
            **(_mamba2_sizes(mixer) if mamba2 else _mamba_sizes(mixer)),
        )  # fmt: skip
        self._workspace, self.dtype, self._kept = workspace, norm.weight.dtype, []
        self._row_sizes = conv.shape[1:], state.shape[1:]
        self._products = _products(matrices, mixer.heads)
        self.layer.next_state, self.layer.next_stride = self.layer.state, self.layer.state_stride
        if ahead is not None:
            after = self._tensor("next_state", *state.shape, dtype=torch.float32)
            self.layer.next_stride = after.stride(0)
        self.sums = self._mamba2_sums(mixer) if mamba2 else self._mamba_sums(mixer)
        for name, each in self.sums.items():
            setattr(self.layer, name, each.struct)

    def holds(self, conv: Tensor, state: Tensor) -> bool:
        """Whether rows of a cache have the dtypes, the sizes and the layout of those for which this was made."""
        like = ((self.dtype, self._row_sizes[0]), (torch.float32, self._row_sizes[1]))
        return all(
            t.dtype is dtype and t.shape[1:] == sizes and t.is_cpu and t.is_contiguous()
            for t, (dtype, sizes) in zip((conv, state), like, strict=True)
        )

    def is_fast(self, rows: int) -> bool:
        """Whether C has kernels for the products of so many tokens."""
        return all(products.has_kernel(dtype, self.dtype, rows, *layout) for dtype, *layout in self._products)

    def _tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the workspace (dtype None: the model's); its address is written into the C struct."""
        key = name, dtype or self.dtype, shape
        if key not in self._workspace:
            self._workspace[key] = torch.empty(shape, dtype=key[1], device="cpu")
        setattr(self.layer, name, self._workspace[key].data_ptr())
        return self._workspace[key]

    def _kept_tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """As `_tensor`; if the tokens are speculative, a tensor of this layer's own, which `keep_tokens` reads."""
        if not self.layer.speculative:
            return self._tensor(name, *shape, dtype=dtype)
        self._kept.append(torch.empty(shape, dtype=dtype or self.dtype, device="cpu"))
        setattr(self.layer, name, self._kept[-1].data_ptr())
        return self._kept[-1]

    def _mamba_sums(self, mixer: MambaMixer) -> dict[str, LayerSum]:
        """{name in Layer: all-reduce}; also allocates the workspace that step.c's mamba_in and mamba_out need."""
        layer = self.layer
        batch, tokens, size = layer.batch, layer.tokens, layer.size
        self._kept_tensor("work", batch * tokens * (size + 5 * layer.channels))
        parameters = self._kept_tensor("parameters", batch, tokens, layer.heads * (layer.rank + 2 * layer.N))
        part = self._tensor("part", batch, tokens, size)
        return dict(
            inner=LayerSum(mixer.head_ranks, parameters, is_exact=True), outer=LayerSum(mixer.out_proj.ranks, part)
        )

    def _mamba2_sums(self, mixer: Mamba2Mixer) -> dict[str, LayerSum]:
        """{name in Layer: all-reduce}; also allocates the workspace that step.c's mamba2_step needs."""
        layer = self.layer
        batch, tokens, size = layer.batch, layer.tokens, layer.size
        mixed = layer.channels + 2 * layer.groups * layer.N
        self._kept_tensor("work", batch * tokens * (size + 3 * layer.channels + 2 * mixed + layer.heads))
        self._kept_tensor("dt", batch, tokens, layer.heads, dtype=torch.float32)
        part, squares = self._tensor("part", batch, tokens, size), None
        if mixer.fused_norm:
            squares = self._tensor("squares", batch, tokens, 1, dtype=torch.float32)
            if self.dtype is not torch.float32:
                part = self._tensor("wide_part", batch, tokens, size, dtype=torch.float32)
        return dict(outer=LayerSum(mixer.out_proj.ranks, part, squares))


class Source(Protocol):
    """The model and the cache whose tensors' addresses C has. It keeps the model's tensors alive."""

    def has_addresses(self, cache: Cache) -> bool:
        """Whether the tensors, and those of this cache, still have the addresses and layouts that C has."""


class NativeLayers:
    """Consecutive `NativeLayer`s of one sum_dtype, which are called like one block. address: of step.c's `Layers`.

    Only the first one may invoke a shared attention block, which runs in Python before them. head: see `add_head`. source:
    what a decode plan sets for speculative tokens, which are accepted later.
    """

    def __init__(self, layers: list[NativeLayer]):
        self._native_layers, self.use, self.dtype = layers, layers[0].use, layers[0].sum_dtype
        self._structs = (Layer * len(layers))(*(layer.layer for layer in layers))
        self._progress = Layers(layers=ctypes.addressof(self._structs), count=len(layers))
        self.address = ctypes.addressof(self._progress)
        self.head: NativeHead | None = None
        self.source: Source | None = None
        self.sent = SentInC([each for layer in layers for each in layer.sums.values()])

    def add_head(self, norm: nn.Module, head: nn.Module) -> bool:
        """Compute the logits too, if C can: then True, and a call returns `head.logits(norm(x))` instead of x.

        norm, head: those of the model that come after these layers.
        """
        last = self._native_layers[-1]
        self.head = NativeHead.of(norm, head, last.dtype, last.layer.size, last.layer.batch * last.layer.tokens)
        if self.head is not None:
            self._progress.head = self.head.address
        return self.head is not None

    def __len__(self) -> int:
        return len(self._native_layers)

    def __deepcopy__(self, memo: dict) -> "NativeLayers":
        raise RuntimeError("a cache cannot be copied between speculative_logits and accept")

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self._native_layers[0].layer.batch

    @property
    def size(self) -> int:
        """The size of the residual stream."""
        return self._native_layers[0].layer.size

    @property
    def tokens(self) -> int:
        """The number of tokens of each sequence."""
        return self._native_layers[0].layer.tokens

    @property
    def speculative(self) -> bool:
        """Whether the tokens may be taken back."""
        return bool(self._native_layers[0].layer.speculative)

    def __call__(
        self, x: Tensor, info: BatchInfo, cache: LayerCache | None = None, shared: Any = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x (batch, seq, hidden) -> the same shape, as `Block` does, or logits: see `add_head`.

        The all-reduces that C does are counted at the end.
        """
        x, given = self.inputs(x, info, cache, shared, embeddings)
        total = torch.empty_like(x)
        logits = None if self.head is None else self.head.new_logits(*x.shape[:2])
        self.sent.check()
        self._compute(x, given, total)
        self.sent.count()
        if info.speculative and cache is not None:
            cache.pending = self  # the first layer's stands for all
        return total if logits is None else logits

    def inputs(
        self, x: Tensor, info: BatchInfo, cache: LayerCache | None, shared: Any, embeddings: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What the first layer adds to, and what it reads; both without gaps, in the dtype of the residual stream."""
        x = x.to(self.dtype).contiguous()
        if self.use is None:
            return x, x
        return x, (x + shared(x, embeddings, self.use, info, cache)).to(self.dtype).contiguous()

    def _compute(self, x: Tensor, given: Tensor, total: Tensor) -> None:
        """Write the last layer's result into total; the three have one shape, and no gaps."""
        self.begin(x, given, total)
        while code := kernels.functions().decode(self.address, torch.get_num_threads()):
            self.finish(code)

    def begin(self, x: Tensor, given: Tensor, total: Tensor) -> None:
        """Let C's next call of `decode` begin with the first layer, and with these tensors: see `_compute`."""
        c = self._progress
        c.x, c.given, c.total, c.layer, c.begun = x.data_ptr(), given.data_ptr(), total.data_ptr(), 0, 0

    def check(self, cache: Cache) -> None:
        """See `Pending`."""
        if self.source is None or not self.source.has_addresses(cache):
            raise RuntimeError(
                "tensors of the model or of the cache have moved since speculative_logits read these tokens, "
                "so accept cannot keep them"
            )

    def advance_cache(self, cache: Cache, layer: int, kept: KeptTokens) -> None:
        """Advance the caches of all these layers by the tokens that are kept; see `Pending`."""
        counts = (SIZE * len(kept.counts))(*kept.counts)
        kernels.functions().keep_tokens(self.address, ctypes.addressof(counts), torch.get_num_threads())

    def finish(self, code: int) -> None:
        """Finish the all-reduce at which C returned this code. MemoryError if it had no memory."""
        kernels.raise_if_failed(code == NO_MEMORY)
        name, layer = ("inner", "outer")[self._progress.begun - 1], self._progress.layer
        self._native_layers[layer].sums[name].finish(code, getattr(self._structs[layer], name))


def _mamba_sizes(mixer: MambaMixer) -> dict[str, float]:
    eps = -1 if mixer.inner_norm_eps is None else mixer.inner_norm_eps
    return dict(channels=mixer.channels, heads=mixer.heads, rank=mixer.splits[0], inner_eps=eps)


def _mamba2_sizes(mixer: Mamba2Mixer) -> dict[str, float]:
    return dict(channels=mixer.rows["x"], heads=mixer.heads, groups=mixer.groups, group_channels=mixer.group_channels,
                inner_eps=mixer.eps)  # fmt: skip


def _has_gaps(name: str, heads: int) -> bool:
    """Whether step.c multiplies head by head: in x_proj their columns are side by side, in dt_proj their results."""
    return name in ("x_proj", "dt_proj") and heads > 1


def _products(matrices: dict[str, Tensor | QuantizedMatrix], heads: int) -> set[tuple]:
    """(dtype, columns, whether there are gaps) of the matrices of a layer."""
    values = {name: m if isinstance(m, Tensor) else m.values for name, m in matrices.items()}
    return {(v.dtype, products.columns_of(v), _has_gaps(name, heads)) for name, v in values.items()}


def _is_supported(
    typed: dict[str, Any],
    float32: dict[str, Tensor],
    matrices: dict[str, Tensor | QuantizedMatrix],
    batch: int,
    heads: int,
) -> bool:
    """Whether step.c supports the dtypes and sizes of these tensors, and all of them are contiguous."""
    return (
        usable(typed["norm"], *typed.values()) and are_float32(*float32.values())
        and all(Matrix.supports(m, typed["norm"].dtype, batch, _has_gaps(name, heads)) for name, m in matrices.items())
        and typed["conv"].shape[-1] <= LONGEST_KERNEL and float32["state"].shape[-2] <= LARGEST_STATE
        and all(t is None or t.is_contiguous() for t in (*typed.values(), *float32.values()))
    )  # fmt: skip
