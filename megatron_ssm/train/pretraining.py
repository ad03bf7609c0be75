"""A whole pretraining run: from text and a tokenizer over checkpoints to a Hugging Face directory."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commfabric.collectives.agreement import on_first, together
from commfabric.foundation.command_line import Failure
from commfabric.foundation.launcher import launched_ranks, ranks_that_slurm_did_not_start
from megatron_ssm.checkpoints.disk import in_one_line
from megatron_ssm.checkpoints.folders import find_checkpoints, read_training
from megatron_ssm.checkpoints.hf import build, load, save
from megatron_ssm.checkpoints.hf_directory import remove_weights
from megatron_ssm.checkpoints.peft import remove_adapters, save_lora
from megatron_ssm.kernels.report import kernels_line
from megatron_ssm.model.adapters import add_lora
from megatron_ssm.model.context import scan_plan, schedule_of
from megatron_ssm.model.initialization import initialize as initialize_parameters
from megatron_ssm.model.model import Model
from megatron_ssm.parallel.groups import Groups, check_device, check_world, device_of_rank, initialize, join, shut_down
from megatron_ssm.parallel.heartbeat import watched
from megatron_ssm.spec.fields import field_of
from megatron_ssm.spec.stack import Stack

from .batches import BatchSizes
from .options import Options
from .profiling import Profiler, utilization
from .progress import Progress, is_due
from .run_inputs import RunInputs, ignored_options, read_on_all_ranks
from .saving import Interruption, Saver, claim, only_run, resume, resumes_deepspeed
from .trainer import Trainer


def pretrain(options: Options) -> None:
    """Train as the options say. Called on every rank that a launcher has started, or alone.

    If a rank is lost after all have met, the processes of the others end (see `parallel.heartbeat`).

    Raises:
        ValueError: An option or an input is wrong; on every rank.
        Failure: Training cannot go on; on every rank.
    """
    tensor, context = options.tensor_model_parallel_size, options.context_parallel_size
    expert = options.expert_model_parallel_size
    check_world(tensor, launched_ranks(), context, expert)
    options.accumulation(launched_ranks() // (tensor * context))
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")

    if options.use_distributed_optimizer and options.engine == "torch" and device == "cuda":
        options = replace(options, engine="megatron")

    def check() -> None:
        check_device(device)
        if options.engine == "megatron" and options.use_distributed_optimizer and device != "cuda":
            raise ValueError("--use-distributed-optimizer needs --device cuda: Megatron has it for CUDA's tensors only")

    try:
        timeout = timedelta(minutes=options.distributed_timeout_minutes)
        world = join(tensor, device, timeout, context=context, check=check, expert=expert)
        place = device_of_rank(device)
        limit = options.lost_rank_timeout
        if options.profile and limit:
            # The profiler holds Python's global lock while it writes the trace.
            limit = max(limit, timeout.total_seconds())
        with contextlib.ExitStack() as until_the_end, watched(limit):
            continues = until_the_end.enter_context(only_run(Path(options.out)))
            run = replace(options, resume="auto") if continues else options
            inputs = read_on_all_ranks(run, place)
            groups = initialize(tensor, device, timeout, context=context, expert=expert) if world > 1 else Groups()
            interruption = until_the_end.enter_context(Interruption(place))  # before, signals end the process at once
            _run(inputs, groups, place, interruption, is_restarted=run != options)
    finally:
        shut_down()


def _run(
    inputs: RunInputs, groups: Groups, device: torch.device, interruption: Interruption, is_restarted: bool
) -> None:
    options = inputs.options
    torch.manual_seed(options.seed)
    with make_model(options, inputs.config, groups, device) as model:
        progress = Progress(options)
        trainer = make_trainer(model, groups, options, inputs.deepspeed, progress.print_line)
        progress.print_line(kernels_line(model.device, model.dtype, model.ranks.transport, trains=True))
        progress.print_line(f"pretrain: {options.describe()}")
        for line in (*ignored_options(options, groups.data_context_ranks), *inputs.unread_samples()):
            progress.print_line(line)
        if tasks := ranks_that_slurm_did_not_start():
            progress.print_line(f"one rank: SLURM_NTASKS is {tasks}, and this process was not started by srun")
        summarize = in_one_line(f"cannot read {inputs.out}")(lambda: _summary(model, groups, inputs))
        progress.print_line(on_first(summarize, dist.group.WORLD))
        if is_restarted:
            progress.print_line("torchrun has restarted the ranks: they continue from their own checkpoints")
        inputs = _resume(trainer, inputs, progress)
        if options.profile and (last := options.profile_step_end) <= inputs.first_step:
            passed = f"--profile-step-end {last} is not after step {inputs.first_step}, from which the run continues"
            progress.print_line(f"--profile writes no trace: {passed}")
        progress.open_trackers(inputs.first_step)  # they may fail; then the checkpoints of an earlier run stay
        claim(inputs.out / "checkpoints", continues=inputs.checkpoint is not None and not resumes_deepspeed(options))
        trainer.batch_sizes = inputs.batch_sizes
        progress.begin(inputs.first_step, inputs.batch_sizes.samples, utilization(options, model, groups.ranks))
        step = _train(trainer, inputs, progress, interruption)
        try:
            trainer.write_own_format(inputs.out, step)
            if step == options.train_iters:
                with trainer.whole_parameters():
                    _write_model(model, inputs, progress)
        except (OSError, Failure) as error:  # on every rank
            hint = f"the checkpoint of step {step} is complete: once the disk can be written, start again with --resume"
            raise Failure(f"{error}; {hint}") from None
        progress.close()  # last: Weights & Biases may wait for its network


def make_trainer(
    model: Model,
    groups: Groups,
    options: Options,
    deepspeed: dict[str, Any] | None = None,
    report: Callable[[str], object] = print,
) -> Trainer:
    """The trainer of `options.engine`; all ranks make it together.

    Args:
        model: The model to train.
        groups: Its process groups.
        options: Those of the run.
        deepspeed: The configuration of DeepSpeed's engine, of `deepspeed_settings.read_settings`; None for another engine.
        report: Called on rank 0 with lines for the terminal.
    """
    if deepspeed is not None:
        from .deepspeed_trainer import DeepSpeedTrainer  # imports deepspeed, which is optional

        return DeepSpeedTrainer(model, groups, options, deepspeed, report)
    if options.engine == "megatron":
        from .megatron_trainer import DividedMegatronTrainer, MegatronTrainer

        kind = DividedMegatronTrainer if options.use_distributed_optimizer else MegatronTrainer
        return kind(model, groups, options, report)
    if options.engine == "fsdp" and groups.data_context is not None:
        from .fsdp_trainer import FsdpTrainer

        return FsdpTrainer(model, groups, options, report)
    return Trainer(model, groups, options, report)


def _resume(trainer: Trainer, inputs: RunInputs, progress: Progress) -> RunInputs:
    """Load the checkpoint.

    Returns the inputs with the checkpoint that was loaded, which is an earlier one if the newest is damaged.
    """
    directory = inputs.out / "checkpoints"
    checkpoint = resume(trainer, directory, inputs.checkpoint, inputs.requirements, progress.print_line)
    if checkpoint is None:
        return inputs
    if resumes_deepspeed(inputs.options):
        what = "the seed, batch sizes, sequence length and text"
        progress.print_line(
            f"{checkpoint[0]} does not record {what} of its run, so they are not compared with this run's"
        )
        return inputs
    read = in_one_line("cannot resume", ValueError)(lambda: read_training(checkpoint[0]))
    described = together(read, [dist.group.WORLD])
    progress.print_decay(described.decay_steps)
    sizes = BatchSizes.of(inputs.options, checkpoint[1], described.samples)
    return replace(inputs, checkpoint=checkpoint, batch_sizes=sizes)


def _train(trainer: Trainer, inputs: RunInputs, progress: Progress, interruption: Interruption) -> int:
    """Train from the step `inputs.first_step` on; returns the number of steps done, earlier runs included."""
    options, step = trainer.options, inputs.first_step
    saver = Saver(trainer, inputs.out / "checkpoints", inputs.requirements, inputs.first_step)
    profiler = Profiler(options, trainer.groups.rank, inputs.first_step)
    try:
        for step in range(inputs.first_step + 1, options.train_iters + 1):
            with profiler.step(step):
                result = trainer.step(inputs.batches, step - 1)
            is_last = step == options.train_iters
            held_out = inputs.corpus.held_out if is_last or is_due(step, options.eval_interval) else None
            progress.end_step(step, result, is_logged=held_out is not None)
            if held_out is not None:
                nats = trainer.evaluate(held_out, lambda: bool(interruption.on_any_rank()[0]))
                progress.add_evaluation(step, nats)
            progress.write_log()  # before the checkpoint, from which a resumed run does not repeat this step
            if reason := saver.end_step(step, interruption):
                progress.print_line(f"leaving after step {step}, {reason}; --resume continues")
                break
        saver.finish()  # before the trace, which may take longer to write than a launcher waits after SIGTERM
        profiler.close()
    except Failure:  # on every rank: a checkpoint that is under way is completed
        with contextlib.suppress(Failure):
            saver.finish()
        raise
    return step


def _write_model(model: Model, inputs: RunInputs, progress: Progress) -> None:
    """Write the model or its adapters, and the tokenizer; then remove files of the other kind that an earlier run wrote.

    Readers would combine both kinds. The model of --init-from remains if the adapters are written beside it. Failure on
    every rank if rank 0 cannot write the tokenizer, or remove a file.
    """
    out = inputs.out
    (save if model.lora is None else save_lora)(model, out)
    write_tokenizer = in_one_line(f"cannot write the tokenizer to {out}")(inputs.corpus.write_tokenizer)
    on_first(lambda: write_tokenizer(out), dist.group.WORLD)

    @in_one_line(f"cannot remove the files of an earlier run from {out}")
    def remove_other_kind() -> None:
        if model.lora is None:
            remove_adapters(out)
        elif not out.samefile(inputs.options.init_from):
            (out / "config.json").unlink(missing_ok=True)
            remove_weights(out)

    on_first(remove_other_kind, dist.group.WORLD)
    progress.print_line(f"saved {inputs.out}")


def make_model(options: Options, config: Stack, groups: Groups, device: torch.device) -> Model:
    """The model to train: loaded from --init-from, or new. All ranks of `groups` call it together."""
    more: dict[str, Any] = dict(
        dtype=getattr(torch, options.params_dtype),
        device=device,
        reduce=options.reduce,
        **_context_of(options, config, groups),
        sequence_parallel=options.sequence_parallel,
        recompute=options.recompute_activations,
        expert_group=groups.expert,
    )
    if options.init_from:
        model = load(options.init_from, groups.tensor, data_group=groups.data, **more)
        if options.lora_rank:
            add_lora(model, options.lora_rank, options.lora_alpha, options.lora_targets, options.seed)
        return model
    model = build(config, groups.tensor, groups.data, **more)
    return initialize_parameters(model, options.seed)


def _context_of(options: Options, config: Stack, groups: Groups) -> dict[str, Any]:
    """The arguments of `load` that say how the context ranks share a sequence; none if there is one rank.

    ValueError if --context-schedule does not fit them.
    """
    if groups.context is None:
        return {}
    name, sizes = options.context_schedule, (groups.tensor_ranks, options.seq_length, options.micro_batch_size)
    exchange = name == "search" and scan_plan(groups.context, config, *sizes)[1]
    return {"context": schedule_of(name, groups.context, config, *sizes), "exchange_channels": exchange}


def _summary(model: Model, groups: Groups, inputs: RunInputs) -> str:
    """One line about the model, the ranks, the text and the output directory; for rank 0 alone, which renames folders."""
    size = sum(math.prod(field_of(p).shape) for p in model.parameters())
    experts = "" if groups.expert is None else f", {groups.expert.size()} of which divide the experts"
    context = ""
    if model.context_ranks is not None:
        exchange = "exchanging channels" if model.context_ranks.exchanges_channels else "passing states"
        context = f" {groups.context_ranks} context ({model.schedule}, {exchange}) x"
    corpus, out = inputs.corpus, inputs.out
    held_out = (
        f"{corpus.held_out.text_bytes:,} held out"
        if corpus.held_out
        else "nothing held out" + ": one document" * bool(corpus.train)
    )
    tokens = inputs.requirements["training_tokens"]
    text = f"{corpus.train.text_bytes:,} bytes of text" if corpus.train else f"{tokens:,} tokens"
    if inputs.options.mock_data:
        text = "mock data"
    if inputs.checkpoint:
        target = f"resuming {inputs.checkpoint[0]}"
    elif find_checkpoints(out / "checkpoints"):
        target = f"overwriting {out}; its checkpoints replace those in {out / 'checkpoints.old'}"
    else:
        target = f"{'overwriting' if (out / 'config.json').exists() else 'writing'} {out}"
    return (
        f"{model.config.family}, {size:,} parameters; {model.ranks.size} tensor x{context} {groups.data_ranks} "
        f"data-parallel ranks{experts}; {text}, {held_out}; {target}"
    )
