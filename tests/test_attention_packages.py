"""The backends over other projects' packages, against stand-ins for these.

The stand-ins do in plain torch what the packages' documentation says of the calls, and insist on
the shapes and types that it asks for.
"""

import sys
import types

import pytest
import torch

import model_helpers
from miniinfer.attention import TorchAttention
from miniinfer.attention_flash import FlashAttention
from miniinfer.attention_flashinfer import FlashInferAttention
from miniinfer.model.config import ModelConfig
from miniinfer.model.kv_cache import KVCache
from miniinfer.model.llama import LlamaModel

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=model_helpers.VOCAB_SIZE,
    max_position_embeddings=1024,
    sliding_windows=(None, 7),
)


def attended(query, keys, values, left):
    """Causal attention of the last queries [N, Hq, D] of a context [L, Hkv, D], by its formula."""
    count, length = len(query), len(keys)
    groups = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[2] ** -0.5
    distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
    seen = distance >= 0
    if left >= 0:
        seen &= distance <= left
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def read_pages(cache, pages, length):
    """The first `length` tokens in `pages` of a cache [pages, size, Hkv, D]."""
    return cache[pages.long()].flatten(0, 1)[:length]


def check_ints(*tensors):
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


class FakeFlash(types.ModuleType):
    """flash-attn's two functions over a block table."""

    calls = 0

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        type(self).calls += 1
        check_ints(cu_seqlens_q, cu_seqlens_k, block_table)
        assert k.shape == v.shape
        assert k.shape[1] % 256 == 0
        assert causal
        assert window_size[1] in (-1, 0)
        assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0
        assert cu_seqlens_q[-1] == len(q)
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
        output = torch.empty_like(q)
        for row, table in enumerate(block_table):
            first, last = cu_seqlens_q[row : row + 2].tolist()
            length = int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
            used = table[: -(-length // k.shape[1])]
            context = (read_pages(cache, used, length) for cache in (k, v))
            output[first:last] = attended(q[first:last], *context, window_size[0])
        return output

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
    ):
        type(self).calls += 1
        assert k is None
        assert v is None
        check_ints(cache_seqlens, block_table)
        assert q.dim() == 4
        assert q.shape[1] == 1
        assert k_cache.shape[1] % 256 == 0
        output = torch.empty_like(q)
        for row, length in enumerate(cache_seqlens.tolist()):
            used = block_table[row, : -(-length // k_cache.shape[1])]
            context = (read_pages(cache, used, length) for cache in (k_cache, v_cache))
            output[row] = attended(q[row], *context, window_size[0])
        return output


class FakeWrapper:
    """What flashinfer's two wrappers have in common."""

    planned = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 2**27
        assert kv_layout == "NHD"

    def _plan(self, indptr, indices, last_page_len, sizes, options):
        FakeWrapper.planned += 1
        check_ints(indptr, indices, last_page_len)
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert indptr[-1] == len(indices)
        self.indptr, self.indices, self.last = indptr.tolist(), indices, last_page_len.tolist()
        self.sizes, self.options = sizes, options

    def _run(self, starts, q, paged_kv_cache, k_scale, v_scale):
        heads, kv_heads, head_dim, page_size = self.sizes
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        assert q.shape[1:] == (heads, head_dim)
        assert keys.shape[1:] == values.shape[1:] == (page_size, kv_heads, head_dim)
        assert q.dtype == self.options["q_data_type"]
        assert keys.dtype == self.options["kv_data_type"]
        output = torch.empty_like(q)
        for row, last in enumerate(self.last):
            assert 1 <= last <= page_size
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]]
            length = (len(pages) - 1) * page_size + last
            if keys.dtype == torch.float8_e4m3fn:
                pairs = (
                    (read_pages(cache.view(torch.uint8), pages, length).view(cache.dtype), scale)
                    for cache, scale in ((keys, k_scale), (values, v_scale))
                )
                context = [stored.float() * scale for stored, scale in pairs]
            else:
                assert k_scale is None
                assert v_scale is None
                context = [read_pages(cache, pages, length) for cache in paged_kv_cache]
            first, end = starts[row], starts[row + 1]
            output[first:end] = attended(q[first:end], *context, self.options["window_left"])
        return output


class FakeDecodes(FakeWrapper):
    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        options = {
            "window_left": window_left,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        self._plan(indptr, indices, last_page_len, sizes, options)

    def run(self, q, paged_kv_cache, q_scale=None, k_scale=None, v_scale=None):
        return self._run(range(len(q) + 1), q, paged_kv_cache, k_scale, v_scale)


class FakeChunks(FakeWrapper):
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert causal
        check_ints(qo_indptr)
        self.starts = qo_indptr.tolist()
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        options = {
            "window_left": window_left,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        self._plan(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes, options)

    def run(self, q, paged_kv_cache, k_scale=None, v_scale=None):
        return self._run(self.starts, q, paged_kv_cache, k_scale, v_scale)


@pytest.fixture
def flash_attn(monkeypatch):
    module = FakeFlash("flash_attn")
    FakeFlash.calls = 0
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


@pytest.fixture
def flashinfer(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = FakeDecodes
    module.BatchPrefillWithPagedKVCacheWrapper = FakeChunks
    FakeWrapper.planned = 0
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


def run_steps(make_attention, block_size):
    """Logits of prefills in chunks beside decodes, over a shuffled cache full of NaN."""
    model = model_helpers.with_random_weights(LlamaModel(CONFIG))
    runner = model_helpers.PagedRunner(model, block_size=block_size, num_tokens=8 * 256)
    model.attention = make_attention(runner.cache)
    tokens = model_helpers.random_tokens(400, seed=2)
    steps = [
        {"a": tokens[:20], "b": tokens[50:51]},
        {"a": tokens[51:52], "b": tokens[52:53], "c": tokens[53:60]},
        {"c": tokens[60:61], "a": tokens[61:70], "b": tokens[70:340]},
        {"a": tokens[95:96], "b": tokens[96:97], "c": tokens[97:98]},
    ]
    return [logits for step in steps for _, logits in sorted(runner.step(step).items())]


def test_flash_attn_gives_what_torch_gives(flash_attn):
    expected = run_steps(TorchAttention, 256)
    for ours, theirs in zip(run_steps(FlashAttention, 256), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    # Two layers; in three of the steps both kinds.
    assert flash_attn.calls == 2 * 7


@pytest.mark.parametrize("block_size", [1, 8, 256])
def test_flashinfer_gives_what_torch_gives(flashinfer, block_size):
    expected = run_steps(TorchAttention, block_size)
    actual = run_steps(
        lambda cache: FlashInferAttention(cache, CONFIG.num_heads, torch.float32), block_size
    )
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    # Once for each window, not for each layer.
    assert FakeWrapper.planned == 2 * 7


def test_flashinfer_reads_8_bits_with_the_scales_that_wrote_them(flashinfer):
    def small(make):
        def over_8_bits(cache):
            sizes = (cache.num_blocks, cache.block_size, CONFIG.num_kv_heads, CONFIG.head_dim)
            scales = [(0.05, 0.02), (0.04, 0.03)]
            return make(KVCache(2, *sizes, torch.float8_e4m3fn, "cpu", scales))

        return over_8_bits

    expected = run_steps(small(lambda cache: TorchAttention(cache, torch.float32)), 8)
    actual = run_steps(
        small(lambda cache: FlashInferAttention(cache, CONFIG.num_heads, torch.float32)), 8
    )
    for ours, theirs in zip(actual, expected, strict=True):
        # Where a number lies between two of 8 bits, the last bit before decides.
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0)
