"""Weights between Megatron's models and Hugging Face directories.

Two models have such a counterpart: a MambaModel (HybridModel from Megatron-Core 0.18 on) that `specs.stack_spec` built from
our layers, and Megatron's own GPTModel with gated delta nets (see `megatron_gpt`). Their parameters are those of our `Model`
under other names, with the same parts on the same tensor-parallel ranks, so only saving sends messages.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_ssm import families
from megatron_ssm.checkpoints.hf import build, load, save
from megatron_ssm.stack.stack import Stack as ModelStack
from sparsefusion.collectives.agreement import together

from . import megatron_gpt
from .megatron_fields import layer_pattern, spec_options, transformer_options
from .megatron_layers import Stack
from .specs import stack_spec

# {Megatron's name of a parameter outside of the layers: our name}. Other parameters in the decoder have our names.
_NAMES = {
    "embedding.word_embeddings.weight": "embeddings.weight",
    "decoder.final_norm.weight": "norm_f.weight",
    "decoder.final_layernorm.weight": "norm_f.weight",  # of a GPTModel
    "output_layer.weight": "lm_head.weight",
}
# The same in a layer of Megatron's own attention or MLP.
_NAMES_IN_LAYERS = {
    "input_layernorm.weight": "norm.weight",
    "pre_mlp_layernorm.weight": "norm.weight",
    "self_attention.linear_proj.weight": "mixer.o_proj.weight",
    "mlp.linear_fc1.weight": "mixer.gate_up.weight.up",
    "mlp.linear_fc2.weight": "mixer.down_proj.weight",
}
_QKV = "self_attention.linear_qkv.weight"  # for each key/value head its query heads, the key head and the value head


def our_name(name: str) -> str:
    """Our name of a parameter of a MambaModel."""
    name = _NAMES.get(name, name.removeprefix("decoder."))
    layers, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    return f"layers.{index}.{_NAMES_IN_LAYERS[rest]}" if layers == "layers" and rest in _NAMES_IN_LAYERS else name


def in_our_names(named: Iterable[tuple[str, torch.Tensor]], config: ModelStack) -> dict[str, torch.Tensor]:
    """The parameters of a MambaModel or a GPTModel on this rank, or their gradients, under our names.

    Parameters that Megatron packs into one tensor are views of it. Queries, gates, keys and values of Megatron's own
    attention have the shape (key/value heads of this rank, rows per head, hidden); others have their shapes in our `Model`.
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
        parts = tensor.unflatten(0, (-1, sum(rows))).split(rows, dim=1)
        prefix = name.removesuffix(_QKV) + "mixer.qkv.weight."
        parameters |= {prefix + letter: part for letter, part in zip("qkv", parts, strict=True)}
    return parameters


def model_class() -> tuple[type, str]:
    """(Megatron's class of models with a layer pattern, the name of its argument for the pattern)."""
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ModuleNotFoundError:  # before Megatron-Core 0.18
        from megatron.core.models.mamba import MambaModel

        return MambaModel, "hybrid_override_pattern"
    return HybridModel, "hybrid_layer_pattern"


def megatron_model(config: ModelStack, max_sequence_length: int, tensor_ranks: int = 1, **options: Any) -> nn.Module:
    """Megatron's model of this configuration: a MambaModel or HybridModel, built from `specs.stack_spec`.

    For the families `megatron_gpt.FAMILIES`, it is a GPTModel of Megatron's own layers, which needs CUDA, Transformer Engine
    and flash-linear-attention. The process groups are those of Megatron's parallel_state.

    Megatron divides the vocabulary evenly. If it does not divide, the embeddings and the output layer get padding rows. The
    logits of the padding are the lowest number, so that it changes neither loss nor gradients. It is not saved.

    Args:
        config: The configuration.
        max_sequence_length: The largest number of tokens of a sequence.
        tensor_ranks: The number of tensor-parallel ranks.
        options: Arguments of the TransformerConfig, such as params_dtype. use_cpu_initialization is True by default, and the
            model is on the CPU, unless there is a GPU and Megatron's `model_parallel_cuda_manual_seed` has been called,
            which initialization on GPUs needs.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_cpu = dict(use_cpu_initialization=not (torch.cuda.is_available() and get_cuda_rng_tracker().is_initialized()))
    is_gpt = config.family in megatron_gpt.FAMILIES
    sizes_of = megatron_gpt.gpt_options if is_gpt else transformer_options
    megatron_config = TransformerConfig(**on_cpu | sizes_of(config, tensor_ranks) | options)
    padded = -(-config.vocab_size // tensor_ranks) * tensor_ranks
    sizes: dict[str, Any] = dict(vocab_size=padded, max_sequence_length=max_sequence_length)
    sizes["share_embeddings_and_output_weights"] = config.tie_embeddings
    if is_gpt:
        model = megatron_gpt.gpt_model(config, megatron_config, **sizes)
    else:
        make, pattern = model_class()
        spec = stack_spec(config.family, **spec_options(config))
        model = make(megatron_config, spec, **sizes, **{pattern: layer_pattern(config)})
    if padded > config.vocab_size:
        _hide_padding(model, config.vocab_size)
    return model


def _hide_padding(model: Any, vocab_size: int) -> None:
    """Set the logits of ids from `vocab_size` on to the lowest number; `our_config` then has this vocab_size."""
    model.unpadded_vocab_size = vocab_size
    padded, rank = model.vocab_size, _stack(model).tp_group.rank()

    def hide(_layer: nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output  # logits of this rank's ids, or gathered ones
        first = 0 if logits.shape[-1] == padded else rank * logits.shape[-1]
        ids = torch.arange(first, first + logits.shape[-1], device=logits.device)
        return logits.masked_fill(ids >= vocab_size, torch.finfo(logits.dtype).min), bias

    if model.post_process:
        model.output_layer.register_forward_hook(hide)


def our_config(model: Any, family: str = "") -> ModelStack:
    """Our configuration of a MambaModel that `specs.stack_spec` built, or of a GPTModel with gated delta nets.

    ValueError for other models, for layers, options and positions that the family lacks, and for a stage of a pipeline.
    family: the family of a GPTModel, by default the first of `megatron_gpt.FAMILIES`.
    """
    is_gpt = megatron_gpt.is_gpt(model)
    if not is_gpt and not isinstance(getattr(model, "decoder", None), Stack):
        raise ValueError(
            "only models that megatron_ssm's stack_spec built have a Hugging Face counterpart, and GPTModels with "
            f"experimental_attention_variant={megatron_gpt.VARIANT!r}"
        )
    if (stages := model.pg_collection.pp.size()) > 1:
        raise ValueError(f"the model is a stage of {stages}: Hugging Face directories need all layers")
    vocab_size = getattr(model, "unpadded_vocab_size", model.vocab_size)
    if is_gpt:
        family = family if family in megatron_gpt.FAMILIES else megatron_gpt.FAMILIES[0]
        return megatron_gpt.gpt_config(model, family, vocab_size)
    stack = _stack(model)
    symbols = set(stack.layer_type_list) - set(families.FAMILIES[stack.family].pattern or {})
    if symbols or model.position_embedding_type != "none":
        what = f"layers {', '.join(sorted(symbols))}" if symbols else f"positions {model.position_embedding_type}"
        raise ValueError(f"a {stack.family} model with {what} has no counterpart in Hugging Face's format")
    tied = bool(model.share_embeddings_and_output_weights)
    return stack.model_config(vocab_size=vocab_size, tie_word_embeddings=tied)


def load_hugging_face(model: nn.Module, directory: str | Path) -> None:
    """Load the weights of a Hugging Face directory into one of Megatron's models; all its ranks call it together.

    Every rank reads its own slices. The model keeps the directory for `save_hugging_face`. In a GPTModel, the norms of
    gated delta nets hold their weights minus 1, and A_log and dt_bias are in params_dtype.

    Args:
        model: A MambaModel that `specs.stack_spec` built, or a GPTModel with gated delta nets, without wrappers.
        directory: The Hugging Face directory.

    Raises:
        ValueError: On every rank, with the model unchanged, if the directory contains another model, or if Hugging Face
            has no counterpart of the model.
    """
    our_config(model)  # raises ValueError for other models before anything is read
    stack = _stack(model)
    dtype = stack.config.params_dtype
    with load(directory, stack.tp_group, dtype=dtype, shared_memory=False) as ours:
        _check_same(model, ours.config, directory)
        _copy(ours, model, into_megatron=True)
        stack.source = ours.config, Path(directory)


def _check_same(model: nn.Module, given: ModelStack, directory: str | Path) -> None:
    """ValueError if Megatron's model has other weights than `given`, the configuration of the directory."""
    for where, name, ours, theirs in _differences(our_config(model, given.family), given):
        raise ValueError(f"{directory} has {name}={theirs!r}{where}, and Megatron's model {ours!r}")


def _differences(config: ModelStack, given: ModelStack) -> Iterator[tuple[str, str, object, object]]:
    """Yield (" in PATH" or "", name, value, other value) of differences between two stacks that change the weights."""
    named = "family vocab_size hidden_size num_layers norm_eps tie_embeddings".split()
    pairs: list[tuple[str, Any, Any, list[str]]] = [("", config, given, named)]
    operators: Iterable[tuple[str, Any]] = config.operators
    for (path, ours), (_, theirs) in zip(operators, given.operators, strict=False):
        pairs.append((f" in {path}", ours, theirs, [each.name for each in fields(ours) if each.compare]))
    for where, ours, theirs, names in pairs:
        for name in names:
            values = getattr(ours, name), getattr(theirs, name, None)
            if values[0] != values[1]:
                yield where, name, *values


def save_hugging_face(model: nn.Module, directory: str | Path, source: str | Path | None = None) -> None:
    """Write one of Megatron's models as a Hugging Face directory; all ranks of the world call it.

    The tensor-parallel ranks of the first replica send their parts to the first of them, which writes them; see
    `checkpoints.hf.save`, also for its errors.

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

    own, stack = our_config(model), _stack(model)
    copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
    device, dtype = next(model.parameters()).device, stack.config.params_dtype

    def read() -> tuple[ModelStack, Path | None]:
        if source is None:
            return getattr(stack, "source", None) or (own, None)
        given = families.read(source)
        _check_same(model, given, source)
        return given, Path(source)

    config, files = together(read, (stack.tp_group, copies), lambda found: found[0], device)
    with build(config, stack.tp_group, copies, dtype, device, shared_memory=False) as ours:
        _copy(ours, model, into_megatron=False)
        ours.directory = files
        save(ours, directory)


def _stack(model: Any) -> Any:
    return model.decoder


@torch.no_grad()
def _copy(ours: Any, model: nn.Module, into_megatron: bool) -> None:
    """Copy this rank's parts from one model to the other. Megatron's model may have the rows of a padded vocabulary."""
    theirs = in_our_names(model.named_parameters(), ours.config)
    parts = dict(ours.named_parameters())
    if set(theirs) != set(parts):
        raise ValueError(f"the models differ in the parameters {', '.join(sorted(set(theirs) ^ set(parts)))}")
    for name, part in parts.items():
        if theirs[name].dim() > part.dim():
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
