"""How kernels are launched: tiles, warps, stages and splits, by rule or as measured on a machine.

`miniinfer.kernels.autotune` writes what was measured to `table_path`, and it goes before the rules.
No Triton here: what is decided can be looked at without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

OPTION_NAMES = ("TILE_Q", "TILE_K", "num_warps", "num_stages")
"""What the table holds for an attention."""

_ROW_TILE = 1024
_SCAN_TILE = 4096
# The least side of a matrix product.
_LEAST_TILE = 16
# Keys below which a part of a sequence costs more than it spreads.
_LEAST_SPLIT = 128
_MOST_SPLITS = 64
# How many programs a multiprocessor should have to choose from.
_PROGRAMS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class Traits:
    """What launches depend on of a device."""

    name: str
    backend: str
    """As Triton says: `cuda`, `hip`, or `cpu` for its interpreter."""
    capability: int
    """Of NVIDIA's GPUs, as 90; 0 for others."""
    shared_memory: int
    """Bytes that one program can have."""
    processors: int


@functools.cache
def traits_of(device: torch.device) -> Traits:
    """The traits of a device of this machine."""
    if device.type != "cuda":
        return Traits("interpreter", "cpu", 0, 64 * 1024, 1)
    properties = torch.cuda.get_device_properties(device)
    is_hip = torch.version.hip is not None
    # ROCm has no larger memory to opt in to.
    shared = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return Traits(
        properties.name,
        "hip" if is_hip else "cuda",
        0 if is_hip else 10 * properties.major + properties.minor,
        64 * 1024 if is_hip else shared,
        properties.multi_processor_count,
    )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the best launch of an attention depends on beside the device."""

    head_dim: int
    group: int
    """Query heads of a KV head."""
    bytes_per_query: int
    """Bytes of an element of the queries."""
    bytes_per_key: int
    """Bytes of an element of the cache."""
    is_decode: bool
    """Few queries of a request, so that reading the cache takes the time."""

    @property
    def key(self) -> str:
        """Its name in the table."""
        kind = "decode" if self.is_decode else "prefill"
        types = f"q{8 * self.bytes_per_query} kv{8 * self.bytes_per_key}"
        return f"{kind} d{self.head_dim} g{self.group} {types}"


def attention_options(shape: AttentionShape, traits: Traits, pairs: int) -> dict[str, int]:
    """The tiles, `num_warps` and `num_stages` of `paged_attention_kernel`.

    `TILE_Q` pairs of query and head, by `TILE_K` keys, by `TILE_D` elements. `pairs`: the most that
    one request has for a KV head.
    """
    tile_d = max(_LEAST_TILE, power_of_2(shape.head_dim))
    options = _table().get(traits.name, {}).get(shape.key) or _by_rule(shape, traits, tile_d)
    tile_q = min(options["TILE_Q"], max(_LEAST_TILE, power_of_2(pairs)))
    return options | {"TILE_Q": tile_q, "TILE_D": tile_d}


def _by_rule(shape: AttentionShape, traits: Traits, tile_d: int) -> dict[str, int]:
    wide = tile_d > 128 or shape.bytes_per_query == 4
    if shape.is_decode:
        tile_q, warps = 32 if wide else 64, 4
        # Two programs share a processor, so that one computes while the other waits.
        room, most = traits.shared_memory // 2, 3
    else:
        # Hopper and later multiply 64 rows for each four warps.
        tall = traits.backend == "cuda" and traits.capability >= 90 and not wide
        tile_q = 128 if tall else 32 if shape.bytes_per_query == 4 else 64
        warps = 8 if tall or tile_d > 64 else 4
        room, most = traits.shared_memory - tile_q * tile_d * shape.bytes_per_query, 2
    tile_k = 32 if wide or traits.backend == "hip" else 64
    # What is multiplied lies in shared memory in the queries' type.
    row = 2 * tile_d * shape.bytes_per_query
    while tile_k > _LEAST_TILE and 2 * tile_k * row > room:
        tile_k //= 2
    buffers = max(1, min(most, room // (tile_k * row)))
    # Keys are found through the block table, whose entries must be there before: each buffer takes
    # a stage for either. AMD's pipeline has one kind of stage.
    stages = 2 if traits.backend == "hip" else 2 * buffers + 1
    return {"TILE_Q": tile_q, "TILE_K": tile_k, "num_warps": warps, "num_stages": stages}


def split_count(programs: int, max_keys: int, traits: Traits) -> int:
    """In how many parts the keys of a request are attended side by side: a power of two.

    `programs`: how many there are without splits. `max_keys`: the most that one request sees.
    """
    wanted = -(-_PROGRAMS_PER_PROCESSOR * traits.processors // max(1, programs))
    most = min(_MOST_SPLITS, max(1, max_keys // _LEAST_SPLIT))
    return power_of_2(min(wanted, most) + 1) // 2 if traits.backend != "cpu" else 1


def tile_of_row(width: int) -> int:
    """How many elements of a row one program takes, where programs share a row."""
    return min(_ROW_TILE, power_of_2(width))


def tile_of_scan(width: int) -> int:
    """How many elements of a row one program looks at a time that goes through all of it."""
    return min(_SCAN_TILE, max(64, power_of_2(width)))


def warps_of_row(width: int) -> int:
    """The warps of a program that holds a row, or as much as this of it, in registers."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def power_of_2(least: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, least - 1).bit_length()


def table_path() -> Path:
    """Where measured launches are kept: MINIINFER_KERNEL_TABLE, or a file in the cache folder."""
    from miniinfer.fetch import cache_directory

    named = os.environ.get("MINIINFER_KERNEL_TABLE")
    return Path(named) if named else cache_directory() / "kernels.json"


Table = dict[str, dict[str, dict[str, int]]]
"""Options by `AttentionShape.key` by the name of the device."""


@functools.cache
def _table() -> Table:
    return read_table(table_path())


@contextlib.contextmanager
def trial(device: str, key: str, options: dict[str, int]) -> Iterator[None]:
    """Launch a shape in this way for a while, whatever the table says."""
    launches = _table().setdefault(device, {})
    before = launches.get(key)
    launches[key] = options
    try:
        yield
    finally:
        del launches[key]
        if before is not None:
            launches[key] = before


def read_table(path: Path) -> Table:
    """The table in a file; empty if there is none.

    ValueError naming the file and the entry if it is not a table.
    """
    if not path.exists():
        return {}
    advice = "delete the file or run python -m miniinfer.kernels.autotune"
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a table of kernel launches ({error}); {advice}") from error
    if not isinstance(table, dict) or not all(isinstance(of, dict) for of in table.values()):
        raise ValueError(f"{path} must map devices to launches; {advice}")
    for device, launches in table.items():
        for key, options in launches.items():
            if not _is_launch(options):
                raise ValueError(
                    f"{path}: {device}: {key} must give {', '.join(OPTION_NAMES)} as powers of two "
                    f"from 1 to 1024 (num_stages: 1 to 8); got {options!r}; {advice}"
                )
    return table


def _is_launch(options: object) -> bool:
    if not isinstance(options, dict) or set(options) != set(OPTION_NAMES):
        return False
    if not all(type(value) is int and 1 <= value <= 1024 for value in options.values()):
        return False
    powers = [options[name] for name in OPTION_NAMES if name != "num_stages"]
    return options["num_stages"] <= 8 and all(power_of_2(value) == value for value in powers)


def write_table(path: Path, device: str, launches: dict[str, dict[str, int]]) -> None:
    """Put a device's launches in the table in a file, beside those of others; `_table` rereads."""
    table = read_table(path)
    table[device] = table.get(device, {}) | launches
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be reading it.
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    written.replace(path)
    _table.cache_clear()
