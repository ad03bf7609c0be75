"""The line that says where the server is."""

import logging
import socket
from argparse import Namespace
from typing import Any

from commfabric.foundation.command_line import Printer

from .hosts import is_loopback

log = logging.getLogger(__name__)


def address(arguments: Namespace, listener: socket.socket) -> str:
    """Return the address of the server, and warn if other machines can reach it without a key."""
    if not (is_loopback(arguments.host) or arguments.api_key_file):
        log.warning(f"megatron-ssm: {arguments.host} is open to other machines, and there are no API keys")
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    return f"http://{host}:{listener.getsockname()[1]}"


def announce(name: str, where: str, size: str, **fields: Any) -> None:
    """Print the line, and log the start with these fields. size: of the server, in words."""
    line = f"megatron-ssm: serving {name} at {where} ({size})"
    try:
        Printer(True).print(f"{line}\n")
    except OSError as error:  # a full disk does not end the server
        log.warning(f"{line}; stdout cannot be written: {error.strerror}")
    log.info("start", extra={"fields": {"model": name, "address": where, **fields}})
