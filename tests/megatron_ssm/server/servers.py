"""Servers in processes of their own, and the tokens that they should reply with."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import torch
from programs import PYTHON, Fork

from megatron_ssm import generate, load
from serving import checkpoint

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 60  # for what takes seconds
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | map(attribute='function.name') | join }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking %}<think>{% else %}{# </think> #}{% endif %}"
)
IGNORE_EOS = {"ignore_eos": True}  # random models end texts at random


@dataclass
class Server:
    """A running server. process: the one that was started, which leads a group; with --tp 2 it starts those of the ranks."""

    process: Fork | subprocess.Popen
    url: str
    log: Path
    headers: dict

    def client(self, **options):
        """An HTTP client."""
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=LIMIT_S, **options)

    def post(self, path, body, **options):
        """The reply to a JSON body."""
        with self.client() as client:
            return client.post(path, json=body, **options)

    def tokens(self, body, path="/v1/completions"):
        """The token ids of each choice of a reply."""
        reply = self.post(path, {"return_token_ids": True, **IGNORE_EOS, **body})
        assert reply.status_code == 200, reply.text
        return [choice["token_ids"] for choice in reply.json()["choices"]]

    def metric(self, name, labels=""):
        """The sum of a metric over its labels, or over those that contain a text."""
        text = httpx.get(self.url + "/metrics", timeout=LIMIT_S).text
        rows = re.findall(rf"^megatron_ssm_{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for found, value in rows if labels in found)

    def wait_until_idle(self):
        """Wait until no request has a slot or waits for one; fails after LIMIT_S."""
        self.wait_until(lambda: self.metric("running") == self.metric("waiting") == 0, "slots have leaked")

    def wait_until(self, is_so, otherwise):
        """Wait until `is_so()` is true; fails after LIMIT_S with the message `otherwise`."""
        for _ in range(50 * LIMIT_S):
            if is_so():
                return
            time.sleep(0.02)
        raise AssertionError(otherwise)

    def ranks(self):
        """The processes of the ranks that the started process has started, rank 0 first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(child) for child in children.read_text().split()]

    def resident(self):
        """The memory of each rank's process, in pages."""
        return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._processes()]

    def sockets(self):
        """How many sockets each rank's process has open."""
        return [open_sockets(pid) for pid in self._processes()]

    def _processes(self):
        return self.ranks() or [self.process.pid]

    def end(self, number=signal.SIGTERM):
        """Send a signal; returns the exit code and what was logged."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S), self.log.read_text()


def open_sockets(pid):
    """How many sockets a process has open."""
    return sum(map(_is_socket, Path(f"/proc/{pid}/fd").iterdir()))


def _is_socket(link):
    """Whether a link in /proc/PID/fd is to a socket; False if it was closed in the meantime."""
    try:
        return os.readlink(link).startswith("socket:")
    except FileNotFoundError:
        return False


@contextmanager
def server(directory, log, *flags, tp=1, key="", start=Fork):
    """A server of a checkpoint on a free port, with one thread per rank. log: the file for its stderr.

    start: how its process is made; subprocess.Popen is what people do, and takes seconds longer.
    """
    command = [*PYTHON, "serve", "--model", directory, "--port", 0, "--device", "cpu"]
    command += [*flags, *(["--tp", tp] if tp > 1 else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(log, "w") as stderr:
        process = start(
            list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        line = process.stdout.readline()
        url = re.search(r"serving \S+ at (http://\S+) ", line)
        assert url, f"{line}{Path(log).read_text()}"
        yield Server(process, url[1], Path(log), {"Authorization": f"Bearer {key}"} if key else {})
    except BaseException:
        print(f"the server's exit code: {process.poll()}; its log:\n{Path(log).read_text()}")
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()  # of its ranks, each ends when it notices
                process.wait()
        process.stdout.close()


@cache
def with_template(family):
    """The directory of a family's checkpoint, to which a chat template was added."""
    directory = checkpoint(family)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return directory


@cache
def model_of(directory):
    """The model of a checkpoint, in float32 on one rank."""
    return load(directory)


def expected(directory, prompt, new, seed=None, index=0, **options):
    """`generate`'s tokens for the reply `index` to a prompt, a text or token ids, in float32 on one rank."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    seed = None if seed is None else seed + index
    return generate(model_of(directory), torch.tensor([ids]), None, new, seed=seed, **options)[0].tolist()


@torch.no_grad()
def log_probabilities(directory, ids):
    """(len(ids), vocab): those of the token after each of `ids`."""
    return model_of(directory)(torch.tensor([ids]))[0].log_softmax(-1)


def text_of(tokens):
    """The text of byte tokens."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


def events(lines):
    """The JSON objects in the lines of an event stream, which ends with [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if line and not line.startswith(":")]  # no comments
    assert data[-1] == "[DONE]", data[-1]
    return [json.loads(each) for each in data[:-1]]
