"""Loggers that never fail whoever logs: a full disk must not end a request or a step."""

from __future__ import annotations

import logging

__all__ = ["SafeLogger", "safe_logger"]


class SafeLogger(logging.Logger):
    """A logger that drops a record whose handler raises, and counts it."""

    dropped = 0
    """Records lost in this process, over all loggers."""

    def callHandlers(self, record: logging.LogRecord) -> None:
        """Hand the record to the handlers of this logger and its parents."""
        try:
            super().callHandlers(record)
        except Exception:
            SafeLogger.dropped += 1


def safe_logger(name: str) -> logging.Logger:
    """Return the logger of that name, made safe.

    `logging` makes each logger once, of the class that is set at the time; this one stays in its
    tree and becomes safe where it is.
    """
    logger = logging.getLogger(name)
    logger.__class__ = SafeLogger
    return logger
