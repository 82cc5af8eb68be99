"""The error of model loading."""

from __future__ import annotations

__all__ = ["ModelLoadError"]


class ModelLoadError(ValueError):
    """A model that cannot be loaded: its configuration or its weights are missing, damaged or of a
    kind that is not supported. The message names the file, the setting or tensor, and the value.
    """
