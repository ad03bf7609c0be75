"""The modules of the ModuleSpecs in `specs`: norms, mixers, hybrid layers and the stack, for Megatron-Core's models.

Activations have Megatron's layout, (seq, batch, hidden). With context parallelism, ranks hold tokens in zigzag order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.attention import SelfAttention
from torch import nn

from attention2d import Attention2D, CoreAttention
from commfabric.collectives.counted import Counter
from megatron_ssm.layers import families
from megatron_ssm.layers.attention import attend_with_cache
from megatron_ssm.layers.call import Call, Positions
from megatron_ssm.layers.context_attention import ContextAttention
from megatron_ssm.layers.operator import Operator, Place, run
from megatron_ssm.layers.shared_block import SharedBlock
from megatron_ssm.model.context import check_schedule
from megatron_ssm.parallel.blocks import ContextRanks, check_block_length
from megatron_ssm.parallel.layers import RMSNorm
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.token_sharding import TokenSharding
from megatron_ssm.spec.stack import Part
from megatron_ssm.spec.stack import Stack as ModelStack

from .megatron_fields import config_of_layers
from .megatron_split import SplitModule


def _dtype_and_device(config: Any) -> dict[str, Any]:
    on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
    return dict(dtype=config.params_dtype, device="cpu" if on_cpu else torch.cuda.current_device())


def _check_unset(config: Any, names: Iterable[str], layer: str) -> None:
    """Raise ValueError if one of these options of a TransformerConfig is set. layer: the layer that does not support it."""
    for name in names:
        if value := getattr(config, name, None):
            raise ValueError(f"{name}={value!r} is not supported by {layer}")


def _check_precision(config: Any) -> None:
    """Raise ValueError for 8-bit and 4-bit products, which only Transformer Engine's linear layers support."""
    _check_unset(config, ("fp8", "fp4"), "the linear layers of this spec, which compute in params_dtype")


def _tensor_ranks(config: Any, pg_collection: Any) -> Ranks:
    return Ranks.of(pg_collection.tp, share=None, sequence_parallel=config.sequence_parallel)


def _context_ranks(pg_collection: Any) -> ContextRanks | None:
    group = getattr(pg_collection, "cp", None)
    return None if group is None or group.size() == 1 else ContextRanks(group, Counter())


def _sharding(x: torch.Tensor, ranks: Ranks, context: ContextRanks | None, history: int) -> TokenSharding | None:
    """The split over the context ranks of the tokens in x (seq, batch, hidden); None without context ranks.

    history: the number of earlier tokens that the convolution reads.
    """
    if context is None:
        return None
    tokens = x.shape[0] * (ranks.size if ranks.sequence_parallel else 1)
    check_block_length(tokens, history, context)
    return TokenSharding(tokens * context.size, tokens, context)


class Norm(RMSNorm):
    """RMSNorm over the hidden size, with the epsilon of Megatron's configuration. Raises ValueError for other norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float | None = None, **_: Any):
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            offset = " with layernorm_zero_centered_gamma" if config.layernorm_zero_centered_gamma else ""
            raise ValueError(f"normalization={config.normalization!r}{offset}: the layers of this spec have RMSNorm")
        super().__init__(hidden_size, config.layernorm_epsilon, **_dtype_and_device(config))
        nn.init.ones_(self.weight)
        parameter: Any = self.weight
        parameter.sequence_parallel = config.sequence_parallel  # if True, Megatron sums the gradient over the ranks


class Mixer(SplitModule, Operator):
    """The operator of a family's layers as a mixer of Megatron's MambaLayer.

    The class of an instance is a subclass of both `Mixer` and the operator's class, so the parameters are those of the
    operator. There may be more ranks than groups. Sends the messages of the operator and the sum of its output.

    Args:
        config: Megatron's TransformerConfig.
        pg_collection: The process groups: `tp` for the tensor-parallel ranks, `cp` for the context ranks.
        family, hf_fields: See `specs.stack_spec`.

    Raises:
        ValueError: Sizes do not divide over the ranks.
    """

    history: int
    context: ContextRanks | None

    def __new__(
        cls, config: Any, d_model: int, layer_number: int, pg_collection: Any, family: str, hf_fields: Mapping[str, Any],
        **_: Any,
    ) -> "Mixer":  # fmt: skip
        _check_precision(config)
        ranks, model_config = _tensor_ranks(config, pg_collection), config_of_layers(config, family, hf_fields)
        model_config.check_ranks(ranks.size)
        (part,) = model_config.layers[0][0].operators
        operator = part.spec.build(Place(ranks, _context_ranks(pg_collection), **_dtype_and_device(config)))
        operator.__class__ = type(f"Megatron{type(operator).__name__}", (Mixer, type(operator)), {})
        operator.history = part.spec.history
        operator.prepare_part(replace(part, hf=""), ranks, config, model_config.num_layers)
        return operator

    def __init__(self, config: Any, d_model: int, layer_number: int, *_: Any, **options: Any):
        self.layer_number = layer_number

    def forward(
        self, hidden_states: torch.Tensor, inference_context: Any = None, *, inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """hidden_states (seq, batch, hidden) -> ((seq, batch, hidden), no bias).

        Raises ValueError for inference with Megatron's engine, and for packed sequences.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError(
                "inference_context: save the weights with save_hugging_face, and generate with megatron_ssm"
            )
        if packed_seq_params is not None:
            raise ValueError("packed_seq_params: the mixers of megatron_ssm read one sequence per row")
        call = Call(sharding=_sharding(hidden_states, self.tensor_ranks, self.context, self.history))
        return run(self, hidden_states.transpose(0, 1), call).transpose(0, 1), None  # run: (batch, seq, hidden)

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of one sequence's convolution state and recurrent state on this rank, in our layout."""
        state = self.new_state(1)
        return tuple(tuple(tensor.shape[1:]) for tensor in (state.fixed.values() if state is not None else ()))


def _check_residual_stream(options: Mapping[str, Any]) -> None:
    if options.get("residual_in_fp32"):
        raise ValueError("residual_in_fp32: hybrid layers have one residual stream, in the dtype of the parameters")


# Options of Megatron's attention that shared blocks do not support.
_UNSUPPORTED_BY_SHARED_BLOCKS = (
    "attention_dropout", "window_size", "qk_layernorm", "qk_clip", "add_qkv_bias", "attention_output_gate",
)  # fmt: skip


class LocalCoreAttention(CoreAttention):
    """`CoreAttention` between Megatron's own linear layers. Raises ValueError for fp8 and fp4."""

    def __init__(self, config: Any, *arguments: Any, **options: Any):
        _check_precision(config)
        super().__init__(config, *arguments, **options)


class Attention(SelfAttention):
    """Megatron's attention. Raises ValueError for qk_layernorm and multi_latent_attention if the spec lacks these norms."""

    def __init__(self, config: Any, submodules: Any, *arguments: Any, **options: Any):
        if submodules.q_layernorm is None:
            _check_unset(config, ("qk_layernorm", "multi_latent_attention"), "the attention of this spec")
        super().__init__(config, submodules, *arguments, **options)


class HybridLayer(MambaLayer):
    """A hybrid layer: x + mixer(norm(x + shared_block(x))). Raises ValueError for residual_in_fp32.

    Attributes:
        use: The parameters of this layer's invocation of the shared block. The stack sets it.
        shared_inputs: (shared block, embeddings (batch, seq, hidden), call), which the stack sets while it runs.
    """

    def __init__(self, config: Any, submodules: Any, layer_number: int = 1, pg_collection: Any = None, **options: Any):
        _check_residual_stream(options)
        super().__init__(config, submodules, layer_number=layer_number, pg_collection=pg_collection)
        self.use: Invocation | None = None
        self.shared_inputs: tuple[SharedBlock, torch.Tensor, Call] | None = None

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, inference_context: Any = None, **others: Any
    ) -> torch.Tensor:
        """hidden_states (seq, batch, hidden) -> (seq, batch, hidden). attention_mask is ignored: attention is causal."""
        assert self.use is not None and self.shared_inputs is not None, "a hybrid layer runs only in its stack"
        block, embeddings, call = self.shared_inputs
        x = hidden_states.transpose(0, 1)  # (batch, seq, hidden)
        x = (x + block(x, embeddings, self.use, call)).transpose(0, 1)  # (seq, batch, hidden)
        packed = others.get("packed_seq_params")
        mixed = self.mixer(self.norm(x), inference_context=inference_context, packed_seq_params=packed)
        add = self.mamba_bda(training=self.training, fused=self.config.bias_dropout_fusion)
        return add(mixed, hidden_states, self.hidden_dropout)


class Invocation(SplitModule):
    """The parameters of one invocation of a shared block, with Megatron's sharded state dict."""


class Block(SplitModule):
    """A shared block, with Megatron's sharded state dict."""


def _build_part(base: type[SplitModule], part: Part, place: Place, config: Any, layers: int) -> Any:
    """The module of a part, as an instance of `base` as well. config: Megatron's TransformerConfig."""
    module = part.spec.build(place)
    module.__class__ = type(base.__name__, (base, type(module)), {})
    module.prepare_part(part, place.ranks, config, layers)
    return module


class Blocks(nn.ModuleList):
    """The shared blocks of a stack, with Megatron's sharded state dict."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The sharded state dicts of all blocks in one dictionary; see `SplitModule.sharded_state_dict`."""
        blocks: Any = self
        states = (b.sharded_state_dict(f"{prefix}{i}.", sharded_offsets or (), metadata) for i, b in enumerate(blocks))
        return {name: tensor for state in states for name, tensor in state.items()}


class UnsupportedLayer(nn.Module):
    """A placeholder for a layer that a spec does not have. Raises ValueError if the pattern contains its symbol."""

    def __init__(self, *_: Any, layer_number: int, symbol: str, **others: Any):
        raise ValueError(f"layer {layer_number} of the pattern is {symbol!r}, which this stack spec does not have")


# {prefix of a norm that Megatron's Transformer Engine specs fuse with a linear layer: our prefix}
FUSED_NORMS = {
    "mixer.in_proj.layer_norm_": "norm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def _rename_fused_norms(_module: nn.Module, state: dict, prefix: str, *_others: Any) -> None:
    """Rename the norms of Megatron's Transformer Engine specs, and drop FP8 scales, before `load_state_dict`."""
    for name in [name for name in state if name.startswith(prefix)]:
        for theirs, ours in FUSED_NORMS.items():
            if theirs in name:
                state[name.replace(theirs, ours)] = state.pop(name)
        if name.endswith("._extra_state"):
            state.pop(name, None)


class Stack(MambaStack):
    """Megatron's stack of layers, with a final norm that does not need Transformer Engine, and with shared blocks.

    In families that share blocks, the symbol * is a hybrid layer. These families support neither residual_in_fp32 nor
    pipeline parallelism, because every hybrid layer needs the embeddings.

    Attributes:
        family, hf_fields: See `specs.stack_spec`.
        source: (configuration, directory) of the Hugging Face checkpoint from which the weights were loaded, or None.
    """

    def __init__(
        self, config: Any, submodules: Any, family: str, hf_fields: Mapping[str, Any], post_layer_norm: bool = True,
        pg_collection: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        _check_precision(config)
        if families.FAMILIES[family].shares_blocks:
            _check_residual_stream(options)
        super().__init__(config, submodules, post_layer_norm=False, pg_collection=pg_collection, **options)
        self.family, self.hf_fields = family, hf_fields
        self.source: tuple[ModelStack, Path] | None = None
        self.post_layer_norm, self.shared = post_layer_norm, Blocks()
        self.register_load_state_dict_pre_hook(_rename_fused_norms)
        if self.post_process and post_layer_norm:
            self.final_norm = Norm(config, config.hidden_size)
        if families.FAMILIES[family].shares_blocks:
            self._add_shared_blocks(config, pg_collection)

    def _add_shared_blocks(self, config: Any, groups: Any) -> None:
        if groups.pp.size() > 1:
            raise ValueError(
                f"{groups.pp.size()} pipeline stages: only the first has the embeddings that all blocks need"
            )
        _check_unset(config, _UNSUPPORTED_BY_SHARED_BLOCKS, "the shared block")
        model_config, ranks = self.model_config(), _tensor_ranks(config, groups)
        self.context_ranks = _context_ranks(groups)
        core = attend_with_cache if self.context_ranks is None else _context_attention(model_config, config, groups)
        place = Place(ranks, None, core, **_dtype_and_device(config))
        for part in model_config.shared:
            self.shared.append(_build_part(Block, part, place, config, model_config.num_layers))
        self.block_of_layer: dict[int, int] = {}
        for index, (unit,) in enumerate(model_config.layers):
            if unit.side is not None:
                layer = self.layers[index]
                layer.use = _build_part(Invocation, unit.side.part, place, config, model_config.num_layers)
                self.block_of_layer[index] = unit.side.shared
        self.tensor_ranks, self.history = ranks, model_config.history

    def model_config(self, **further_fields: Any) -> ModelStack:
        """Our configuration of the layers. further_fields: fields of config.json, such as vocab_size."""
        return config_of_layers(self.config, self.family, self.hf_fields, self.layer_type_list, **further_fields)

    def forward(self, hidden_states: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        """Embeddings (seq, batch, hidden) -> hidden states (seq, batch, hidden) after the final norm."""
        if not self.shared:
            return super().forward(hidden_states, *arguments, **options)
        if not isinstance(hidden_states, torch.Tensor):
            raise ValueError(
                "inference_context: save the weights with save_hugging_face, and generate with megatron_ssm"
            )
        call, embeddings = self._call(hidden_states), hidden_states.transpose(0, 1)
        for index, block in self.block_of_layer.items():
            self.layers[index].shared_inputs = self.shared[block], embeddings, call
        try:
            return super().forward(hidden_states, *arguments, **options)
        finally:
            for index in self.block_of_layer:
                self.layers[index].shared_inputs = None

    def _call(self, x: torch.Tensor) -> Call:
        """The description of a call with the tokens of x (seq, batch, hidden)."""
        sharding = _sharding(x, self.tensor_ranks, self.context_ranks, self.history)
        if sharding is not None:
            return Call(sharding=sharding, positions=Positions.of_sharded(sharding, None, x.shape[1], x.device))
        tokens = x.shape[0] * (self.tensor_ranks.size if self.tensor_ranks.sequence_parallel else 1)
        return Call(positions=Positions.of(None, x.shape[1], tokens, None, x.device))


def _context_attention(model_config: ModelStack, config: Any, groups: Any) -> ContextAttention:
    """The attention of the shared blocks over the context ranks, with the schedule of config.cp_comm_type."""
    kind = config.cp_comm_type if isinstance(config.cp_comm_type, str | None) else config.cp_comm_type[0]
    core = CoreAttention(config, 1, None, "self", cp_comm_type=kind, pg_collection=groups)
    schedule: Attention2D = core.schedule
    check_schedule(schedule, model_config, groups.tp)
    return ContextAttention(schedule, Counter())
