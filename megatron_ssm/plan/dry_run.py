"""`pretrain.py --dry-run`: the layout, memory, messages and time of a run, and checks of what it reads, before it starts."""

import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace

from commfabric import Fabric
from commfabric.foundation.command_line import Failure, Printer
from commfabric.foundation.launcher import launched_ranks, this_rank
from megatron_ssm.model.advise import block_outputs
from megatron_ssm.model.memory import Memory
from megatron_ssm.parallel.groups import check_world, shut_down
from megatron_ssm.train.indexed import IndexedBatches
from megatron_ssm.train.memory_budget import has_residuals, training_memory
from megatron_ssm.train.options import Options
from megatron_ssm.train.run_inputs import RunInputs

from .devices import DEVICES, read_device
from .divisions import FP32, Training, local_tokens, training_division
from .traffic import Message, backward_sums, exact_sums, gradient_sums, passed_states, replicated_gradients

GB, SHOWN = 1e9, 8  # replicas of which the ranks are printed
STATES = 3  # numbers of a parameter in a checkpoint: its value and AdamW's moments


def dry_run(options: Options) -> None:
    """Read and check everything that the run reads, and print what it will need; trains nothing.

    Rank 0 does it alone, for the ranks of the launcher or of `--dry-run RANKS`. It needs no accelerator.

    Raises:
        ValueError: An option or an input is wrong, as in the run itself.
        Failure: The disk has too little room for the checkpoints.
    """
    ranks = int(options.dry_run) if options.dry_run.isdecimal() else launched_ranks()
    tensor, context = options.tensor_model_parallel_size, options.context_parallel_size
    check_world(tensor, ranks, context, options.expert_model_parallel_size)
    data = ranks // (tensor * context)
    options.accumulation(data)
    if this_rank():
        return
    inputs = RunInputs.read(options, ranks)
    try:
        if isinstance(inputs.batches, IndexedBatches):
            inputs.batches.open()
        inputs.batches.samples(inputs.batch_sizes.samples, options.micro_batch_size)
    finally:
        shut_down(wait=False)
    Printer(is_enabled=True).print("\n".join(["dry run:", *_lines(inputs, data), "nothing was trained", ""]))
    needed, free = _checkpoints(inputs), shutil.disk_usage(inputs.out).free
    if not options.lora_rank and needed > free:
        raise Failure(f"{inputs.out} has {free / GB:.3g} GB free, fewer than {needed / GB:.3g} GB")


def _lines(inputs: RunInputs, data: int) -> Iterator[str]:
    options, config = inputs.options, inputs.config
    tensor, context = options.tensor_model_parallel_size, options.context_parallel_size
    yield f"  ranks: {tensor} tensor x {context} context x {data} data-parallel"
    for replica in range(min(data, SHOWN)):
        first = replica * tensor * context
        parts = (f"{start}-{start + tensor - 1}" if tensor > 1 else str(start)
                 for start in range(first, first + tensor * context, tensor))  # fmt: skip
        yield f"    replica {replica}: ranks {' | '.join(parts)}"
    if data > SHOWN:
        yield f"    ... {data - SHOWN} more replicas"
    tokens = inputs.requirements["training_tokens"]
    yield f"  model: {config.family}, {config.elements:,} parameters, vocabulary of {config.vocab_size:,}"
    yield f"  data: {tokens:,} training tokens; tokenizer of {inputs.corpus.vocab_size:,} ids"
    batch = f"{options.global_batch_size} x {options.seq_length} tokens"
    yield f"  steps: {inputs.first_step} to {options.train_iters}, of {batch}"
    yield from (f"    {line}" for line in inputs.unread_samples())
    yield f"  memory: {_memory(inputs)}"
    messages = [f"{nbytes / 1e6:,.3g} MB for {name}" for name, nbytes in _messages(inputs, data).items()]
    for message in messages or ["none"]:
        yield f"  messages of a rank in a step: {message}"
    if messages and (differences := _uncounted(options, bool(config.attentions))):
        yield f"    without {', '.join(differences)}"
    yield f"  time: {_time(inputs, data)}"
    less = ", less with --lora-rank" if options.lora_rank else ""
    yield f"  disk: {_checkpoints(inputs) / GB:.3g} GB for checkpoints and the model in {inputs.out}{less}"


def _bytes_of_rank(inputs: RunInputs) -> tuple[int, int]:
    """(activations, all) in bytes on a rank, by the formula of --memory-budget."""
    options = inputs.options
    memory = training_memory(options, inputs.config, options.expert_model_parallel_size)
    tokens = local_tokens(inputs.config, options.seq_length, options.context_parallel_size)
    activations = memory.peak(options.micro_batch_size, tokens)
    return activations, memory.step(options.micro_batch_size, tokens, has_residuals(options))


def _memory(inputs: RunInputs) -> str:
    options = inputs.options
    activations, total = _bytes_of_rank(inputs)
    less = ", less what the engine divides over replicas" if options.divides_state else ""
    less += ", less with --lora-rank" if options.lora_rank else ""
    state = (total - activations) / GB
    parts = f"{state:.3g} of parameters, gradients and moments{less}; {activations / GB:.3g} of activations"
    return f"{total / GB:.3g} GB on a rank: {parts}"


def _messages(inputs: RunInputs, data: int) -> dict[str, float]:
    """{purpose: bytes that a rank gives to collectives in a step}, without those of `_uncounted`."""
    options, config = inputs.options, inputs.config
    tensor, context = options.tensor_model_parallel_size, options.context_parallel_size
    rows = options.micro_batch_size * local_tokens(config, options.seq_length, context)
    outputs = [Message("all_reduce", rows * nbytes, tensor, count) for nbytes, count in block_outputs(config, tensor)]
    sums = [*outputs, *exact_sums(config, tensor, rows), *backward_sums(config, tensor, rows)]
    weights = Memory(config, tensor, FP32, expert_ranks=options.expert_model_parallel_size).weights
    steps = options.accumulation(data)
    found = {
        "tensor-parallel sums": steps * _bytes(sums) + _bytes(replicated_gradients(config, tensor)),
        "states of context ranks": steps
        * _bytes(passed_states(config, tensor, context, options.micro_batch_size, True)),
        "sums of gradients": _bytes(gradient_sums(weights, context * data)),
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _uncounted(options: Options, has_attention: bool) -> list[str]:
    """The parts of `_messages` that are not counted, or are counted as if they were dense and in fp32."""
    found = {
        f"the savings of --gradient-mode {options.gradient_mode}": options.gradient_mode != "dense",
        f"the savings of --reduce {options.reduce}": options.reduce != "fp32",
        f"the savings of --lora-rank {options.lora_rank}": options.lora_rank > 0,
        "the parameters that the engine gathers": options.divides_state,
        "attention over context ranks": has_attention and options.context_parallel_size > 1,
        "tokens on their way to experts": options.expert_model_parallel_size > 1,
    }
    return [name for name, is_uncounted in found.items() if is_uncounted]


def _bytes(messages: Iterable[Message]) -> float:
    return sum(each.nbytes * each.count for each in messages if each.ranks > 1)


def _time(inputs: RunInputs, data: int) -> str:
    options = inputs.options
    if not options.dry_run_fabric:
        return "not predicted; --dry-run-fabric F of `sparsefusion measure --out F` and --dry-run-device h100 do so"
    name = options.dry_run_device
    device = DEVICES.get(name) or read_device(name)
    job = Training(options.seq_length, options.global_batch_size, options.micro_batch_size)
    sizes = (
        options.tensor_model_parallel_size,
        options.context_parallel_size,
        data,
        options.expert_model_parallel_size,
    )
    fabric = Fabric.load(options.dry_run_fabric)
    _, needed = _bytes_of_rank(inputs)
    if needed > device.memory:
        divided = ", if the engine divided nothing over replicas" if options.divides_state else ""
        sizes_in_gb = f"needs {needed / GB:.3g} GB; a rank has {device.memory / GB:.3g} GB"
        return f"none on {device.name}{divided}: {sizes_in_gb}"
    roomy = replace(device, memory=math.inf)  # whether it fits is decided above, by all options of the run
    found = training_division(inputs.config, *sizes, job, fabric, roomy, options.recompute_activations)
    hours = found.seconds * (options.train_iters - inputs.first_step) / 3600
    return f"{found.seconds * 1e3:.4g} ms a step, {hours:.3g} hours in all, predicted for {device.name}"


def _checkpoints(inputs: RunInputs) -> float:
    """Bytes of all checkpoints that exist at once, one more than --keep, and of the model."""
    options = inputs.options
    return options.itemsize * inputs.config.elements * (STATES * (options.keep + 1) + 1)
