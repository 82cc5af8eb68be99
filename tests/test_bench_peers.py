"""How the figures of the CPU backend are put together: ratios by round, targets, the table."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benches import cpu_figures
from benches.peers import compare, install, offline, places
from benches.peers.serving import Turn, random_prompts


def turns(*rates, ttft=100.0):
    return [Turn(tok_s=rate, ttft_ms=ttft, itl_p50_ms=1.0, itl_p99_ms=2.0) for rate in rates]


def test_a_ratio_is_taken_within_a_round():
    # The machine slowed down by half in the second round, for both.
    assert offline.median_ratio([400, 200, 404], [100, 50, 101]) == 4
    assert offline.in_turns([lambda: 1.0, lambda: 2.0], rounds=3) == [[1.0] * 3, [2.0] * 3]


def test_servers_are_compared_at_each_number_of_clients():
    found = compare.server_figures(
        {
            "gguf": {clients: turns(80, 90, 100, ttft=50) for clients in (1, 8, 32)},
            "vllm": {clients: turns(20, 30, 25, ttft=200) for clients in (1, 8, 32)},
            "plain-float32": {clients: turns(40, 30, 50) for clients in (1, 8, 32)},
            "plain-bfloat16": {clients: turns(20, 60, 75) for clients in (1, 8, 32)},
            "llama": {32: turns(10, 10, 10)},
        }
    )
    assert found["gguf_vs_vllm_8"] == 4
    assert found["ttft_vs_vllm_32"] == 0.25
    # Of the two dtypes the better one counts.
    assert found["plain_vs_vllm_1"] == 2
    assert found["server32_vs_llama"] == 9
    assert found["tok_s_gguf_8"] == 90
    assert "tok_s_llama_8" not in found


def test_without_peers_there_are_our_own_figures_alone():
    found = compare.server_figures({"gguf": {c: turns(5, 6, 7) for c in (1, 8, 32)}})
    assert found["tok_s_gguf_32"] == 6
    assert not [name for name in found if "_vs_" in name]


def test_the_table_says_what_must_be_and_what_the_machine_allows(monkeypatch, tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x" * 10_000_000)
    monkeypatch.setattr(cpu_figures, "ensure_builtin", lambda progress: model)
    figures = {
        "copy_bandwidth_gb_s": 10.0,
        "int8_peak_gops": 500.0,
        "decode_tok_s": 100.0,
        "ttft_vs_vllm_1": 0.3,
        "import_torch_s": 2.0,
        "ready_s": 3.0,
        "kernels_ms_Q4_1_8": 3.0,
        "kernels_floor_ms_Q4_1_8": 1.5,
    }
    rows = cpu_figures.readme_table(figures).splitlines()
    assert rows[2] == "| time to first token over vLLM's, one client | <= 0.35 | 0.3 |  |  |"
    assert "| server ready, s | <= 3.5 | 3 |  |  |" in rows
    assert "| the layers' matrices in Q4_1, 8 rows, ms |  | 3 | 1.5 | 50% |" in rows
    assert len(rows) == 2 + 5
    # Ten megabytes of weights, and two bytes for each key and value of 544 tokens.
    seconds = (10_000_000 + 2 * 544 * 30 * 2 * 3 * 64) / 10e9
    assert cpu_figures.rooflines(figures)["decode_tok_s"] == pytest.approx(1 / seconds)


def test_prompts_of_the_load_differ_and_repeat():
    first = random_prompts(3, seed=1)
    assert first == random_prompts(3, seed=1)
    assert len({tuple(each["prompt"]) for each in first}) == 3
    assert all(len(each["prompt"]) == 128 for each in first)


def test_what_is_not_installed_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(places, "home", lambda: tmp_path)
    assert places.missing("vllm") == (
        "vllm is not installed: python benches/peers/install.py vllm installs it"
    )
    assert "llama is not installed" in places.missing("llama")


def test_a_command_that_fails_is_one_line():
    with pytest.raises(install.CannotInstall, match=r"failed: no such thing$"):
        install.run(sys.executable, "-c", "import sys; print('a'); sys.exit('no such thing')")
