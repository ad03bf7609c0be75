"""A whole pretraining run: from text and a tokenizer over checkpoints to a Hugging Face directory.

Every rank reads the inputs. Before training, the ranks compare what they have read: if an input is wrong or unreadable on
one rank, or differs between ranks, every rank raises the same error.
"""

import contextlib
import json
import math
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ssm.checkpoints.agreement import run_on_every_rank
from megatron_ssm.checkpoints.deepspeed_files import is_deepspeed
from megatron_ssm.checkpoints.folders import find_checkpoints, read_training
from megatron_ssm.checkpoints.hf import build, load, save
from megatron_ssm.checkpoints.peft import save_lora
from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import field_of
from megatron_ssm.context.blocks import check_sequence_length
from megatron_ssm.diagnostics.doctor import kernels_line
from megatron_ssm.models.context import scan_plan, schedule_of
from megatron_ssm.models.initialization import initialize as initialize_parameters
from megatron_ssm.models.lora import add_lora, find_modules
from megatron_ssm.models.model import Model
from megatron_ssm.parallel.groups import (
    Groups,
    check_world,
    device_of_rank,
    initialize,
    join,
    launched_ranks,
    shut_down,
)
from megatron_ssm.parallel.heartbeat import watched
from sparsefusion.collectives.agreement import agree
from sparsefusion.collectives.counted import all_gather_small
from sparsefusion.foundation.command_line import Failure

from .corpus import Corpus
from .data import Batches, Tokens
from .deepspeed_settings import read_settings
from .interruption import Interruption
from .memory_budget import check_memory_budget
from .options import Options
from .profiling import Profiler, utilization
from .progress import Progress, check_log, is_due
from .saving import Saver, checkpoint_to_resume, resume
from .tracking import check_trackers
from .trainer import Trainer

# Options that may differ between ranks: paths, which may be local to a machine. What they lead to is compared instead.
LOCAL_OPTIONS = {
    "data", "valid_data_path", "tokenizer_model", "init_from", "model_config", "deepspeed_config", "out", "log", "device",
    "profile", "tensorboard",
}  # fmt: skip


def pretrain(options: Options) -> None:
    """Train as the options say. Called on every rank that a launcher has started, or alone.

    ValueError, on every rank, if an option or an input is wrong. Failure, on every rank, if training cannot go on. If a
    rank is lost while the others train, their processes end (see `parallel.heartbeat`).
    """
    tensor, context = options.tensor_model_parallel_size, options.context_parallel_size
    check_world(tensor, launched_ranks(), context)
    options.accumulation(launched_ranks() // (tensor * context))
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.engine == "megatron" and device != "cuda":
        raise ValueError("--engine megatron needs --device cuda: Megatron-Core's DDP allocates its buckets there")
    try:
        join(tensor, device, context=context)
        inputs = _read_on_all_ranks(options, device_of_rank(device))
        groups = initialize(tensor, device, context=context)
        with Interruption(device_of_rank(device)) as interruption, watched(options.lost_rank_timeout):
            _run(options, inputs, groups, device_of_rank(device), interruption)
    finally:
        shut_down()


@dataclass(frozen=True)
class Inputs:
    """What a run reads before training begins.

    requirements: what a run that resumes from this one's checkpoints must have in common with it (JSON values). checkpoint:
    the one from which this run resumes, and its step; None for a new run. deepspeed: the configuration of DeepSpeed's
    engine; None for another one.
    """

    out: Path
    corpus: Corpus
    config: Config
    batches: Batches
    requirements: dict[str, Any]
    checkpoint: tuple[Path, int] | None
    deepspeed: dict[str, Any] | None

    @classmethod
    def read(cls, options: Options) -> "Inputs":
        """Read them on this rank. ValueError or OSError if one of them is wrong, or if the outputs cannot be written."""
        out = _make_output_directory(options.out)
        corpus = Corpus(options)
        config = Config.read(options.init_from) if options.init_from else corpus.new_model_config(options)
        corpus.check_vocabulary(config)
        config.check_ranks(options.tensor_model_parallel_size)
        if options.lora_rank:
            find_modules(config, options.lora_targets)  # ValueError if there are none
        check_memory_budget(options, config)
        check_sequence_length(options.seq_length, options.context_parallel_size, config.conv_kernel - 1)
        batches = Batches(corpus.train, options.seq_length, options.global_batch_size, options.seed)
        deepspeed = None
        if options.engine == "deepspeed":
            data_ranks = launched_ranks() // (options.tensor_model_parallel_size * options.context_parallel_size)
            deepspeed = read_settings(options, data_ranks, config.hidden_size)
        requirements = _resume_requirements(options, config, corpus)
        checkpoint = checkpoint_to_resume(options.resume, out / "checkpoints", requirements)
        if checkpoint and checkpoint[1] > options.train_iters:
            path, step = checkpoint
            raise ValueError(f"{path} has done {step} steps, more than --train-iters {options.train_iters}")
        check_log(options.log)
        check_trackers(options)
        return cls(out, corpus, config, batches, requirements, checkpoint, deepspeed)

    @property
    def start(self) -> int:
        """The number of steps that the checkpoint has done, 0 for a new run."""
        return self.checkpoint[1] if self.checkpoint else 0

    def fingerprint(self, options: Options) -> dict[str, Any]:
        """What must be equal on all ranks; what is most likely to differ comes first."""
        held_out = self.corpus.held_out
        training_text = self.requirements["training_tokens"], self.requirements["training_text"]
        return {
            "training tokens, checksum": training_text,
            "held-out tokens, checksum": held_out and (len(held_out.ids), _checksum(held_out)),
            "resumed step": self.start,
            "options": {f.name: getattr(options, f.name) for f in fields(options) if f.name not in LOCAL_OPTIONS},
            "outputs": [bool(getattr(options, name)) for name in ("log", "tensorboard", "profile")],
            "requirements": self.requirements,
            "DeepSpeed's configuration": self.deepspeed,
        }


def _read_on_all_ranks(options: Options, device: torch.device) -> Inputs:
    """`Inputs.read` on every rank; its error on every rank if it fails on one, ValueError if the ranks read different
    inputs.

    Gathers 16 bytes over the default group.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    inputs: list[Inputs] = []

    def fingerprint() -> dict[str, Any]:
        inputs.append(Inputs.read(options))
        return inputs[0].fingerprint(options)

    agree(lambda mine: all_gather_small(mine, group), device, fingerprint)
    return inputs[0]


def _run(options: Options, inputs: Inputs, groups: Groups, device: torch.device, interruption: Interruption) -> None:
    """Build or load the model, train it, and write it."""
    torch.manual_seed(options.seed)
    with make_model(options, inputs.config, groups, device) as model:
        progress = Progress(options)
        trainer = make_trainer(model, groups, options, inputs.deepspeed, progress.print_line)
        progress.print_line(kernels_line(model.device, model.dtype, model.ranks.transport, trains=True))
        progress.print_line(f"pretrain: {options.describe()}")
        progress.print_line(_summary(model, groups, inputs))
        inputs = _resume(trainer, inputs, progress)
        progress.begin(inputs.start, utilization(options, model, groups.ranks))
        step = _train(trainer, inputs, progress, interruption)
        try:
            trainer.write_own_format(inputs.out, step)
            if step == options.train_iters:
                with trainer.whole_parameters():
                    _write_model(model, inputs, progress)
        except (OSError, Failure) as error:  # on every rank
            hint = f"the checkpoint of step {step} is complete: once the disk can be written, start again with --resume"
            raise Failure(f"{error}; {hint}") from None


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
        from .megatron_trainer import DividedMegatronTrainer, MegatronTrainer

        kind = DividedMegatronTrainer if options.use_distributed_optimizer else MegatronTrainer
        return kind(model, groups, options, report)
    return Trainer(model, groups, options, report)


def _resume(trainer: Trainer, inputs: Inputs, progress: Progress) -> Inputs:
    """Load the checkpoint, and rename the folder of an earlier run's checkpoints unless this run goes on with them.

    Returns the inputs with the checkpoint that was loaded, which is an earlier one if the newest is damaged.
    """
    directory = inputs.out / "checkpoints"
    checkpoint = resume(trainer, directory, inputs.checkpoint, inputs.requirements, progress.print_line)
    if checkpoint is None or is_deepspeed(checkpoint[0]):
        return inputs
    decay_steps = run_on_every_rank(lambda: read_training(checkpoint[0]).decay_steps, "cannot resume", ValueError)
    progress.print_decay(decay_steps)
    return replace(inputs, checkpoint=checkpoint)


def _train(trainer: Trainer, inputs: Inputs, progress: Progress, interruption: Interruption) -> int:
    """Train from the step `inputs.start` on; returns the number of steps done, earlier runs included."""
    options, step = trainer.options, inputs.start
    saver = Saver(trainer, inputs.out / "checkpoints", inputs.requirements)
    profiler = Profiler(options, trainer.groups.rank)
    try:
        for step in range(inputs.start + 1, options.train_iters + 1):
            with profiler.step(step):
                result = trainer.step(inputs.batches, step - 1)
            is_last = step == options.train_iters
            held_out = inputs.corpus.held_out if is_last or is_due(step, options.eval_interval) else None
            progress.end_step(step, result, is_logged=held_out is not None)
            if held_out is not None:
                progress.add_evaluation(step, trainer.evaluate(held_out))
            progress.write_log()
            if reason := saver.end_step(step, interruption):
                progress.print_line(f"leaving after step {step}, {reason}; --resume continues")
                break
        profiler.close()
    except Failure:  # on every rank: a checkpoint that is under way is completed
        with contextlib.suppress(Failure):
            saver.finish()
        raise
    saver.finish()
    progress.close()
    return step


def _write_model(model: Model, inputs: Inputs, progress: Progress) -> None:
    """Write the Hugging Face directory with its tokenizer; Failure on every rank if rank 0 cannot write the tokenizer."""
    (save if model.lora is None else save_lora)(model, inputs.out)
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    run_on_every_rank(
        lambda: inputs.corpus.write_tokenizer(inputs.out) if is_first_rank else None,
        f"cannot write the tokenizer to {inputs.out}",
    )
    progress.print_line(f"saved {inputs.out}")


def make_model(options: Options, config: Config, groups: Groups, device: torch.device) -> Model:
    """The model to train: that of --init-from, or a new one. All ranks of `groups` call it together."""
    more: dict[str, Any] = dict(
        dtype=getattr(torch, options.params_dtype),
        device=device,
        reduce=options.reduce,
        **_context_of(options, config, groups),
        sequence_parallel=options.sequence_parallel,
        recompute=options.recompute_activations,
    )
    if options.init_from:
        model = load(options.init_from, groups.tensor, data_group=groups.data, **more)
        if options.lora_rank:
            add_lora(model, options.lora_rank, options.lora_alpha, options.lora_targets, options.seed)
        return model
    model = build(config, groups.tensor, groups.data, **more)
    return initialize_parameters(model, options.seed)


def _context_of(options: Options, config: Config, groups: Groups) -> dict[str, Any]:
    """The arguments of `load` that say how the context ranks share a sequence; none if there is one rank.

    ValueError if --context-schedule does not fit them.
    """
    if groups.context is None:
        return {}
    name, sizes = options.context_schedule, (groups.tensor_ranks, options.seq_length, options.micro_batch_size)
    exchange = name == "search" and scan_plan(groups.context, config, *sizes)[1]
    return {"context": schedule_of(name, groups.context, config, *sizes), "exchange_channels": exchange}


def _make_output_directory(path: str) -> Path:
    """Create the output directory and its folder of checkpoints; ValueError if one of them cannot be written."""
    out = Path(path)
    for folder in (out, out / "checkpoints"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(f"cannot write to --out {folder}: {error.strerror}") from None
    return out


def _resume_requirements(options: Options, config: Config, corpus: Corpus) -> dict[str, Any]:
    """What a resumed run must have in common with the run that wrote its checkpoint, as JSON values."""
    shape = {name: value for name, value in asdict(config).items() if name not in ("raw", "unknown")}
    run = {name: getattr(options, name) for name in ("global_batch_size", "seq_length", "seed", "params_dtype")}
    if options.lora_rank:
        run |= {name: getattr(options, name) for name in ("lora_rank", "lora_alpha", "lora_targets")}
    text = {"training_tokens": len(corpus.train.ids), "training_text": _checksum(corpus.train)}
    return json.loads(json.dumps({**shape, **run, **text}))


def _exchange_of(model: Model) -> str:
    """How its context ranks share a sequence."""
    exchanges = model.context_ranks is not None and model.context_ranks.exchanges_channels
    return f"{model.schedule}, {'exchanging channels' if exchanges else 'passing states'}"


def _checksum(tokens: Tokens) -> int:
    array: Any = tokens.ids.numpy()
    return zlib.crc32(array)


def _summary(model: Model, groups: Groups, inputs: Inputs) -> str:
    """One line about the model, the ranks, the text and the output directory."""
    size = sum(math.prod(field_of(p).shape) for p in model.parameters())
    context = "" if groups.context is None else f" {groups.context_ranks} context ({_exchange_of(model)}) x"
    corpus, out = inputs.corpus, inputs.out
    held_out = f"{corpus.held_out.text_bytes:,} held out" if corpus.held_out else "nothing held out: one document"
    if inputs.checkpoint:
        target = f"resuming {inputs.checkpoint[0]}"
    elif find_checkpoints(out / "checkpoints"):
        target = f"overwriting {out}; its checkpoints replace those in {out / 'checkpoints.old'}"
    else:
        target = f"{'overwriting' if (out / 'config.json').exists() else 'writing'} {out}"
    return (
        f"{model.config.family}, {size:,} parameters; {model.ranks.size} tensor x{context} {groups.data_ranks} "
        f"data-parallel ranks; {corpus.train.text_bytes:,} bytes of text, {held_out}; {target}"
    )
