"""Logging of a command."""

from __future__ import annotations

import logging


def set_up_logging(level: str) -> None:
    """Log to stderr from the given level on."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
