"""The lines of the server's log on stderr: text with `name=value` fields, or one JSON object for each line."""

import json
import logging
import re
from datetime import datetime, timezone
from typing import Any

from commfabric.foundation.launcher import this_rank

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
UNQUOTED = re.compile(r"[!#-<>-\[\]-~]+")  # printable ASCII without space, ", = and \


def configure_log(level: str, form: str, replica: str | None) -> None:
    """Write the log of this process to stderr, on ranks other than rank 0 only errors. replica: a field of each line."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines(form == "json", {"replica": replica and int(replica)}))
    logging.basicConfig(handlers=[handler], level=logging.ERROR, force=True)
    if this_rank() == 0:
        logging.getLogger("megatron_ssm").setLevel(level.upper())


class Lines(logging.Formatter):
    """Formats a record of the log: time, level, message, the `fields` of the record that are not None or "", and traceback.

    shared: fields of all records.
    """

    def __init__(self, is_json: bool, shared: dict[str, Any]):
        super().__init__()
        self._is_json, self._shared = is_json, shared

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")[:-6] + "Z"
        head = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        fields = {**self._shared, **getattr(record, "fields", {})}
        fields = {name: value for name, value in fields.items() if value not in (None, "")}
        traceback = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        if self._is_json:
            return json.dumps({**head, **fields, **({"traceback": traceback} if traceback else {})})
        words = [*" ".join(head.values()).split(), *(f"{name}={_text(value)}" for name, value in fields.items())]
        return f"{' '.join(words)}\n{traceback}".rstrip()


def _text(value: Any) -> str:
    """A value in a line of text: quoted as in JSON, unless it is one word."""
    return text if UNQUOTED.fullmatch(text := str(value)) else json.dumps(text)
