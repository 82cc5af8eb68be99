"""Flags of the commands that talk to a server: its address, and how it is verified."""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from .options import UsageError


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add how an https server is verified."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--cacert", type=Path, metavar="FILE", help="trust an https server by these certificates"
    )
    group.add_argument(
        "--insecure", action="store_true", help="do not verify who an https server is"
    )


def tls_context(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """Return what the flags ask for, None without any; raises `UsageError` for a bad file."""
    if arguments.insecure:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if arguments.cacert is None:
        return None
    try:
        return ssl.create_default_context(cafile=arguments.cacert)
    except ssl.SSLError as error:
        raise UsageError(f"--cacert {arguments.cacert} holds no certificates") from error
    except OSError as error:
        raise UsageError(f"cannot read --cacert {arguments.cacert}: {error.strerror}") from error


def split_url(url: str) -> SplitResult:
    """Return the parts of a server's URL; its scheme may be left out.

    Raises `UsageError` for what is no address.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        # A port that is no number, a bracket without its pair: the same answer.
        pass
    raise UsageError(f"--url must look like http://127.0.0.1:8000, got {url!r}")


def output_file(text: str) -> Path:
    """Parse the path of a file to write, and find out at once whether that can work."""
    path = Path(text)
    try:
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
    return path
