"""What an engine is made with."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from .speculation import SpeculativeConfig

__all__ = ["EngineArgs"]

_INT32_MAX = 2**31 - 1

# A step's arrays are allocated for the most that these allow, so they have limits well below what
# an index can hold.
_LIMITS = {
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**22,
    "block_size": 2**16,
    "max_model_len": _INT32_MAX,
    "num_kv_blocks": _INT32_MAX,
    "kv_cache_memory": 2**63 - 1,
    "threads": 2**10,
    "max_backlog": _INT32_MAX,
    "tensor_parallel_size": 2**10,
}
_OPTIONAL = (
    "max_num_batched_tokens",
    "max_model_len",
    "num_kv_blocks",
    "kv_cache_memory",
    "threads",
    "seed",
)
_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": ("auto", "none", "int8", "int4"),
    "load_format": ("auto", "dummy"),
    "attention_backend": ("auto", "triton", "torch", "cpu", "flash_attn", "flashinfer"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8"),
}
_SWITCHES = ("enable_prefix_caching", "async_scheduling", "enforce_eager")
_TEXTS = (
    "model",
    "revision",
    "tokenizer",
    "dtype",
    "quantization",
    "load_format",
    "attention_backend",
    "kv_cache_dtype",
    "device",
    "chat_template",
    "served_model_name",
)


@dataclass(slots=True, kw_only=True)
class EngineArgs:
    """Settings of an engine; names follow vLLM's where it has one. Sizes are in tokens.

    Raises `ValueError` naming the setting, its limit and its value.
    """

    model: str | None = None
    """A directory, a GGUF file, a hub id, or None for the built-in SmolLM2-135M-Instruct."""
    revision: str | None = None
    """Revision of a hub model."""
    tokenizer: str | None = None
    """Directory or GGUF file to take the tokenizer from, if not the model's own."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16. On a CPU, auto is float32."""
    quantization: str = "auto"
    """On a CPU: auto keeps a GGUF file's weights quantised, none makes floats of them; int8 and
    int4 quantise any model when it is loaded."""
    load_format: str = "auto"
    """dummy fills the weights with random numbers: of the model, config.json and the tokenizer are
    needed, no more. To measure with."""
    attention_backend: str = "auto"
    """triton: the package's kernels for GPUs. cpu: those for CPUs, which quantised weights need.
    torch: the reference, for any device. flash_attn, flashinfer: these packages, if installed. auto
    is triton on a GPU and cpu on a CPU, or torch where they do not run."""
    kv_cache_dtype: str = "auto"
    """auto, float32, bfloat16, float16, fp8 (also fp8_e4m3), or int8 on a CPU. auto is float16
    beside quantised weights, and else `dtype`. Scales of fp8 are the checkpoint's, or 1."""
    device: str = "auto"
    """auto, cpu, or a torch device such as cuda:0."""
    tensor_parallel_size: int = 1
    """Processes that split the model's weights between them, each with a device of its own."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together; None is what the model was made for."""
    max_num_seqs: int = 256
    """Requests computed at once."""
    max_num_batched_tokens: int | None = None
    """Tokens computed per step; None is 512 on a CPU and 2048 elsewhere, and at least
    `max_num_seqs`."""
    block_size: int = 16
    """Tokens per KV block."""
    num_kv_blocks: int | None = None
    """KV blocks; overrides kv_cache_memory."""
    kv_cache_memory: int | None = None
    """Bytes for the KV cache; None takes a share of the free memory, or on a GPU what
    gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that may be in use: what weights and the largest step leave of it is
    for the KV cache. Above 0 and at most 1."""
    enable_prefix_caching: bool = True
    """Reuse the KV of equal prefixes."""
    target_itl_ms: float | str | None = "auto"
    """Shrink prefill chunks to keep steps with decodes in them under this many milliseconds; None
    does not. auto is 250 on a CPU, and None elsewhere."""
    speculative_config: Mapping[str, object] | str | None = None
    """Drafts from a request's own tokens, as `{"method": "ngram", "num_speculative_tokens": 4,
    "prompt_lookup_max": 4, "prompt_lookup_min": 2}` or its JSON; None makes none."""
    max_backlog: int = 1024
    """Tokens that may wait for a reader that is behind before its request is paused."""
    stall_limit: float = 60.0
    """Seconds that a request may be paused before it is cancelled."""
    step_timeout: float | None = None
    """Seconds after which a step is taken for hung and the engine for dead; None is never."""
    seed: int | None = None
    """Makes requests without a seed of their own repeatable, in the order of their submission."""
    async_scheduling: bool | None = None
    """Plan each step while the one before it runs; None does so on a GPU."""
    enforce_eager: bool = False
    """Capture no CUDA graphs."""
    threads: int | None = None
    """Threads of the forward pass on a CPU; None is torch's choice."""
    chat_template: str | None = None
    """A Jinja template, or the path of a file that holds one."""
    served_model_name: str | None = None
    """The name that answers carry."""

    def __post_init__(self) -> None:
        """Check what can be checked without the model."""
        for name, limit in _LIMITS.items():
            self._check_integer(name, 1, limit)
        self._check_integer("seed", 0, 2**64 - 1)
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{name} must be a text that is not empty, got {value!r}")
        for name in _SWITCHES:
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name == "async_scheduling")):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        self._check_share("gpu_memory_utilization")
        if self.target_itl_ms != "auto":
            self._check_duration("target_itl_ms")
        self._check_duration("stall_limit")
        self._check_duration("step_timeout")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        speculation = self.speculation()
        if speculation is not None:
            self.speculative_config = speculation.as_dict()
        # A step gives each running request at least one token.
        if self.max_num_batched_tokens is not None:
            self.max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)

    def batched_tokens(self, *, on_cpu: bool) -> int:
        """The tokens that a step may have, on a CPU or not.

        A CPU's products are as fast with 512 rows as with more, and while a step of a long prompt
        lasts every other stream stands still.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(512 if on_cpu else 2048, self.max_num_seqs)

    def step_target_ms(self, *, on_cpu: bool) -> float | None:
        """The milliseconds that a step with decodes in it should take, on a CPU or not.

        Beside four streams of the built-in model, on two cores that others wanted too, a prompt of
        700 tokens made a gap of 6.8 s in one step, and gaps of 0.3 s, 0.8 s at worst, with a target
        of 250; its own first token came after 8.2 s instead of 6.8.
        """
        if isinstance(self.target_itl_ms, str):
            return 250.0 if on_cpu else None
        return self.target_itl_ms

    def speculation(self) -> SpeculativeConfig | None:
        """How drafts are made, if they are."""
        if self.speculative_config is None:
            return None
        return SpeculativeConfig.parse(self.speculative_config)

    def _check_integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be an integer, got {value!r}")
        if not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}, got {value}")

    def _check_share(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if not 0 < value <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1, got {value}")

    def _check_duration(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name != "stall_limit":
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value}")

    def as_dict(self) -> dict[str, object]:
        """The settings by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def available_memory() -> int:
    """Bytes of main memory that can be had without swapping, within this process's cgroup."""
    page = os.sysconf("SC_PAGE_SIZE")
    available = page * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as used,
        ):
            available = min(available, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        # Not Linux, no cgroup, or no limit ("max"): the best number so far stands.
        pass
    return max(available, 0)
