"""Weights between Megatron's models and Hugging Face directories.

Two kinds of models have a counterpart in Hugging Face's format: a MambaModel (HybridModel since Megatron-Core 0.18) that
`specs.stack_spec` built from our layers, and Megatron's own GPTModel with gated delta nets (see `megatron_gpt`). Their
parameters are those of our `Model` under other names, with the same split over tensor-parallel ranks, so only saving sends
messages.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from commfabric.collectives.agreement import together
from megatron_ssm.checkpoints.hf import build, load, save
from megatron_ssm.layers import families
from megatron_ssm.spec.stack import Stack as ModelStack

from . import megatron_gpt
from .megatron_fields import layer_pattern, spec_options, transformer_options
from .megatron_layers import Stack
from .specs import stack_spec

# {Megatron's name of a parameter outside of the layers: our name}. Other parameters of the decoder have our names.
_NAMES = {
    "embedding.word_embeddings.weight": "embeddings.weight",
    "decoder.final_norm.weight": "norm_f.weight",
    "decoder.final_layernorm.weight": "norm_f.weight",  # of a GPTModel
    "output_layer.weight": "lm_head.weight",
}
# {Megatron's name of a parameter in a layer of its own attention or MLP: our name in the layer}.
_NAMES_IN_LAYERS = {
    "input_layernorm.weight": "norm.weight",
    "pre_mlp_layernorm.weight": "norm.weight",
    "self_attention.linear_proj.weight": "mixer.o_proj.weight",
    "mlp.linear_fc1.weight": "mixer.gate_up.weight.up",
    "mlp.linear_fc2.weight": "mixer.down_proj.weight",
}
_QKV = "self_attention.linear_qkv.weight"  # rows of each key/value head: its query heads, the key head, the value head


def our_name(name: str) -> str:
    """Our name of a parameter of a MambaModel."""
    name = _NAMES.get(name, name.removeprefix("decoder."))
    layers, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    return f"layers.{index}.{_NAMES_IN_LAYERS[rest]}" if layers == "layers" and rest in _NAMES_IN_LAYERS else name


def in_our_names(named: Iterable[tuple[str, torch.Tensor]], config: ModelStack) -> dict[str, torch.Tensor]:
    """The parameters of a MambaModel or GPTModel on this rank, or their gradients, under our names.

    Parts of packed tensors are views. Queries, gates, keys and values of Megatron's own attention have the shape (key/value
    heads of this rank, rows per head, hidden); other parameters have the shape that they have in our `Model`.

    Args:
        named: (Megatron's name, parameter or gradient).
    """
    parameters: dict[str, torch.Tensor] = {}
    for theirs, tensor in named:
        if config.family in megatron_gpt.FAMILIES and theirs.startswith(megatron_gpt.IN_LAYERS):
            parameters |= megatron_gpt.in_our_names(theirs, tensor, config)
            continue
        name = our_name(theirs)
        if not name.endswith(_QKV):
            parameters[name] = tensor
            continue
        sizes = config.attentions[0]
        queries = sizes.heads // sizes.kv_heads * sizes.head_dim
        rows = [queries, sizes.head_dim, sizes.head_dim]
        parts = tensor.unflatten(0, (-1, sum(rows))).split(rows, dim=1)  # (key/value heads, rows, hidden)
        prefix = name.removesuffix(_QKV) + "mixer.qkv.weight."
        parameters |= {prefix + letter: part for letter, part in zip("qkv", parts, strict=True)}
    return parameters


def model_class() -> tuple[type, str]:
    """(Megatron's class of models with a layer pattern, the name of the pattern's argument)."""
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ModuleNotFoundError:  # before Megatron-Core 0.18
        from megatron.core.models.mamba import MambaModel

        return MambaModel, "hybrid_override_pattern"
    return HybridModel, "hybrid_layer_pattern"


def megatron_model(config: ModelStack, max_sequence_length: int, tensor_ranks: int = 1, **options: Any) -> nn.Module:
    """Megatron's model of a configuration: a MambaModel or HybridModel that is built from `specs.stack_spec`.

    For the families `megatron_gpt.FAMILIES`, it is a GPTModel of Megatron's own layers, which needs CUDA, Transformer Engine
    and flash-linear-attention. The process groups are those of Megatron's parallel_state.

    Megatron splits the vocabulary evenly over the tensor-parallel ranks. If necessary, the embeddings and the output layer
    are padded. The logits of the padding are the lowest number, so that the padding changes neither the loss nor gradients.
    It is not saved.

    Args:
        config: The configuration.
        max_sequence_length: The largest number of tokens of a sequence.
        tensor_ranks: The number of tensor-parallel ranks.
        options: Arguments of the TransformerConfig, such as params_dtype. The default of use_cpu_initialization is False
            after Megatron's `model_parallel_cuda_manual_seed` on a GPU, which initialization on GPUs needs. Otherwise it is
            True, and the model is on the CPU.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_cpu = dict(use_cpu_initialization=not (torch.cuda.is_available() and get_cuda_rng_tracker().is_initialized()))
    is_gpt = config.family in megatron_gpt.FAMILIES
    sizes_of = megatron_gpt.gpt_options if is_gpt else transformer_options
    megatron_config = TransformerConfig(**on_cpu | sizes_of(config, tensor_ranks) | options)
    padded_vocab_size = -(-config.vocab_size // tensor_ranks) * tensor_ranks
    sizes: dict[str, Any] = dict(vocab_size=padded_vocab_size, max_sequence_length=max_sequence_length)
    sizes["share_embeddings_and_output_weights"] = config.tie_embeddings
    if is_gpt:
        model = megatron_gpt.gpt_model(config, megatron_config, **sizes)
    else:
        make, pattern = model_class()
        spec = stack_spec(config.family, **spec_options(config))
        model = make(megatron_config, spec, **sizes, **{pattern: layer_pattern(config)})
    if padded_vocab_size > config.vocab_size:
        _mask_padding(model, config.vocab_size)
    return model


def _mask_padding(model: Any, vocab_size: int) -> None:
    """Set the logits of ids from `vocab_size` on to the lowest number. `our_config` then has this vocab_size."""
    model.unpadded_vocab_size = vocab_size
    padded_vocab_size, rank = model.vocab_size, _stack(model).tp_group.rank()

    def mask(_layer: nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output  # (..., this rank's ids) or, if gathered, (..., all ids)
        first = 0 if logits.shape[-1] == padded_vocab_size else rank * logits.shape[-1]
        ids = torch.arange(first, first + logits.shape[-1], device=logits.device)
        return logits.masked_fill(ids >= vocab_size, torch.finfo(logits.dtype).min), bias

    if model.post_process:
        model.output_layer.register_forward_hook(mask)


def our_config(model: Any, family: str = "") -> ModelStack:
    """Our configuration of a MambaModel that `specs.stack_spec` built, or of a GPTModel with gated delta nets.

    family: that of a GPTModel, by default the first of `megatron_gpt.FAMILIES`. ValueError if the model is of another kind
    or a stage of a pipeline, or has layers, options or positions that the family lacks.
    """
    is_gpt = megatron_gpt.is_gpt(model)
    if not is_gpt and not isinstance(getattr(model, "decoder", None), Stack):
        raise ValueError(
            "only models that megatron_ssm's stack_spec built, and GPTModels with "
            f"experimental_attention_variant={megatron_gpt.VARIANT!r}, have a counterpart in Hugging Face's format"
        )
    if (stages := model.pg_collection.pp.size()) > 1:
        raise ValueError(f"the model is one of {stages} pipeline stages: Hugging Face directories need all layers")
    vocab_size = getattr(model, "unpadded_vocab_size", model.vocab_size)
    if is_gpt:
        family = family if family in megatron_gpt.FAMILIES else megatron_gpt.FAMILIES[0]
        return megatron_gpt.gpt_config(model, family, vocab_size)
    stack = _stack(model)
    symbols = set(stack.layer_type_list) - set(families.FAMILIES[stack.family].pattern or {})
    if symbols or model.position_embedding_type != "none":
        unsupported = (
            f"layers {', '.join(sorted(symbols))}" if symbols else f"positions {model.position_embedding_type}"
        )
        raise ValueError(f"a {stack.family} model with {unsupported} has no counterpart in Hugging Face's format")
    tied = bool(model.share_embeddings_and_output_weights)
    return stack.model_config(vocab_size=vocab_size, tie_word_embeddings=tied)


def load_hugging_face(model: nn.Module, directory: str | Path) -> None:
    """Load the weights of a Hugging Face directory into one of Megatron's models. All ranks of the model call it together.

    Every rank reads its own slices. `save_hugging_face` uses the directory as its default source. In a GPTModel, the norms
    of gated delta nets hold their weights minus 1, which is exact for weights between 0.5 and 2, and A_log and dt_bias are
    in params_dtype. Draft heads are not converted.

    Args:
        model: A MambaModel that `specs.stack_spec` built, or a GPTModel with gated delta nets, without wrappers.
        directory: The Hugging Face directory.

    Raises:
        ValueError: On every rank, with the model unchanged, if the directory contains another model, or if Hugging Face
            has no counterpart of the model.
    """
    our_config(model)  # for its ValueError, before anything is read
    stack = _stack(model)
    dtype = stack.config.params_dtype
    with load(directory, stack.tp_group, dtype=dtype, shared_memory=False) as ours:
        _check_sizes(model, ours.config, directory)
        _copy(ours, model, into_megatron=True)
        stack.source = ours.config, Path(directory)


def _check_sizes(model: nn.Module, config: ModelStack, directory: str | Path) -> None:
    for location, name, value, expected in _differences(our_config(model, config.family), config):
        raise ValueError(f"{directory} has {name}={expected!r}{location}, but Megatron's model has {value!r}")


def _differences(config: ModelStack, other: ModelStack) -> Iterator[tuple[str, str, object, object]]:
    """Yield (" in PATH" or "", name, value, value in `other`) for each difference that changes the weights."""
    names = "family vocab_size hidden_size num_layers norm_eps tie_embeddings".split()
    pairs: list[tuple[str, Any, Any, list[str]]] = [("", config, other, names)]
    operators: Iterable[tuple[str, Any]] = config.operators
    for (path, spec), (_, other_spec) in zip(operators, other.operators, strict=False):
        pairs.append((f" in {path}", spec, other_spec, [field.name for field in fields(spec) if field.compare]))
    for location, part, other_part, names in pairs:
        for name in names:
            value, other_value = getattr(part, name), getattr(other_part, name, None)
            if value != other_value:
                yield location, name, value, other_value


def save_hugging_face(model: nn.Module, directory: str | Path, source: str | Path | None = None) -> None:
    """Write one of Megatron's models as a Hugging Face directory. All ranks of the world call it together.

    The tensor-parallel ranks of the first replica send their parts to their first rank, which writes the files. See
    `checkpoints.hf.save`, also for further errors. Without sequence parallelism, Megatron 0.16.1 does not sum the gradient
    of a gated delta net's output norm over the tensor-parallel ranks, so their copies drift apart; the first is written.

    Args:
        model: A model as in `load_hugging_face`. A GPTModel is written as a Qwen3.5, unless the source is a Qwen3-Next.
        directory: The directory to write.
        source: A Hugging Face directory of the same architecture, by default that of `load_hugging_face`. It provides the
            tokenizer and the fields of config.json that do not change the weights, such as token ids and residual_in_fp32.
            Without it, config.json has the fields of Megatron's model and those passed to `stack_spec`.

    Raises:
        ValueError: On every rank, if `source` contains another model.
        FileNotFoundError: On every rank, if `source` has no config.json.
    """
    from megatron.core import parallel_state

    model_config, stack = our_config(model), _stack(model)
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    device, dtype = next(model.parameters()).device, stack.config.params_dtype

    def read_source() -> tuple[ModelStack, Path | None]:
        if source is None:
            return getattr(stack, "source", None) or (model_config, None)
        source_config = families.read(source)
        _check_sizes(model, source_config, source)
        return source_config, Path(source)

    config, path = together(read_source, (stack.tp_group, replicas), lambda result: result[0], device)
    with build(config, stack.tp_group, replicas, dtype, device, shared_memory=False) as ours:
        _copy(ours, model, into_megatron=False)
        ours.directory = path
        save(ours, directory)


def _stack(model: Any) -> Any:
    return model.decoder


@torch.no_grad()
def _copy(ours: Any, model: nn.Module, into_megatron: bool) -> None:
    """Copy this rank's parameters from our model to Megatron's, or back. Only Megatron's vocabulary may have padding."""
    theirs = in_our_names(model.named_parameters(), ours.config)
    parts = dict(ours.named_parameters())
    if set(theirs) != set(parts):
        raise ValueError(f"the models differ in the parameters {', '.join(sorted(set(theirs) ^ set(parts)))}")
    for name, part in parts.items():
        if theirs[name].dim() > part.dim():  # (key/value heads, rows per head, hidden), see `in_our_names`
            part = part.view(theirs[name].shape)
        rows, padding = theirs[name][: len(part)], theirs[name][len(part) :]
        offset = megatron_gpt.has_offset(name, ours.config)
        if rows.shape != part.shape or len(padding) and name not in _NAMES.values():
            raise ValueError(f"{name} is {tuple(theirs[name].shape)} in Megatron's model, not {tuple(part.shape)}")
        if into_megatron:
            rows.copy_(part - 1 if offset else part)
            padding.zero_()
        else:
            part.copy_(rows + 1 if offset else rows)
