"""The choice of a backend, and engines over each that runs here."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from engines import greedy, make_llm
from miniinfer import LLM
from miniinfer.backends import Backend, choose_backend
from miniinfer.config import EngineArgs
from miniinfer.kernels import sample
from miniinfer.model.errors import ModelLoadError
from miniinfer.model.llama import LlamaModel
from miniinfer.sampling import sample as sample_in_torch

CUDA, CPU = torch.device("cuda:1"), torch.device("cpu")
PROMPTS = [[1, 2, 3], list(range(40)), [7] * 9]


@pytest.fixture
def packages(monkeypatch):
    """Sets which packages seem to be installed."""
    find = importlib.util.find_spec
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def install(*names):
        known = ("triton", "flash_attn", "flashinfer")

        def found(name, *more):
            return (object() if name in names else None) if name in known else find(name, *more)

        monkeypatch.setattr(importlib.util, "find_spec", found)

    return install


def choose(device, packing=None, **settings):
    return choose_backend(EngineArgs(**settings), device, packing)


class TestChoice:
    def test_by_itself(self, packages):
        packages("triton", "flash_attn")
        assert choose(CUDA) == Backend("triton", "cuda:1 runs it and it is installed")
        assert choose(CPU, "stored") == Backend("cpu", "the device is a CPU")
        reason = "the kernels for CPUs exclude dtype float16"
        assert choose(CPU, dtype="float16") == Backend("torch", reason)
        fp8 = choose(CPU, kv_cache_dtype="fp8")
        assert fp8 == Backend("torch", "the kernels for CPUs exclude kv_cache_dtype fp8")
        assert choose(torch.device("mps")) == Backend("torch", "the kernels do not run on mps")
        packages()
        reason = "cuda:1 could run triton, but it is not installed"
        assert choose(CUDA) == Backend("torch", reason)

    @pytest.mark.parametrize("name", ["triton", "torch", "flash_attn", "flashinfer"])
    def test_by_name(self, packages, name):
        packages("triton", "flash_attn", "flashinfer")
        chosen = choose(CUDA, attention_backend=name, block_size=256)
        assert chosen == Backend(name, "asked for")

    def test_the_kernels_for_cpus_by_name(self):
        assert choose(CPU, "float32", attention_backend="cpu") == Backend("cpu", "asked for")

    @pytest.mark.parametrize(
        ("device", "settings", "installed", "message"),
        [
            (CPU, {"attention_backend": "triton"}, ("triton",), "triton .* needs a GPU .* is cpu"),
            (CPU, {"attention_backend": "flashinfer"}, ("flashinfer",), "device is cpu"),
            (CUDA, {"attention_backend": "triton"}, (), r"triton is not installed \(pip install"),
            (CUDA, {"attention_backend": "flash_attn"}, (), "pip install flash-attn"),
            (CUDA, {"attention_backend": "flashinfer"}, (), "pip install flashinfer-python"),
            (
                CUDA,
                {"attention_backend": "flash_attn"},
                ("flash_attn",),
                "block_size must be a multiple of 256 for it, got 16",
            ),
        ],
    )
    def test_what_cannot_be_had(self, packages, device, settings, installed, message):
        packages(*installed)
        with pytest.raises(ValueError, match=message):
            choose(device, **settings)

    def test_the_interpreter_needs_no_gpu(self, packages, monkeypatch):
        packages("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert choose(CPU, attention_backend="triton").name == "triton"

    def test_kernels_sample_where_they_run(self, packages):
        packages("triton", "flashinfer")
        assert Backend("triton", "").sample is sample
        assert Backend("flashinfer", "").sample is sample
        assert Backend("torch", "").sample is sample_in_torch
        packages("flashinfer")
        assert Backend("flashinfer", "").sample is sample_in_torch


class TestCacheType:
    @pytest.mark.parametrize(
        ("backend", "asked", "dtype", "expected"),
        [
            ("triton", "auto", torch.bfloat16, torch.bfloat16),
            ("triton", "bfloat16", torch.bfloat16, torch.bfloat16),
            ("triton", "fp8", torch.bfloat16, torch.float8_e4m3fn),
            ("flashinfer", "fp8_e4m3", torch.float16, torch.float8_e4m3fn),
            ("torch", "float16", torch.float32, torch.float16),
            ("flash_attn", "auto", torch.float16, torch.float16),
        ],
    )
    def test_what_can_be_had(self, packages, backend, asked, dtype, expected):
        model = _Typed(dtype)
        assert Backend(backend, "").kv_dtype(EngineArgs(kv_cache_dtype=asked), model) is expected

    @pytest.mark.parametrize(
        ("backend", "asked", "dtype", "message"),
        [
            (
                "triton",
                "float16",
                torch.bfloat16,
                "kv_cache_dtype float16 cannot be had with attention_backend triton and weights of "
                "bfloat16: take auto or fp8",
            ),
            ("flash_attn", "fp8", torch.bfloat16, "kv_cache_dtype fp8 cannot .*: take auto$"),
            ("flash_attn", "auto", torch.float32, "takes float16 or bfloat16, not float32"),
        ],
    )
    def test_what_cannot(self, backend, asked, dtype, message):
        with pytest.raises(ValueError, match=message):
            Backend(backend, "").kv_dtype(EngineArgs(kv_cache_dtype=asked), _Typed(dtype))


class _Typed(LlamaModel):
    """A model of which the type alone matters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, greedy(8))]


def test_an_engine_says_what_it_runs_on(tiny_model: Path, caplog):
    with caplog.at_level(logging.INFO, "miniinfer"):
        make_llm(tiny_model, attention_backend="torch", kv_cache_dtype="float16")
    words = "attention backend torch (asked for); KV cache of float16, 256 blocks of 4 tokens"
    assert words in caplog.text


def test_torch_takes_a_cache_of_another_type(tiny_model: Path):
    expected = tokens(make_llm(tiny_model, attention_backend="torch"))
    llm = make_llm(tiny_model, attention_backend="torch", kv_cache_dtype="float16")
    assert llm.llm_engine.engine.runner.cache.keys[0].dtype is torch.float16
    assert tokens(llm) == expected


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """A tiny model whose checkpoint has scales for a cache of 8 bits, under two of their names."""
    folder = tiny.write_tiny_llama(tmp_path / "scaled")
    weights = load_file(folder / "model.safetensors")
    for layer, name in ((0, "k_scale"), (1, "attn.k_scale")):
        weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(0.02 + layer / 100)
    weights["model.layers.0.self_attn.v_proj.v_scale"] = torch.tensor([0.05])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_scales_of_a_checkpoint_reach_the_cache(scaled: Path):
    llm = make_llm(scaled, kv_cache_dtype="fp8", attention_backend="torch")
    cache = llm.llm_engine.engine.runner.cache
    expected = [(0.02, 0.05), (0.03, 1.0)]
    assert cache.scale_numbers == [pytest.approx(pair) for pair in expected]
    plain = make_llm(scaled, attention_backend="torch")
    exact = plain.llm_engine.engine.runner.cache
    for tensor in cache.keys + exact.keys:
        tensor.view(torch.uint8).zero_()
    for each in (llm, plain):
        each.generate([[1, 2, 3, 4]], greedy(1))
    for layer in range(2):
        stored = cache.keys[layer].float() * cache.tensor_scales[layer][0]
        wide, near = exact.keys[layer].flatten(), stored.flatten()
        assert torch.nn.functional.cosine_similarity(wide, near, dim=0) > 0.99
        assert near.norm().item() == pytest.approx(wide.norm().item(), rel=0.05)


def test_without_scales_of_8_bits_they_are_1(tiny_model: Path):
    llm = make_llm(tiny_model, kv_cache_dtype="fp8")
    engine = llm.llm_engine.engine
    assert engine.backend.name == "torch"
    assert engine.runner.cache.scale_numbers == [(1.0, 1.0)] * 2
    assert len(tokens(llm)[0]) == 8


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor(0.0), "is 0.0; a scale must be above 0 and finite"),
        (torch.tensor(float("nan")), "is nan; a scale must be above 0"),
        (torch.ones(2), r"has the shape \[2\]; a scale of the KV cache is one number"),
    ],
)
def test_a_scale_that_is_none_is_refused(scaled: Path, scale, message):
    weights = load_file(scaled / "model.safetensors")
    weights["model.layers.1.self_attn.attn.k_scale"] = scale
    save_file(weights, scaled / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"layers.1.self_attn.attn.k_scale' {message}"):
        make_llm(scaled, kv_cache_dtype="fp8", attention_backend="torch")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_dummy_weights_need_no_files_of_weights(tiny_model: Path, tmp_path: Path, backend):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    settings = {"load_format": "dummy", "attention_backend": backend}
    first, second = (tokens(make_llm(tmp_path, **settings)) for _ in range(2))
    assert first == second
    assert len({tuple(answer) for answer in first}) == len(PROMPTS)


def test_dummy_weights_keep_activations_near_1(tiny_model: Path):
    llm = make_llm(tiny_model, load_format="dummy", attention_backend="torch")
    model = llm.llm_engine.engine.model
    assert (model.final_norm == 1).all()
    assert model.layers[0].qkv.std() == pytest.approx(64**-0.5, rel=0.05)
    assert not torch.equal(model.layers[0].qkv, model.layers[1].qkv)


def test_no_package_is_imported_that_is_not_asked_for(tiny_model: Path):
    make_llm(tiny_model)
    assert not {"flash_attn", "flashinfer"} & set(sys.modules)
