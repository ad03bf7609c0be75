"""The modules that the ModuleSpecs of `specs` name: norms, mixers, hybrid layers and the stack, for Megatron-Core's models.

Activations have Megatron's order, (seq, batch, hidden); with context parallelism each rank has its tokens in zigzag order.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.attention import SelfAttention
from torch import nn

from attention2d import Attention2D, CoreAttention
from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import idle_tensors, layout
from megatron_ssm.context.blocks import ContextRanks, check_block_length
from megatron_ssm.context.token_sharding import TokenSharding
from megatron_ssm.layers.cache import BatchInfo
from megatron_ssm.layers.mamba1 import MambaMixer
from megatron_ssm.layers.mamba2 import Mamba2Mixer
from megatron_ssm.layers.shared_attention import Positions, SharedBlock, SharedBlockInvocation, attend_with_cache
from megatron_ssm.models.context import check_schedule
from megatron_ssm.models.context_attention import ContextAttention
from megatron_ssm.parallel.layers import RMSNorm
from megatron_ssm.parallel.ranks import Ranks
from sparsefusion.collectives.counted import Counter

from .megatron_fields import config_of_layers
from .megatron_split import MAMBA1_NAMES, MAMBA2_NAMES, SplitModule


def _placement(config: Any) -> dict[str, Any]:
    """The dtype and the device of new parameters."""
    on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
    return dict(dtype=config.params_dtype, device="cpu" if on_cpu else torch.cuda.current_device())


def _refuse(config: Any, names: Iterable[str], where: str) -> None:
    """ValueError if one of these options of a TransformerConfig is set: there, it would change nothing."""
    for name in names:
        if value := getattr(config, name, None):
            raise ValueError(f"{name}={value!r} is not supported by {where}")


def _refuse_other_precisions(config: Any) -> None:
    """ValueError for products of 8 and 4 bits, which only Transformer Engine's linear layers have."""
    _refuse(config, ("fp8", "fp4"), "the linear layers of this spec, which compute in params_dtype")


def _tensor_ranks(config: Any, pg_collection: Any) -> Ranks:
    """The tensor-parallel ranks of Megatron's process groups."""
    return Ranks.of(pg_collection.tp, share=None, sequence_parallel=config.sequence_parallel)


def _context_ranks(pg_collection: Any) -> ContextRanks | None:
    """The context-parallel ranks of Megatron's process groups; None: each rank has whole sequences."""
    group = getattr(pg_collection, "cp", None)
    return None if group is None or group.size() == 1 else ContextRanks(group, Counter())


def _sharding(x: torch.Tensor, ranks: Ranks, context: ContextRanks | None, kernel: int) -> TokenSharding | None:
    """How the tokens of x (seq, batch, hidden) are sharded over the context ranks. kernel: taps of the convolution."""
    if context is None:
        return None
    tokens = x.shape[0] * (ranks.size if ranks.sequence_parallel else 1)
    check_block_length(tokens, kernel - 1, context)
    return TokenSharding(tokens * context.size, tokens, context)


class Norm(RMSNorm):
    """RMSNorm over the hidden size, with the epsilon of Megatron's configuration. ValueError for other norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float | None = None, **_: Any):
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            zero = " with layernorm_zero_centered_gamma" if config.layernorm_zero_centered_gamma else ""
            raise ValueError(f"normalization={config.normalization!r}{zero}: the layers of this spec have RMSNorm")
        super().__init__(hidden_size, config.layernorm_epsilon, **_placement(config))
        nn.init.ones_(self.weight)
        parameter: Any = self.weight
        parameter.sequence_parallel = config.sequence_parallel  # Megatron then sums its gradient over the ranks


class _Mixer(SplitModule):
    """What Mamba-1 and Mamba-2 mixers have in common in Megatron's models; see `Mamba2`."""

    family: str
    kernel: int
    context: ContextRanks | None

    def __init__(
        self, config: Any, d_model: int, layer_number: int, pg_collection: Any, family: str | None = None,
        given: Mapping[str, Any] | None = None, pp_layer_offset: int = 0, name: str | None = None,
    ) -> None:  # fmt: skip
        _refuse_other_precisions(config)
        ours = config_of_layers(config, family or self.family, given or {})
        ranks = _tensor_ranks(config, pg_collection)
        ours.check_ranks(ranks.size)
        head_ranks = () if ours.groups else (ranks.with_same_piece(ours.heads),)  # an argument of Mamba-1's mixer only
        mixer: Any = super()
        mixer.__init__(ours, ranks, *head_ranks, _context_ranks(pg_collection), **_placement(config))
        self.layer_number = layer_number
        self.prepare(layout(ours), "layers.0.mixer.", ranks, config, ours)

    def forward(
        self, hidden_states: torch.Tensor, inference_context: Any = None, *, inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """hidden_states (seq, batch, hidden) -> (the same shape, None): there is no bias that is still to be added.

        ValueError for inference with Megatron's engine, and for packed sequences.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError(
                "inference_context: save the weights with save_hugging_face, and generate with megatron_ssm"
            )
        if packed_seq_params is not None:
            raise ValueError("packed_seq_params: the mixers of megatron_ssm read one sequence per row")
        info = BatchInfo(sharding=_sharding(hidden_states, self.tensor_ranks, self.context, self.kernel))
        mixer: Any = super()
        return mixer.forward(hidden_states.transpose(0, 1), info).transpose(0, 1), None

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a sequence's convolution state and recurrent state on this rank, in our order of dimensions."""
        mixer: Any = self
        cache = mixer.new_cache(1)
        return tuple(cache.conv.shape[1:]), tuple(cache.state.shape[1:])


class Mamba2(_Mixer, Mamba2Mixer):  # type: ignore[misc]  # forward has Megatron's arguments
    """The Mamba-2 mixer of `layers.mamba2` as a mixer of Megatron's MambaLayer: (seq, batch, hidden) -> (the same, None).

    config: Megatron's TransformerConfig. pg_collection: its `tp` are the tensor-parallel ranks, its `cp` the context ranks.
    family, given: see `specs.stack_spec`. There may be more ranks than groups. ValueError for sizes that do not divide.

    Forward and backward send what `layers.mamba2.Mamba2Mixer` says.
    """

    names, family = MAMBA2_NAMES, "mamba2"


class Mamba1(_Mixer, MambaMixer):  # type: ignore[misc]  # forward has Megatron's arguments
    """The Mamba-1 mixer of `layers.mamba1` as a mixer of Megatron's MambaLayer; arguments and errors as for `Mamba2`."""

    names, family = MAMBA1_NAMES, "mamba"


def _check_residual_stream(options: Mapping[str, Any]) -> None:
    """ValueError for the option of Megatron's that gives the residual stream another dtype."""
    if options.get("residual_in_fp32"):
        raise ValueError("residual_in_fp32: hybrid layers have one residual stream, in the dtype of the parameters")


# Options of Megatron's attention that Zamba's shared block does not have.
_NOT_IN_SHARED_BLOCK = (
    "attention_dropout", "window_size", "qk_layernorm", "qk_clip", "add_qkv_bias", "attention_output_gate",
)  # fmt: skip


class LocalCoreAttention(CoreAttention):
    """`CoreAttention` between Megatron's own linear layers. ValueError for options that these layers do not have."""

    def __init__(self, config: Any, *arguments: Any, **options: Any):
        _refuse_other_precisions(config)
        super().__init__(config, *arguments, **options)


class Attention(SelfAttention):
    """Megatron's attention; ValueError for qk_layernorm, unless the spec has these norms."""

    def __init__(self, config: Any, submodules: Any, *arguments: Any, **options: Any):
        if submodules.q_layernorm is None:
            _refuse(config, ("qk_layernorm", "multi_latent_attention"), "the attention of this spec")
        super().__init__(config, submodules, *arguments, **options)


class HybridLayer(MambaLayer):
    """A hybrid layer of Zamba: x + mixer(norm(x + shared_block(x))). The stack gives it its invocation and its inputs.

    use: the parameters of this layer's own for its use of the shared block. shared_inputs: (the shared block, the embeddings
    (batch, seq, hidden), what the block must know of the tokens), while the stack runs. ValueError for residual_in_fp32.
    """

    def __init__(self, config: Any, submodules: Any, layer_number: int = 1, pg_collection: Any = None, **options: Any):
        _check_residual_stream(options)
        super().__init__(config, submodules, layer_number=layer_number, pg_collection=pg_collection)
        self.use: Invocation | None = None
        self.shared_inputs: tuple[SharedBlock, torch.Tensor, BatchInfo] | None = None

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, inference_context: Any = None, **others: Any
    ) -> torch.Tensor:
        """hidden_states (seq, batch, hidden) -> the same shape. attention_mask: ignored, attention is causal."""
        assert self.use is not None and self.shared_inputs is not None, "a hybrid layer runs only in its stack"
        block, embeddings, info = self.shared_inputs
        x = hidden_states.transpose(0, 1)
        x = (x + block(x, embeddings, self.use, info)).transpose(0, 1)
        packed = others.get("packed_seq_params")
        mixed = self.mixer(self.norm(x), inference_context=inference_context, packed_seq_params=packed)
        add = self.mamba_bda(training=self.training, fused=self.config.bias_dropout_fusion)
        return add(mixed, hidden_states, self.hidden_dropout)


class Invocation(SplitModule, SharedBlockInvocation):
    """`SharedBlockInvocation` with Megatron's sharded state dict."""


class Block(SplitModule, SharedBlock):
    """`SharedBlock` with Megatron's sharded state dict."""


class Blocks(nn.ModuleList):
    """The shared blocks of a stack, with Megatron's sharded state dict."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """That of every block; see `SplitModule.sharded_state_dict`."""
        blocks: Any = self
        states = (b.sharded_state_dict(f"{prefix}{i}.", sharded_offsets or (), metadata) for i, b in enumerate(blocks))
        return {name: tensor for state in states for name, tensor in state.items()}


class Refused(nn.Module):
    """In the place of a layer that a spec does not have: ValueError when a pattern asks for it."""

    def __init__(self, *_: Any, layer_number: int, symbol: str, **others: Any):
        raise ValueError(f"layer {layer_number} of the pattern is {symbol!r}, which this stack spec does not have")


# {the beginning of the name of a norm in Megatron's Transformer Engine specs, where it is fused with a linear layer: ours}
FUSED_NORMS = {
    "mixer.in_proj.layer_norm_": "norm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def _rename_fused_norms(_module: nn.Module, state: dict, prefix: str, *_others: Any) -> None:
    """Before `load_state_dict`: the names of Megatron's Transformer Engine specs become ours; FP8 scales are left out."""
    for name in [name for name in state if name.startswith(prefix)]:
        for theirs, ours in FUSED_NORMS.items():
            if theirs in name:
                state[name.replace(theirs, ours)] = state.pop(name)
        if name.endswith("._extra_state"):
            state.pop(name, None)


class Stack(MambaStack):
    """Megatron's stack of layers, with a final norm that needs no Transformer Engine, and Zamba's shared blocks.

    family, given: see `specs.stack_spec`. In the families zamba and zamba2 the symbol * is a hybrid layer; their blocks need
    the embeddings in every hybrid layer, so a pipeline is an error; residual_in_fp32 is, too. source: the configuration and
    the Hugging Face directory that the weights were loaded from, if they were.
    """

    def __init__(
        self, config: Any, submodules: Any, family: str, given: Mapping[str, Any], post_layer_norm: bool = True,
        pg_collection: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        _refuse_other_precisions(config)
        if family.startswith("zamba"):
            _check_residual_stream(options)
        super().__init__(config, submodules, post_layer_norm=False, pg_collection=pg_collection, **options)
        self.family, self.given = family, given
        self.source: tuple[Config, Path] | None = None
        self.post_layer_norm, self.shared = post_layer_norm, Blocks()
        self.register_load_state_dict_pre_hook(_rename_fused_norms)
        if self.post_process and post_layer_norm:
            self.final_norm = Norm(config, config.hidden_size)
        if family.startswith("zamba"):
            self._add_shared_blocks(config, pg_collection)

    def _add_shared_blocks(self, config: Any, groups: Any) -> None:
        if groups.pp.size() > 1:
            raise ValueError(
                f"{groups.pp.size()} pipeline stages: only the first has the embeddings that all blocks need"
            )
        _refuse(config, _NOT_IN_SHARED_BLOCK, "the shared block")
        ours, ranks = self.model_config(), _tensor_ranks(config, groups)
        fields, where = layout(ours), _placement(config)
        self.context_ranks = _context_ranks(groups)
        core = attend_with_cache if self.context_ranks is None else _context_attention(ours, config, groups)
        for index in range(ours.shared_copies):
            block = Block(ours, ranks, core, **where)
            block.prepare(fields, f"shared.{index}.", ranks, config, ours)
            self.shared.append(block)
        for index in ours.hybrid_layers:
            use = Invocation(ours, ranks, idle_tensors(ours, index), **where)
            use.prepare(fields, f"layers.{index}.use.", ranks, config, ours)
            self.layers[index].use = use
        self.hybrid, self.tensor_ranks, self.kernel = ours.hybrid_layers, ranks, ours.conv_kernel

    def model_config(self, **more: Any) -> Config:
        """Our configuration of the layers. more: fields of config.json that the stack does not know (vocab_size, ...)."""
        return config_of_layers(self.config, self.family, self.given, self.layer_type_list, **more)

    def forward(self, hidden_states: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        """hidden_states (seq, batch, hidden), the embeddings -> the same shape, after the final norm."""
        if not self.shared:
            return super().forward(hidden_states, *arguments, **options)
        if not isinstance(hidden_states, torch.Tensor):
            raise ValueError(
                "inference_context: save the weights with save_hugging_face, and generate with megatron_ssm"
            )
        info, layers = self._batch_info(hidden_states), [self.layers[index] for index in self.hybrid]
        embeddings = hidden_states.transpose(0, 1)
        for count, layer in enumerate(layers):
            layer.shared_inputs = self.shared[count % len(self.shared)], embeddings, info
        try:
            return super().forward(hidden_states, *arguments, **options)
        finally:
            for layer in layers:
                layer.shared_inputs = None

    def _batch_info(self, x: torch.Tensor) -> BatchInfo:
        """The positions of the tokens of x (seq, batch, hidden)."""
        sharding = _sharding(x, self.tensor_ranks, self.context_ranks, self.kernel)
        if sharding is not None:
            return BatchInfo(sharding=sharding, positions=Positions.of_sharded(sharding, x.shape[1], None, x.device))
        tokens = x.shape[0] * (self.tensor_ranks.size if self.tensor_ranks.sequence_parallel else 1)
        return BatchInfo(positions=Positions.of(x.shape[1], tokens, None, None, x.device))


def _context_attention(ours: Config, config: Any, groups: Any) -> ContextAttention:
    """The attention of the shared blocks over the context ranks, by the schedule that config.cp_comm_type names."""
    kind = config.cp_comm_type if isinstance(config.cp_comm_type, str | None) else config.cp_comm_type[0]
    core = CoreAttention(config, 1, None, "self", cp_comm_type=kind, pg_collection=groups)
    schedule: Attention2D = core.schedule
    check_schedule(schedule, ours, groups.tp)
    return ContextAttention(schedule, Counter())
