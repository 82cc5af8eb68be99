"""API keys: kept as hashes, compared in constant time, and whom each belongs to."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that opens the server; the key itself is forgotten."""

    digest: bytes
    """SHA-256 of the key."""
    name: str | None = None
    """What logs call its holder; keys of one name belong to one party."""

    @classmethod
    def of(cls, key: str, name: str | None = None) -> ApiKey:
        """Return the key of a text; raises `ValueError` if it is empty or has white space."""
        if not key or key != "".join(key.split()):
            raise ValueError("an API key must not be empty or hold white space")
        if name is not None and not (name.isprintable() and name.strip()):
            raise ValueError(f"the name of an API key must be printable text, got {name!r}")
        return cls(hash_key(key.encode("utf-8", "surrogateescape")), name)

    @property
    def tenant(self) -> str:
        """The party that fairness, limits and the prefix cache tell from others."""
        return self.name or self.digest.hex()[:16]


def hash_key(key: bytes) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key).digest()


def find_key(keys: Sequence[ApiKey], given: bytes) -> ApiKey | None:
    """Return the key that was given, if it is one of these.

    Every key is compared, so the time tells nothing of which one came close.
    """
    digest = hash_key(given)
    found = None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


def parse_key_file(text: str) -> list[ApiKey]:
    """Return the keys of a file: `key` or `name:key` on each line; # starts a comment line.

    Raises `ValueError` that names the line.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, separator, key = line.partition(":")
        try:
            keys.append(ApiKey.of(key.strip(), name.strip()) if separator else ApiKey.of(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return keys


def party_salt(tenant: str, salt: str | None) -> str:
    """Return a cache salt that no other party can name, whatever salt its requests bring.

    Without it the time of an answer would tell a party which prompts others have sent.
    """
    return hashlib.sha256(json.dumps([tenant, salt]).encode()).hexdigest()
