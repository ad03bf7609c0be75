"""Renders a template in a separate process with limits of time and memory, because a template is code that may need any
amount.

The process runs this file by its path, so until it has received its parent's `sys.path` it imports only the standard
library. It reads and writes lines of JSON: first the template, then the variables of each text.
"""

import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

SECONDS = 1  # of processor time, for compiling the template and for rendering each text
MEGABYTES = 256  # of data
LONGEST_ERROR = 500  # characters


class TemplateProcess:
    """The process that renders one template. ValueError if the template is not valid, or takes more than the limits.

    Any thread may use it. A process that exceeded the limits is replaced when the next text is rendered.
    """

    def __init__(self, template: str):
        self._template, self._lock = template, threading.Lock()
        self._process = self._start()

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. ValueError if the template refuses the variables, or takes more than the limits."""
        with self._lock:
            if self._process.poll() is not None:
                self._process = self._start()
            return _answer(self._process, variables)

    def _start(self) -> "subprocess.Popen[str]":
        """A process that has compiled the template."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, encoding="ascii",
        )  # fmt: skip
        try:
            _answer(process, sys.path)
            _answer(process, self._template)
        except ValueError:
            process.communicate()  # closes its stdin, which ends it
            raise
        return process


def _answer(process: "subprocess.Popen[str]", question: Any) -> str:
    """The process's answer to a line. ValueError if the answer is an error, or a limit has ended the process."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if answer.endswith("\n"):
        text, error = json.loads(answer)
    elif process.wait() == -signal.SIGPROF:
        error = f"it takes more than {SECONDS} s of processor time"
    else:
        error = f"it takes more than {MEGABYTES} MB, or its parts are nested too deeply"
    if error:
        raise ValueError(error)
    return text


def _main() -> None:
    """In the process: read `sys.path`, the template, and the variables of each text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the parent still answers its clients
    sys.path[:] = json.loads(sys.stdin.readline())
    environment = _environment()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEGABYTES * 10**6, MEGABYTES * 10**6))
    print(json.dumps(["", ""]), flush=True)
    template: Any = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        text = error = ""
        try:
            if template is None:
                template = environment.from_string(json.loads(line))
            else:
                text = template.render(json.loads(line))
        except MemoryError:
            raise
        except Exception as caught:  # of any kind: templates are code
            error = str(caught)[:LONGEST_ERROR] or type(caught).__name__
        print(json.dumps([text, error]), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _environment() -> Any:
    """Jinja's sandbox with what transformers gives to templates."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag {% generation %}, which marks the assistant's text for training; only its contents are rendered."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """The nodes between the tag and {% endgeneration %}."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is; Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    _main()
