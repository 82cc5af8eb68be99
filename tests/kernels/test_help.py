"""The help of the tools: their names as they are typed, and a word about every option."""

import re

import pytest

from miniinfer.kernels import autotune, compile_check, device_check

SAYS = {
    autotune: ("--head-dim N", "head sizes to tune for (default: 64 128)", "--group", "--fp8"),
    compile_check: ("--targets GPU", "sm_80, sm_90, sm_100, gfx942 (default: all)", "--workers N"),
    device_check: (
        "--seconds N",
        "(default: 330, with --dry-run 1500)",
        "attention d128, attention d64",
        "accuracy, tokens, speed, engine 0.6B",
        "with --dry-run attention d64, accuracy",
    ),
}


@pytest.mark.parametrize("tool", SAYS, ids=lambda tool: tool.__name__.rpartition(".")[2])
def test_the_help_says_what_there_is(tool, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as end:
        tool.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert re.match(rf"usage: python -m {re.escape(tool.__name__)} \[-h\] ", text)
    for words in SAYS[tool]:
        assert words in text


@pytest.mark.parametrize("tool", SAYS, ids=lambda tool: tool.__name__.rpartition(".")[2])
def test_every_option_has_help(tool):
    assert all(action.help for action in tool._parser()._actions)
