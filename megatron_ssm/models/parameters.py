"""The attributes of a model's parameters that say which field of the layout they are and how they are split."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from megatron_ssm.stack.fields import Field


def attach_fields(model: nn.Module, fields: Iterable[Field], part: Sequence[int], is_complete: bool) -> None:
    """Give each parameter its `field` and Megatron's attributes; see `attach_field`.

    fields: of the model and of its adapters. part: see `attach_field`. is_complete: whether the model has a parameter for
    every field (a quantized model has not). AssertionError if the parameters and the layout differ.
    """
    fields, parameters = tuple(fields), dict(model.named_parameters())
    names = {field.name for field in fields}
    if is_complete and names != set(parameters):
        raise AssertionError(f"layout and model differ in {set(parameters) ^ names}")
    for field in (field for field in fields if field.name in parameters):
        attach_field(parameters[field.name], field, part)


def attach_field(parameter: Any, field: Field, part: Sequence[int]) -> None:
    """Give a parameter its `field`, and the attributes that Megatron and other libraries read.

    part: which part of its field it is, as the arguments of `Field.piece`.

    tensor_model_parallel, partition_dim and partition_stride say how it is split. Megatron's norm of the gradients leaves
    out what is `shared`: here, the parts that an earlier rank also holds. allreduce is False for experts that ranks divide,
    whose gradients Megatron's DDP sums over fewer ranks. _no_weight_decay is state-spaces' mark of what the
    optimizer shall not decay. AssertionError if the layout has another shape.
    """
    rank, size, _, experts = part
    shape = field.local_shape(*part)
    if shape != tuple(parameter.shape):
        raise AssertionError(f"{field.name} is {tuple(parameter.shape)}, its layout says {shape}")
    copies = field.copies(size)
    parameter.field = field
    parameter.tensor_model_parallel = size > 1 and copies < size
    parameter.partition_dim = field.split if parameter.tensor_model_parallel else -1
    parameter.partition_stride = 1
    parameter.shared = parameter.tensor_model_parallel and rank % copies > 0
    parameter.allreduce = not (field.by_expert and experts > 1)
    if not field.has_weight_decay:
        parameter._no_weight_decay = True


def fields_of(model: Any) -> dict[nn.Parameter, Field]:
    """{parameter: its field} of a `Model`, in the order of the parameters.

    torch's `fully_shard` puts DTensors in place of the parameters, without their attributes; these are attached first.
    """
    if not all(hasattr(parameter, "field") for parameter in model.parameters()):
        model.attach_fields()
    parameters: Any = model.parameters()
    return {parameter: parameter.field for parameter in parameters}


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's groups of the parameters of a `Model` that are trained: those with weight decay, and those without.

    Weight decay applies to matrices, not to A_log, D, the dt bias, norms and biases; a parameter without it has the
    attribute `_no_weight_decay`, as in state-spaces' Mamba. Call it after `fully_shard`, which replaces the parameters.
    """
    fields = {parameter: field for parameter, field in fields_of(model).items() if parameter.requires_grad}
    groups: list[dict[str, Any]] = [
        {"params": [p for p, field in fields.items() if field.has_weight_decay == decays], "weight_decay": decay}
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]
