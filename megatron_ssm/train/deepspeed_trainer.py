"""The training loop over a DeepSpeed engine, with ZeRO 0, 1, 2 or 3. Only this module imports deepspeed.

DeepSpeed averages the gradients, divides them and the optimizer's state over the ranks that hold the same part of the model
(ZeRO 1 and 2), and the parameters as well (ZeRO 3), and updates its own partitions with torch's AdamW. The trainer computes
the gradient norm and clips: DeepSpeed's own clipping would count what 1 < copies < ranks tensor-parallel ranks hold several
times. Checkpoints are those of every engine: parameters and moments are gathered to write them.

Of DeepSpeed's interfaces, these are not documented: `_hp_mapping` and `_index_in_param_group` of a parameter, which
`deepspeed.utils.safe_get_full_grad` reads (that function would send the whole gradient), and the optimizer's list of
partitions with the method that links its state to them. `_copy_recovery_script` copies `zero_to_fp32.py` into a checkpoint.
"""

import contextlib
import functools
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from pydantic import ValidationError
from torch import nn

from commfabric.collectives.agreement import on_first, together
from commfabric.foundation.command_line import Failure
from megatron_ssm.checkpoints.deepspeed_files import NAMES, load_checkpoint
from megatron_ssm.checkpoints.disk import in_one_line, sync_directory
from megatron_ssm.checkpoints.shards import new_file
from megatron_ssm.checkpoints.training import MOMENTS, GatheredState
from megatron_ssm.model.model import Model
from megatron_ssm.model.parameters import parameter_groups
from megatron_ssm.parallel.deepspeed_groups import DeepSpeedGroups
from megatron_ssm.parallel.groups import Groups, join_alone
from megatron_ssm.spec.fields import field_of

from .batches import Tokens
from .gradients import Gradients, average_divided_gradients, average_replicated_gradients, clip_gradients, grad_norm
from .indexed import Samples
from .options import Options
from .trainer import SequenceLoss, Trainer, entries, evaluate, gathered_state, torch_adamw, unfilled_state

# How DeepSpeed refuses a value, on every rank.
REFUSALS = (ValidationError, AssertionError, AttributeError, TypeError, ValueError, ZeroDivisionError)
OLDEST = "0.19.8"  # version of DeepSpeed that skips steps that are not finite in every stage


class DeepSpeedTrainer(Trainer):
    """A `Trainer` whose `loss` is a DeepSpeed engine.

    Args:
        model: The model to train.
        groups: Its process groups.
        options: Those of the run.
        settings: The engine's configuration, of `deepspeed_settings.read_settings`.
        report: See `Trainer`.

    Raises:
        ValueError: DeepSpeed was imported before for another kind of device than the model's, or refuses the configuration.
    """

    def __init__(
        self,
        model: Model,
        groups: Groups,
        options: Options,
        settings: dict[str, Any],
        report: Callable[[str], object] = print,
    ):
        self._settings = settings
        self._deepspeed = import_deepspeed(model.device)
        join_alone(model.device.type)
        self._mpu = DeepSpeedGroups(groups)
        super().__init__(model, groups, options, report)

    def _set_up(self, loss: SequenceLoss) -> tuple[nn.Module, torch.optim.Optimizer]:
        optimizer = torch_adamw(self.model, self.options)
        try:
            self._engine, *_ = self._deepspeed.initialize(
                model=loss, optimizer=optimizer, config=self._settings, mpu=self._mpu
            )
        except REFUSALS as error:
            raise ValueError(f"{self.options.deepspeed_config}: {' '.join(str(error).split())}") from None
        self._stage = int(self._engine.zero_optimization_stage())
        for partition in self._partitions():
            moments = {name: torch.zeros_like(partition) for name in MOMENTS}
            optimizer.state[partition] = {"step": torch.zeros((), device=partition.device), **moments}
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        return self._engine, optimizer

    def _partitions(self) -> list[torch.Tensor]:
        """The flat fp32 tensors that the optimizer updates in place of the parameters; none with ZeRO 0."""
        name = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
        return getattr(self._engine.optimizer, name) if self._stage else []

    # A step

    def _backward(self, inputs: torch.Tensor, labels: torch.Tensor, is_last: bool) -> torch.Tensor:
        loss = self._share_of_loss(inputs, labels)
        # The loss is a mean over the tokens of all data x context ranks, so their gradients add up; DeepSpeed averages them.
        self._engine.backward(loss * self.groups.data_context_ranks, scale_wrt_gas=False)
        if not is_last:
            self._engine.step()  # only counts the micro-batch
        return loss.detach()

    def _gradients(self) -> Gradients:
        """(parameter, the part of its gradient that this rank holds), after the last micro-batch."""
        for parameter in self.model.parameters():
            part = self._part_of_gradient(parameter) if self._is_updated(parameter) else None
            if part is not None:
                yield parameter, part

    def _is_updated(self, parameter: nn.Parameter) -> bool:
        """Return True if the optimizer has it: it is not frozen, and this rank's part of it is not empty."""
        return parameter.requires_grad and 0 not in self._shape(parameter)

    def _part_of_gradient(self, parameter: Any) -> torch.Tensor | None:
        if self._stage == 0:
            return parameter.grad
        if self._stage == 3:
            return self._deepspeed.utils.safe_get_local_grad(parameter)
        fragment = getattr(parameter, "_hp_mapping", None)
        return None if fragment is None else fragment.get_lp_grad_fragment(parameter._index_in_param_group)

    def _average_copies(self) -> None:
        gradients = list(self._gradients())
        if self._stage in (1, 2):
            parts = ((parameter, self._part(parameter), gradient) for parameter, gradient in gradients)
            average_divided_gradients(self.model, parts, self.groups.data_context)
        else:
            average_replicated_gradients(self.model, gradients)
            self._set_gradients(gradients)

    def _part(self, parameter: Any) -> slice:
        """The elements of a parameter, as a vector, whose gradient this rank holds with ZeRO 1 and 2."""
        address = parameter._hp_mapping.lp_fragment_address
        return slice(address.start, address.start + address.numel)

    def _set_gradients(self, gradients: Gradients) -> None:
        """With ZeRO 3, set what may be copies: gradients in bf16."""
        for parameter, gradient in gradients if self._stage == 3 else ():
            self._deepspeed.utils.safe_set_local_grad(parameter, gradient)

    def _norm(self) -> torch.Tensor:
        return grad_norm(self.model, self._gradients(), self.groups.data_context if self._stage else None)

    def _clip(self, norm: torch.Tensor) -> None:
        gradients = list(self._gradients())
        clip_gradients(self.model, norm, self.options.clip_grad, gradients)
        self._set_gradients(gradients)

    def _add_pending_gradients(self) -> list[str]:
        added = []
        for name, parameter in self.named_parameters() if self.pending_gradients else ():
            if (pending := self.pending_gradients.get(name)) is None:
                continue
            if pending.numel():
                whole = self._deepspeed.utils.safe_get_full_grad(parameter) if self._is_updated(parameter) else None
                if whole is None:  # it waits for a later step
                    continue
                self._deepspeed.utils.safe_set_full_grad(parameter, whole + pending.view_as(whole).to(whole))
            added.append(name)
        return added

    def _update(self) -> None:
        self._engine.step()

    def _discard_gradients(self) -> None:
        """Let DeepSpeed skip this step, which it does if gradients are not finite: they become NaN on all ranks."""
        if self._stage == 0:  # there it never does
            self._engine.zero_grad()
            self._engine.micro_steps += 1
            return
        self._fill_gradients(math.nan)
        self._engine.step()
        if self._stage == 3:  # the next backward pass does not overwrite the padding at the end of a partition
            self._fill_gradients(0.0)

    def _fill_gradients(self, value: float) -> None:
        gradients = list(self._gradients())
        for _, gradient in gradients:
            gradient.fill_(value)
        self._set_gradients(gradients)

    def evaluate(self, tokens: Tokens | Samples, leaves: Callable[[], bool] | None = None) -> float | None:
        """See `trainer.evaluate`. The engine computes the loss, because ZeRO 3 gathers parameters in its forward pass."""
        return evaluate(self.model, tokens, self.groups, self.options, self._engine, leaves)

    # Checkpoints

    def whole_parameters(self) -> contextlib.AbstractContextManager:
        """See `Trainer.whole_parameters`. With ZeRO 3, gathers all parameters of this rank's part of the model."""
        if self._stage < 3:
            return contextlib.nullcontext()
        return self._deepspeed.zero.GatheredParameters(list(self.model.parameters()))

    def checkpoint_state(self) -> torch.optim.Optimizer | GatheredState:
        """See `Trainer.checkpoint_state`. With ZeRO, the tensors are gathered one by one, in fp32."""
        if not self._stage:
            return self.optimizer
        steps = int(self.optimizer.state[self._partitions()[0]]["step"])
        return gathered_state(self.model, self.groups, self._gathered, steps)

    def _gathered(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The parameter and its moments, whole on every rank that holds this part of the model."""
        shape, utils = self._shape(parameter), self._deepspeed.utils
        if not self._is_updated(parameter):
            with self._whole(parameter):
                return dict.fromkeys(entries(parameter), parameter.detach().float().clone().view(shape))
        tensors = {name: utils.safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
        tensors["model"] = utils.safe_get_full_fp32_param(parameter)
        return {name: tensor.view(shape) for name, tensor in tensors.items()}

    def load(self, path: Path, step: int) -> None:
        """See `Trainer.load`. With ZeRO, each rank reads its whole part of the model on the CPU, and keeps its partition."""
        if not self._stage:
            return super().load(path, step)
        whole = unfilled_state(self.model, self.groups)
        load_checkpoint(path, step, self.model, whole)
        for parameter, tensors in whole.state.items():
            self._set(parameter, {name: tensor.to(self.model.device) for name, tensor in tensors.items()})
        for partition in self._partitions():
            self.optimizer.state[partition]["step"].fill_(whole.steps)

    def write_own_format(self, out: Path, step: int) -> None:
        """With --save-deepspeed, write DeepSpeed's own checkpoint OUT/deepspeed/global_stepN; its name is in `latest`.

        What was in OUT/deepspeed is replaced once all files are complete. Each rank writes its own partitions. Failure on
        every rank if one cannot write; nothing of the new checkpoint then remains.
        """
        if not self.options.save_deepspeed:
            return
        directory, hidden, old = out / "deepspeed", out / ".deepspeed", out / "deepspeed.old"
        failure, tag = f"cannot write {directory}", f"global_step{step}"

        @in_one_line(failure)
        def begin() -> None:
            if old.exists() and not directory.exists():  # a run was killed between the renames below
                old.rename(directory)
            shutil.rmtree(hidden, ignore_errors=True)
            (hidden / tag).mkdir(parents=True)  # DeepSpeed makes it on every rank, whose errors would differ

        @in_one_line(failure)
        def complete() -> None:
            config = json.dumps(self.model.config.to_dict("float32"), indent=2)
            (hidden / "config.json").write_text(config, encoding="utf-8")
            (hidden / "latest").write_text(tag, encoding="utf-8")
            sync_directory(hidden)
            shutil.rmtree(old, ignore_errors=True)
            if directory.exists():
                directory.rename(old)
            hidden.rename(directory)
            shutil.rmtree(old, ignore_errors=True)

        self._engine.global_steps = step  # DeepSpeed counts those of this process
        try:
            on_first(begin, dist.group.WORLD)
            together(in_one_line(failure)(lambda: self._save_checkpoint(hidden, tag)), [dist.group.WORLD])
            on_first(complete, dist.group.WORLD)
        except Failure:
            shutil.rmtree(hidden, ignore_errors=True)
            raise

    def _save_checkpoint(self, folder: Path, tag: str) -> None:
        """Let DeepSpeed write its files. OSError, after all ranks have tried, if this rank cannot write one of them.

        In DeepSpeed's method the ranks communicate after they have written, so no rank may leave it by an error.
        """
        errors: list[OSError] = []

        def attempt(write: Callable[..., object], *arguments: Any, **named: Any) -> None:
            try:
                write(*arguments, **named)
            except OSError as error:
                errors.append(error)

        def save(state_dict: dict[str, Any], path: str) -> None:
            with new_file(path) as file:
                torch.save(state_dict, file)

        engine = self._engine
        engine.checkpoint_engine.save = functools.partial(attempt, save)
        engine._copy_recovery_script = functools.partial(attempt, type(engine)._copy_recovery_script, engine)
        engine.save_checkpoint(str(folder), tag, {NAMES: self._optimizer_order()}, save_latest=False)
        if errors:
            raise errors[0]

    def _optimizer_order(self) -> list[str]:
        """The names of the parameters in the order in which ZeRO 0 writes their moments."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        return [names[p] for group in parameter_groups(self.model, self.options.weight_decay) for p in group["params"]]

    @torch.no_grad()
    def _set(self, parameter: nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        """Set the parameter, this rank's partition of it, and of its moments."""
        utils, whole = self._deepspeed.utils, tensors.pop("model")
        with self._whole(parameter, modifier_rank=0):
            parameter.copy_(whole)
        if not self._is_updated(parameter):
            return
        if self._stage < 3:
            utils.safe_set_full_fp32_param(parameter, whole)
            for name, tensor in tensors.items():
                utils.safe_set_full_optimizer_state(parameter, tensor, name)
        else:
            utils.safe_set_local_fp32_param(parameter, self._shard(whole))
            for name, tensor in tensors.items():
                utils.safe_set_local_optimizer_state(parameter, self._shard(tensor), name)

    def _whole(self, parameter: nn.Parameter, modifier_rank: int | None = None) -> contextlib.AbstractContextManager:
        """Within this context, the parameter is whole; ZeRO 3 takes changes from `modifier_rank`."""
        if self._stage < 3:
            return contextlib.nullcontext()
        return self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier_rank)

    def _shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's partition with ZeRO 3: all are equally long, and the last ones are filled with zeros."""
        ranks, rank = self._mpu.get_data_parallel_world_size(), self._mpu.get_data_parallel_rank()
        flat = whole.flatten()
        return F.pad(flat, (0, -len(flat) % ranks)).view(ranks, -1)[rank]

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape of this rank's part; with ZeRO 3, the parameter itself may have no elements."""
        return field_of(parameter).local_shape(self.groups.tensor_rank, self.groups.tensor_ranks)


def import_deepspeed(device: torch.device) -> Any:
    """The package, with nothing that it would compile. ValueError if it is too old, or works on another kind of device.

    On CPUs it would compile an extension for messages in shared memory, under a lock in TORCH_EXTENSIONS_DIR. If an earlier
    run was killed meanwhile, the lock remains, and DeepSpeed would wait forever. So the list of operations that it may
    compile, which it makes by calls of the compiler, is emptied. Our tensor-parallel ranks share memory without it.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    name = deepspeed.accelerator.get_accelerator().device_name()
    if name.split(":")[0] != device.type:
        raise ValueError(f"DeepSpeed works on {name} (DS_ACCELERATOR), the model is on {device.type}")
    if Version(deepspeed.__version__) < Version(OLDEST):  # earlier ones update with gradients that are not finite
        raise ValueError(f"--engine deepspeed needs DeepSpeed {OLDEST} or later, not {deepspeed.__version__}")
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}
    return deepspeed
