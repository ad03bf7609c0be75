"""The command `megatron-ssm serve`, on every rank, and its engine, which `megatron-ssm chat` runs too."""

import hashlib
import logging
import re
import signal
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from commfabric.collectives.agreement import together
from commfabric.foundation.command_line import is_lack_of_memory
from commfabric.foundation.launcher import launched_ranks
from megatron_ssm.checkpoints.hf import dtype_of, load
from megatron_ssm.checkpoints.peft import check_lora, with_lora
from megatron_ssm.engine.engine import Engine
from megatron_ssm.engine.generation_config import sampling_defaults
from megatron_ssm.engine.speculation import check_vocabularies
from megatron_ssm.engine.text import check_fits, load_tokenizer, stop_tokens
from megatron_ssm.layers.families import read_for_ranks
from megatron_ssm.model.model import Model
from megatron_ssm.parallel.groups import check_device, device_of_rank, join, replicas, shut_down
from megatron_ssm.parallel.heartbeat import Watch, watched
from megatron_ssm.parallel.local_launch import handle_like_sigterm
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.spec.stack import Stack

from .announcement import address, announce
from .app import software_version
from .channel import Channel
from .chat_template import ChatTemplate
from .connections import allow_files, bind, bind_to_path
from .driver import run_follower
from .hosts import Hosts
from .keys import Keys
from .lifecycle import run_server
from .prepared_request import ServedModel
from .service import Limits, Service
from .tool_calls import PARSERS, detect_parser

log = logging.getLogger(__name__)

I = TypeVar("I", bound="ModelInputs")  # noqa: E741

EXTRA_TOKENS = 1  # per slot: with max_tokens=0, the engine generates a token that the reply leaves out


def serve(arguments: Namespace) -> None:
    """Load the model, and serve it over HTTP until a signal ends the server; see `run_engine`.

    Also ValueError on rank 0 if another server has taken the address while the model was loaded.
    """
    run_engine(arguments, _Inputs.read, _serve_on_rank_0)


def run_engine(
    arguments: Namespace,
    read: Callable[[Namespace, int, int, ExitStack], I],
    on_rank_0: Callable[[Engine, Channel, I, Namespace, Watch], None],
) -> None:
    """Load the model on all ranks, and run an engine. Rank 0 gives it requests; other ranks step theirs in lockstep.

    Args:
        arguments: The options of `serve` or `chat`.
        read: Reads the inputs, which are compared across ranks, from the arguments, the number of tensor-parallel ranks,
            this rank, and a stack that closes what it opens.
        on_rank_0: Called on rank 0 when the engine is ready.

    Raises:
        ValueError, OSError: On every rank: before the model is loaded, if an input is wrong on any rank; later, if a rank
            has no memory for the caches of the slots.
        RuntimeError: A rank was lost.
    """
    ranks = launched_ranks()
    tensor = arguments.tp or max(1, ranks // arguments.ep)
    if tensor * arguments.ep != ranks:
        asked = f"--tp {tensor}" if arguments.ep == 1 else f"--tp {tensor} --ep {arguments.ep}"
        raise ValueError(f"{asked}: there are {ranks} ranks, and a server uses all of them for one model")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    opened = ExitStack()  # the listener
    try:
        join(tensor, device, init_method=arguments.rendezvous, check=lambda: check_device(device), expert=arguments.ep)
        handle_like_sigterm()  # only now: while ranks join, a Python handler would not run until all have joined
        group = dist.group.WORLD
        rank, place = 0 if group is None else dist.get_rank(), device_of_rank(device)
        inputs = together(
            lambda: read(arguments, tensor, rank, opened), [group], lambda inputs: inputs.fingerprint, place
        )
        groups = replicas(tensor, device, expert=arguments.ep)
        models = [
            load(directory, groups.tensor, None, dtype_of(arguments.dtype), place, arguments.reduce,
                 weights=arguments.weights, draft_head=has_head, expert_group=groups.expert)
            for directory, has_head in ((arguments.model, arguments.draft_head), (arguments.draft, False))
            if directory is not None
        ]  # fmt: skip
        is_local = arguments.rendezvous is not None  # by run_local_ranks
        with watched(arguments.lost_rank_timeout, is_local) as watch, ExitStack() as stack:
            model, *drafts = map(stack.enter_context, models)
            adapters = {name: stack.enter_context(with_lora(model, where)) for name, where in arguments.lora.items()}
            engine = together(lambda: _engine(arguments, model, drafts, adapters, inputs.engine), [group], device=place)
            channel = Channel(model.ranks if groups.expert is None else Ranks.of(group, share=None))
            if rank:
                _leave_signals_to_rank_0()
                run_follower(engine, channel)
            else:
                log.info(model.start_line)
                on_rank_0(engine, channel, inputs, arguments, watch)
    finally:
        opened.close()
        shut_down()


def _engine(
    arguments: Namespace, model: Model, drafts: Sequence[Model], adapters: dict[str, Model], options: dict[str, Any]
) -> Engine:
    """The engine; ValueError if there is no memory for its caches."""
    try:
        return Engine(model, **options, draft=drafts[0] if drafts else None, adapters=adapters)
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        tried = re.search(r"[Tt]ried to allocate [^.:\n]*", str(error))
        raise ValueError(
            f"--slots {arguments.slots} --max-length {arguments.max_length}: not enough memory for the caches of "
            f"this many slots of this length{f' ({tried[0].strip().lower()})' if tried else ''}"
        ) from None


@dataclass(frozen=True)
class ModelInputs:
    """What is read of a model before its weights.

    Args:
        engine: The options of the engine.
        fingerprint: The inputs that must be equal on all ranks.
    """

    served: ServedModel
    engine: dict[str, Any]
    fingerprint: tuple

    @classmethod
    def of(cls, arguments: Namespace, ranks: int) -> "ModelInputs":
        """Read them. ranks: the number of tensor-parallel ranks. ValueError or OSError if one of them is wrong."""
        if arguments.draft is not None and arguments.draft_head:
            raise ValueError(
                f"--draft {arguments.draft} and --draft-head: one of them proposes tokens, so give only one"
            )
        directory = Path(arguments.model)
        config = read_for_ranks(arguments.model, ranks, arguments.ep)
        served = _served(arguments, directory, config, ranks)
        for adapters in arguments.lora.values():
            check_lora(config, adapters)
        draft = None if arguments.draft is None else _draft(arguments.draft, ranks, config, served.tokenizer)
        checksum = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
        engine = dict(
            slots=arguments.slots, max_length=arguments.max_length + EXTRA_TOKENS, token_budget=arguments.token_budget,
            prefix_bytes=int(arguments.prefix_gb * 2**30), speculate=arguments.speculate,
        )  # fmt: skip
        return cls(served, engine, (config, draft, checksum, engine))


@dataclass(frozen=True)
class _Inputs(ModelInputs):
    """The inputs of the server. listener: the bound socket of rank 0. Other ranks have None, and no keys."""

    keys: Keys
    hosts: Hosts
    listener: socket.socket | None

    @classmethod
    def read(cls, arguments: Namespace, ranks: int, rank: int, opened: ExitStack) -> "_Inputs":
        """Read the inputs on this rank. opened: the stack that closes the listener. Raises like `ModelInputs.of`."""
        model = ModelInputs.of(arguments, ranks)
        is_first = rank == 0
        keys = Keys.read(arguments.api_key_file) if is_first and arguments.api_key_file else Keys()
        if is_first:
            allow_files(arguments.max_connections)
        listener = opened.enter_context(_listener(arguments)) if is_first else None
        host = arguments.host if listener is None or arguments.socket else listener.getsockname()[0]
        hosts = Hosts(host, arguments.allowed_host, arguments.allowed_origin)
        return cls(**vars(model), keys=keys, hosts=hosts, listener=listener)


def _served(arguments: Namespace, directory: Path, config: Stack, ranks: int) -> ServedModel:
    """The model as clients see it; ValueError or FileNotFoundError if the directory lacks something."""
    tokenizer = load_tokenizer(directory)
    check_fits(tokenizer, config)
    template = ChatTemplate(directory, arguments.chat_template)
    parser = PARSERS[arguments.tool_parser][0] if arguments.tool_parser else detect_parser(template.text)
    settings = (
        config,
        arguments.dtype,
        arguments.weights,
        arguments.reduce,
        arguments.device,
        ranks,
        arguments.ep,
        software_version(),
    )
    name, *aliases = arguments.served_model_name or [directory.resolve().name]
    adapters = {adapter: Path(where).resolve().name for adapter, where in arguments.lora.items()}
    for taken in adapters.keys() & {name, *aliases}:
        raise ValueError(f"--lora {taken}={arguments.lora[taken]}: the model itself has this name; choose another one")
    fingerprint = f"fp_{hashlib.sha256(repr(settings).encode()).hexdigest()[:12]}"
    return ServedModel(
        name, tokenizer, config.vocab_size,
        stop_tokens(directory, config, tokenizer), arguments.max_length, template, arguments.share_prefixes, fingerprint,
        parser, config.hidden_size, sampling_defaults(directory), directory.resolve().name, adapters,
        tuple(aliases),
    )  # fmt: skip


def _draft(directory: str, ranks: int, model: Stack, tokenizer: Tokenizer) -> Stack:
    """The configuration of the draft model; ValueError or FileNotFoundError if it cannot propose tokens for the model.

    A directory without tokenizer.json is taken to have the model's tokenizer.
    """
    draft = read_for_ranks(directory, ranks)
    check_vocabularies(draft, model)
    if (Path(directory) / "tokenizer.json").exists() and load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"--draft {directory}: its tokenizer has other tokens than the model's: they must be equal")
    return draft


def _serve_on_rank_0(engine: Engine, channel: Channel, inputs: _Inputs, arguments: Namespace, watch: Watch) -> None:
    """Answer HTTP requests, and print the address."""
    listener = inputs.listener
    assert listener is not None, "rank 0 has bound it"
    limits = Limits(
        arguments.slots, arguments.max_waiting, int(arguments.max_body_mb * 2**20), arguments.request_timeout,
        arguments.max_connections, arguments.arrival_timeout,
    )  # fmt: skip
    if arguments.socket is None:
        where = address(arguments, listener)
    else:
        where = arguments.socket  # of a replica
    size = f"{limits.slots} slots of {arguments.max_length} tokens, {engine.model.num_ranks} rank(s)"

    run_server(
        engine, channel, inputs.served, inputs.keys, inputs.hosts, Service(limits), listener, arguments.drain_timeout,
        lambda: announce(
            inputs.served.name, where, size, slots=limits.slots, max_length=arguments.max_length,
            dtype=engine.model.weights or str(engine.model.dtype).removeprefix("torch."), ranks=engine.model.num_ranks,
        ), watch,
    )  # fmt: skip


def _listener(arguments: Namespace) -> socket.socket:
    """The socket at --host and --port, or of a replica."""
    return bind(arguments.host, arguments.port) if arguments.socket is None else bind_to_path(arguments.socket)


def _leave_signals_to_rank_0() -> None:
    """Ignore SIGTERM and SIGINT on this rank. A launcher sends them to all ranks, but rank 0 must end its work first, and
    then ends the others.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
