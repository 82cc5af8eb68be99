"""TLS for the listening socket."""

from __future__ import annotations

import ssl


class TLSError(RuntimeError):
    """The certificate or its key cannot be used; the message is one line for the user."""


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """Return a context of TLS 1.2 and newer; raises `TLSError` that names the files.

    `key` may be None if the certificate's file holds it too. A key with a passphrase is refused:
    there is nobody to ask.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse() -> str:
        raise TLSError(f"the key in {key or certificate} has a passphrase; store it without one")

    try:
        context.load_cert_chain(certificate, key, refuse)
    except (OSError, ssl.SSLError) as error:
        files = certificate if key is None else f"{certificate} and {key}"
        raise TLSError(f"cannot use {files} for TLS: {error.strerror or error}") from error
    return context
