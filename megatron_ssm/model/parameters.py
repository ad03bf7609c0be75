"""The fields of a model's parameters, as attributes of the parameters, and the groups of an optimizer."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from megatron_ssm.spec.fields import Field


def attach_fields(model: nn.Module, fields: Iterable[Field], part: Sequence[int], is_complete: bool) -> None:
    """Set the attributes of `attach_field` on each parameter of a model. fields: those of the model and of its adapters.

    is_complete: True if the model has a parameter for every field, which a quantized model has not.
    """
    fields, parameters = tuple(fields), dict(model.named_parameters())
    names = {field.name for field in fields}
    if is_complete and names != set(parameters):
        raise AssertionError(f"the fields and the parameters of the model differ in {set(parameters) ^ names}")
    for field in fields:
        if field.name in parameters:
            attach_field(parameters[field.name], field, part)


def attach_field(parameter: Any, field: Field, part: Sequence[int]) -> None:
    """Set `parameter.field`, and the attributes that Megatron and other libraries read.

    - tensor_model_parallel, partition_dim, partition_stride: the split of the parameter.
    - shared: True for a part that an earlier rank also holds. Megatron leaves it out of the norm of the gradients.
    - allreduce: False for experts that are split over ranks. Megatron's DDP sums their gradients over fewer ranks.
    - _no_weight_decay: set if the parameter has no weight decay, as in state-spaces' Mamba.
    """
    rank, size, _, experts = part
    shape = field.local_shape(*part)
    if shape != tuple(parameter.shape):
        raise AssertionError(f"{field.name} has shape {tuple(parameter.shape)}, but its field has {shape} on this rank")
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
    """{parameter: field} of a `Model`, in the order of its parameters.

    torch's `fully_shard` replaces the parameters by DTensors without these attributes. Then the fields are attached again.
    """
    if not all(hasattr(parameter, "field") for parameter in model.parameters()):
        model.attach_fields()
    parameters: Any = model.parameters()
    return {parameter: parameter.field for parameter in parameters}


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer: the trained parameters with weight decay, and the trained parameters without.

    Matrices have weight decay. A_log, D, the dt bias, norms and biases do not; they have the attribute `_no_weight_decay`,
    as in state-spaces' Mamba. Call this after `fully_shard`, which replaces the parameters.

    Args:
        model: A `Model`.
        weight_decay: The weight decay of the first group.
    """
    fields = {parameter: field for parameter, field in fields_of(model).items() if parameter.requires_grad}
    groups: list[dict[str, Any]] = [
        {"params": [p for p, field in fields.items() if field.has_weight_decay == decays], "weight_decay": decay}
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]
