"""Which chunks of a stream report usage."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from .generation import DeltaSource
from .protocol import StreamOptions
from .responses import Usage


class StreamUsage:
    """Usage as `stream_options` asks for it: nowhere, in the last chunk, or in every chunk."""

    def __init__(self, source: DeltaSource, options: StreamOptions | None) -> None:
        self._source = source
        self.included = bool(options and options.include_usage)
        self.always = self.included and bool(options and options.continuous_usage_stats)

    def of_chunk(self) -> Usage | UnsetType | None:
        """Return the `usage` field of a chunk with choices."""
        if self.always:
            return self._source.usage()
        return None if self.included else UNSET
