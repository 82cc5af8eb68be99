"""What goes wrong between the processes of an engine."""

__all__ = ["ParallelError"]


class ParallelError(RuntimeError):
    """A process of a tensor-parallel engine is gone, or out of step; the engine cannot go on."""
