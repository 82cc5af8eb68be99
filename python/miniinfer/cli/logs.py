"""Logging of a command."""

from __future__ import annotations

import datetime
import json
import logging
import re
from typing import Any

LOG_FORMATS = ("text", "json")

# C0 but the tab, DEL, C1, and what Unicode calls line and paragraph separators.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class LineFormatter(logging.Formatter):
    """Lines for people. What a message quotes can neither end its line nor colour the terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line before any traceback."""
        record.message = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what a record has in `fields` becomes fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        entry |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logging(level: str, log_format: str = "text") -> None:
    """Log to stderr from the given level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
