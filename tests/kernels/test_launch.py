"""Launches: the rules, the table that goes before them, and what is wrong with a table."""

import json

import pytest

from miniinfer.kernels import _launch
from miniinfer.kernels._launch import AttentionShape, Traits, attention_options, split_count

H100 = Traits("H100", "cuda", 90, 227 * 1024, 132)
L4 = Traits("L4", "cuda", 89, 99 * 1024, 58)
MI300 = Traits("MI300X", "hip", 0, 64 * 1024, 304)
DECODE = AttentionShape(128, 4, 2, 2, is_decode=True)
GOOD = {"TILE_Q": 32, "TILE_K": 128, "num_warps": 8, "num_stages": 3}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The path of a table that is not there yet."""
    path = tmp_path / "folder" / "kernels.json"
    monkeypatch.setenv("MINIINFER_KERNEL_TABLE", str(path))
    _launch._table.cache_clear()
    yield path
    _launch._table.cache_clear()


@pytest.mark.parametrize("traits", [H100, L4, MI300], ids=lambda traits: traits.name)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("bytes_per_query", [2, 4])
@pytest.mark.parametrize("is_decode", [True, False])
def test_every_rule_fits_the_device(traits, head_dim, bytes_per_query, is_decode, table):
    shape = AttentionShape(head_dim, 4, bytes_per_query, bytes_per_query, is_decode)
    options = attention_options(shape, traits, 4 if is_decode else 2048)
    assert options["TILE_D"] >= head_dim
    assert options["TILE_Q"] >= 16
    assert options["TILE_K"] >= 16
    buffers = 1 if traits.backend == "hip" else (options["num_stages"] - 1) // 2
    used = 2 * buffers * options["TILE_K"] * options["TILE_D"] * bytes_per_query
    # One buffer of the least tile is taken in any case.
    assert used <= traits.shared_memory or buffers == 1


def test_a_tile_holds_no_more_pairs_than_there_are(table):
    assert attention_options(DECODE, H100, 1)["TILE_Q"] == 16
    assert attention_options(DECODE, H100, 33)["TILE_Q"] == 64
    assert attention_options(DECODE, H100, 10**6)["TILE_Q"] == 64


def test_splits_fill_the_device_but_stay_long():
    assert split_count(8, 128 * 1024, H100) == 64
    assert split_count(8, 1024, H100) == 8
    assert split_count(8, 100, H100) == 1
    assert split_count(256, 4096, H100) == 2
    assert split_count(10**5, 4096, H100) == 1
    assert split_count(0, 0, H100) == 1
    for programs in range(1, 700, 13):
        splits = split_count(programs, 10**6, H100)
        assert splits & (splits - 1) == 0
        assert programs * splits < 2 * (4 * 132 + programs)


def test_what_was_measured_goes_first(table):
    before = attention_options(DECODE, H100, 64)
    _launch.write_table(table, "H100", {DECODE.key: GOOD})
    _launch.write_table(table, "H100", {"prefill d64 g1 q16 kv16": GOOD})
    _launch.write_table(table, "L4", {DECODE.key: GOOD | {"TILE_K": 16}})
    assert attention_options(DECODE, H100, 64) == GOOD | {"TILE_D": 128} != before
    assert attention_options(DECODE, H100, 3)["TILE_Q"] == 16
    assert attention_options(DECODE, L4, 64)["TILE_K"] == 16
    assert set(json.loads(table.read_text())["H100"]) == {DECODE.key, "prefill d64 g1 q16 kv16"}
    assert [path.name for path in table.parent.iterdir()] == ["kernels.json"]


def test_a_trial_leaves_no_trace(table):
    rule = attention_options(DECODE, H100, 64)
    with _launch.trial("H100", DECODE.key, GOOD):
        assert attention_options(DECODE, H100, 64)["TILE_K"] == 128
        with _launch.trial("H100", DECODE.key, GOOD | {"TILE_K": 16}):
            assert attention_options(DECODE, H100, 64)["TILE_K"] == 16
        assert attention_options(DECODE, H100, 64)["TILE_K"] == 128
    assert attention_options(DECODE, H100, 64) == rule


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a table of kernel launches"),
        ("{", "is not a table of kernel launches"),
        ("\x00", "is not a table of kernel launches"),
        ("[]", "must map devices to launches"),
        ('{"H100": 3}', "must map devices to launches"),
        ('{"H100": {"decode": null}}', "H100: decode must give TILE_Q, .*; got None"),
        ({"num_stages": 9}, "'num_stages': 9"),
        ({"TILE_Q": 24}, "'TILE_Q': 24"),
        ({"TILE_K": 0}, "'TILE_K': 0"),
        ({"TILE_K": 2**40}, "1099511627776"),
        ({"TILE_K": True}, "True"),
        ({"num_warps": "4"}, "'4'"),
        ({"more": 4}, "'more': 4"),
    ],
)
def test_a_bad_table_is_named(content, message, table):
    if isinstance(content, dict):
        content = json.dumps({"H100": {"decode": GOOD | content}})
    table.parent.mkdir()
    table.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        attention_options(DECODE, H100, 4)
    assert str(table) in str(caught.value)
    assert "delete the file or run" in str(caught.value)
