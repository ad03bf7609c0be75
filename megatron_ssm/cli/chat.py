"""`megatron-ssm chat DIR`: a conversation in the terminal. Each line of stdin is a message, also when stdin is a pipe."""

import json
import queue
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from commfabric.foundation.command_line import Printer
from megatron_ssm.engine.engine import Engine
from megatron_ssm.engine.generation_config import read_generation_config
from megatron_ssm.parallel.heartbeat import Watch
from megatron_ssm.server.channel import Channel
from megatron_ssm.server.command import ModelInputs, run_engine
from megatron_ssm.server.driver import Driver
from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.prepared_request import TOO_LONG, PreparedRequest, ServedModel, prepare_request
from megatron_ssm.server.replies import Replies
from megatron_ssm.server.request_models import ChatRequest, parse_body
from megatron_ssm.server.sequences import Update

HELP = "/reset: a new conversation; /system TEXT: a new one with this system message; /exit or Ctrl-D: leave"
COMMAND = re.compile(r"/(reset|system|exit)(?:\s+(.*))?|/[a-z]+")
CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
DIM, NORMAL = "\x1b[2m", "\x1b[0m"
LEAST_ROOM, ROOM = (
    1 / 4,
    1 / 2,
)  # shares of the context: if a prompt leaves less to the reply, messages are dropped until ROOM
# Parameters of a request that are options of the command, too
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")


def chat(arguments: Namespace) -> None:
    """Run `chat` on every rank: rank 0 reads messages and prints replies. Raises like `run_engine`."""
    run_engine(arguments, _read, _chat_on_rank_0)


def _read(arguments: Namespace, ranks: int, rank: int, opened: ExitStack) -> ModelInputs:
    """The inputs of `run_engine`. ValueError if the model has no chat template, or an option is out of range."""
    longest = int(arguments.max_length * (1 - LEAST_ROOM))
    if (arguments.max_new_tokens or 0) > longest:
        raise ValueError(
            f"--max-new-tokens {arguments.max_new_tokens}: a reply may have at most {longest} of the tokens of --max-length "
            f"{arguments.max_length}"
        )
    inputs = ModelInputs.of(arguments, ranks)
    if inputs.served.template.path is None:
        raise ValueError(
            f"{arguments.model} has no chat template, so it cannot chat; it can continue a text: "
            f"megatron-ssm generate --model {arguments.model} --prompt TEXT"
        )
    try:
        parse_body(ChatRequest, json.dumps(_body(arguments, [{"role": "user", "content": ""}])))
    except ApiError as error:
        raise ValueError(str(error)) from None
    return inputs


def _body(arguments: Namespace, messages: list[dict[str, str]]) -> dict[str, Any]:
    """The request for the next reply, as a client of the server would send it."""
    options = {name: getattr(arguments, name) for name in OPTIONS}
    adapter = next(iter(arguments.lora), "")
    longest = arguments.max_new_tokens or read_generation_config(arguments.model).get("max_new_tokens")
    return {"model": adapter, "messages": messages, "max_tokens": longest, **options}


def _chat_on_rank_0(engine: Engine, channel: Channel, inputs: ModelInputs, arguments: Namespace, watch: Watch) -> None:
    updates: Updates = queue.SimpleQueue()

    def deliver(news: list[Update]) -> None:
        for update in news:
            updates.put((time.perf_counter(), update))

    driver = Driver(engine, channel, deliver, lambda error: updates.put((0.0, error)))
    driver.start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Chat(inputs.served, arguments, driver, updates).run()
    finally:
        driver.stop()
        driver.join()


Updates = queue.SimpleQueue[tuple[float, Update | BaseException] | None]  # with the time of each; None: Ctrl-C


class Chat:
    """A conversation. messages: with the fields "role" and "content", the system message first if there is one."""

    def __init__(self, served: ServedModel, arguments: Namespace, driver: Driver, updates: "Updates") -> None:
        self._served, self._arguments, self._driver, self._updates = served, arguments, driver, updates
        self._out, self._is_terminal = Printer(True), sys.stdout is not None and sys.stdout.isatty()
        self.messages: list[dict[str, str]] = []
        self.reset(arguments.system)

    def reset(self, system: str | None) -> None:
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def run(self) -> None:
        """Answer each line until stdin ends."""
        if sys.stdin.isatty():
            _note(HELP)
        for line in _lines():
            command = COMMAND.fullmatch(line)
            if command is None:
                self.reply(line)
            elif command[1] == "exit":
                return
            elif command[1] == "system":
                self.reset(command[2])
            elif command[1] == "reset":
                self.messages = [each for each in self.messages if each["role"] == "system"]
            else:
                _note(HELP)

    def reply(self, text: str) -> None:
        """Print the reply to a message, and add both to the conversation; without a reply, neither is added."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            content = self._print_reply(self._prepare(messages))
        except ApiError as error:
            _note(f"error: {error}")
            return
        self.messages = [*messages, {"role": "assistant", "content": content}]

    def _prepare(self, messages: list[dict[str, str]]) -> PreparedRequest:
        """The request for a reply, after the oldest messages were dropped if there is little room. Raises ApiError."""
        length, needed, dropped = self._served.max_length, LEAST_ROOM, 0
        while True:
            turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
            try:
                body = json.dumps(_body(self._arguments, messages))
                request = prepare_request(ChatRequest, body, "", self._served)
                if len(turns) == 1 or length - len(request.prompts[0][1]) >= needed * length:
                    break
            except ApiError as error:
                if len(turns) == 1 or error.code != TOO_LONG:
                    raise
            del messages[turns[0] : turns[1]]
            needed, dropped = ROOM, dropped + 1
        if dropped:
            _note(
                f"the context of {length} tokens is full: the oldest messages ({dropped}) and their replies were dropped"
            )
        return request

    def _print_reply(self, request: PreparedRequest) -> str:
        """Print a reply as it comes, and its speed; returns its text. ApiError if it cannot be made."""
        replies, sequence, text, times, tokens = Replies(request, self._served), request.sequences[0], "", [], 0
        start, is_dim = time.perf_counter(), False

        def stop(*_: object) -> None:
            self._driver.cancel(sequence)
            self._updates.put(None)

        finished: str | None = "stopped"
        with _handler(signal.SIGINT, stop):
            self._driver.add(sequence)
            while (news := self._updates.get()) is not None:
                now, update = news
                if isinstance(update, BaseException):
                    raise update
                if update.sequence is not sequence:  # the rest of a reply that was stopped
                    continue
                if update.error is not None:
                    raise update.error
                times.append(now)
                tokens += len(update.tokens)
                piece = replies.add_update(update)
                if piece.reasoning and self._is_terminal:
                    self._print((DIM if not is_dim else "", piece.reasoning))
                    is_dim = True
                if piece.text:
                    self._print((f"{NORMAL}\n" if is_dim else "", piece.text))
                    is_dim, text = False, text + piece.text
                if update.finished is not None:
                    finished = update.finished
                    break
        self._out.print(f"{NORMAL if is_dim else ''}\n")
        speed = f", {(tokens - 1) / (times[-1] - times[0]):.1f} tokens/s" if len(times) > 1 else ""
        first = f", the first after {times[0] - start:.2f} s" if times else ""
        ended = {"stopped": ", stopped", "length": ", cut at the limit", "error": ", ended by NaN"}.get(
            finished or "", ""
        )
        _note(f"[{tokens} tokens{speed}{first}{ended}]")
        return text

    def _print(self, parts: tuple[str, str]) -> None:
        """Print a style, which may have control characters, and text, which loses them."""
        style, text = parts
        self._out.print(style + text.translate(CONTROL))


@contextmanager
def _handler(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _lines() -> Iterator[str]:
    """The lines of stdin that are not blank; at a terminal, with a prompt, at which Ctrl-C only clears the line."""
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401 - `input` then uses it

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            _note(HELP)
            continue
        if line:
            yield line


def _note(text: str) -> None:
    is_terminal = sys.stderr.isatty()
    print(f"{DIM}{text}{NORMAL}" if is_terminal else text, file=sys.stderr, flush=True)
