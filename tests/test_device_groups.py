"""Several engines of one machine have GPUs of their own, or say why they cannot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from miniinfer import EngineArgs, engine_process
from miniinfer.cli import main
from miniinfer.parallel import device_groups as groups


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Make a machine that has so many GPUs."""

    def make(count: int, visible: str | None = None, *, other: bool = False) -> None:
        listed, there = tmp_path / "gpus", tmp_path / "kfd"
        if count:
            listed.mkdir()
        for number in range(count):
            (listed / f"0000:{number:02x}:00.0").mkdir()
        if other:
            there.touch()
        monkeypatch.setattr(groups, "_NVIDIA", listed)
        monkeypatch.setattr(groups, "_OTHER_GPUS", (there,))
        monkeypatch.delenv(groups.VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(groups.VISIBLE, visible)

    return make


@pytest.mark.parametrize(
    ("count", "visible", "size", "engines", "expected"),
    [
        (8, None, 4, 2, ["0,1,2,3", "4,5,6,7"]),
        (8, "6, 4,GPU-ab,1,0", 2, 2, ["6,4", "GPU-ab,1"]),
        (4, None, 1, 3, ["0", "1", "2"]),
        (4, None, 4, 1, None),
        (1, None, 1, 2, None),
        (0, None, 2, 2, None),
        (8, "-1", 2, 2, None),
    ],
)
def test_each_engine_has_its_own(
    gpus: Any, count: int, visible: str | None, size: int, engines: int, expected: list[str] | None
) -> None:
    gpus(count, visible)
    args = EngineArgs(tensor_parallel_size=size)
    assert groups.device_groups(args, engines) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda:2", "mps"])
def test_a_device_that_was_named_is_left_alone(gpus: Any, device: str) -> None:
    gpus(2)
    args = EngineArgs(tensor_parallel_size=2, device=device)
    assert groups.device_groups(args, 2) is None


@pytest.mark.parametrize(("count", "device"), [(3, "auto"), (2, "cuda"), (0, "cuda")])
def test_too_few_are_named_with_the_flags(gpus: Any, count: int, device: str) -> None:
    gpus(count)
    args = EngineArgs(tensor_parallel_size=2, device=device)
    message = (
        r"2 engines \(--engines\) of 2 processes each \(--tensor-parallel-size\) need 4 GPUs, "
        rf"and there are {count}: "
    )
    with pytest.raises(ValueError, match=message):
        groups.device_groups(args, 2)


def test_what_cannot_be_counted_must_be_named(gpus: Any) -> None:
    gpus(0, other=True)
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES must name .* 6 or more"):
        groups.device_groups(EngineArgs(tensor_parallel_size=3), 2)
    assert groups.device_groups(EngineArgs(), 2) is None


def test_the_command_refuses_in_one_line(gpus: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpus(2)
    assert main(["serve", "--dry-run", "--engines", "2", "-tp", "2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "need 4 GPUs, and there are 2" in line


class Parent:
    """Tells an engine of its GPUs, and hears what becomes of it."""

    def __init__(self, devices: str | None) -> None:
        self._devices = devices
        self.said: list[dict[str, Any]] = []
        self.lines = self

    def first(self) -> tuple[dict[str, Any], list[Any]]:
        return {"args": {}, "engine": 1, "devices": self._devices, "log_level": 50}, []

    def read(self) -> None:
        return None

    def write(self, message: dict[str, Any]) -> None:
        self.said.append(message)


class Nobody:
    """No client listens to this engine."""

    def __init__(self, parent: Parent, engine: int) -> None:
        assert engine == 1

    def listen(self, lines: list[Any]) -> None:
        assert lines == []

    def die(self, reason: str) -> None:
        self.reason = reason


@pytest.mark.parametrize(("devices", "expected"), [("2,3", "2,3"), (None, "7")])
def test_an_engine_sees_the_gpus_that_it_is_told_of(
    monkeypatch: pytest.MonkeyPatch, devices: str | None, expected: str
) -> None:
    parent = Parent(devices)
    monkeypatch.setenv(groups.VISIBLE, "7")
    monkeypatch.setattr(engine_process, "ParentLink", lambda arguments: parent)
    monkeypatch.setattr(engine_process, "Exchange", Nobody)
    monkeypatch.setattr(engine_process.sys, "setswitchinterval", lambda seconds: None)

    def load(args: dict[str, Any]) -> Any:
        raise ValueError(f"sees {os.environ[groups.VISIBLE]}")

    assert engine_process.run([], load) == 1
    assert parent.said == [{"error": f"sees {expected}"}]
