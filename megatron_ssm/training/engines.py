"""The trainers by the name of their engine, --engine."""

from collections.abc import Callable
from typing import Any

from megatron_ssm.models.model import Model
from megatron_ssm.parallel.groups import Groups

from .options import Options
from .trainer import Trainer


def make_trainer(
    model: Model,
    groups: Groups,
    options: Options,
    deepspeed: dict[str, Any] | None = None,
    report: Callable[[str], object] = print,
) -> Trainer:
    """The trainer of `options.engine`; all ranks make it together.

    deepspeed: the configuration of DeepSpeed's engine, of `deepspeed_settings.read_settings`; None for another engine.
    report: see `Trainer`.
    """
    if deepspeed is not None:
        from .deepspeed_trainer import DeepSpeedTrainer  # imports deepspeed, which is optional

        return DeepSpeedTrainer(model, groups, options, deepspeed, report)
    if options.engine == "megatron":
        from .megatron_trainer import MegatronTrainer

        return MegatronTrainer(model, groups, options, report)
    return Trainer(model, groups, options, report)
