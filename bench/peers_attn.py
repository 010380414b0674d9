# SPDX-License-Identifier: Apache-2.0
"""Attention kernels of other projects, called as SGLang 0.5.17 calls them.

Each peer says whether it is available, prepares a case (planning is outside of the timed graph, as
it is once per step for all layers) and launches on one data set. Peers that know no tree masks
attend a chain of W rows, which their printed name says.
"""

from itertools import accumulate

import torch

from bench import fa3_library
from bench.attn import AttnData, visible
from bench.cases import AttnCase

FLASHINFER_WORKSPACE_BYTES = 512 << 20
SGLANG_MAX_KV_SPLITS = 8  # stock default of --triton-attention-num-kv-splits


def _import_reason(*modules: str) -> str | None:
    for module in modules:
        try:
            __import__(module)
        except Exception as e:  # an import may fail in any way: a missing library, a version check
            return f"{module} cannot be imported ({type(e).__name__}: {str(e).splitlines()[0]})"
    return None


def _needs_cuda(device: torch.device, *modules: str) -> str | None:
    return _import_reason(*modules) if device.type == "cuda" else "needs a GPU"


def _indptr(lengths: list[int], device, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype, device=device)


class Peer:
    """What the runner asks of a contestant beside `prepare` and `launch`."""

    name = ""
    chain_only = False

    def applies(self, case: AttnCase) -> bool:
        return not case.store

    def chain(self, case: AttnCase) -> bool:
        return self.chain_only or case.w == 1


class FlashInfer(Peer):
    """Shared part of the FlashInfer wrappers: paged KV, one planned wrapper per data set."""

    _workspace: torch.Tensor | None = None

    def available(self, device: torch.device) -> str | None:
        return _needs_cuda(device, "flashinfer")

    @classmethod
    def workspace(cls, device) -> torch.Tensor:
        if FlashInfer._workspace is None:
            FlashInfer._workspace = torch.zeros(
                FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device
            )
        return FlashInfer._workspace

    def prepare(self, data: AttnData):
        c = data.case
        self.data = data
        counts = [-(-(n + c.w) // c.page) for n in data.lens]
        self.indptr = _indptr(counts, data.device)
        last = [n + c.w - (count - 1) * c.page for n, count in zip(data.lens, counts, strict=True)]
        self.last_page_len = torch.tensor(last, dtype=torch.int32, device=data.device)
        self.qo_indptr = _indptr([c.w] * c.bs, data.device)
        self.types = {"q_data_type": data.dtype, "kv_data_type": data.dtype}
        self.wrappers, self.caches = [], []
        for s in data.sets:
            ids = torch.cat(
                [
                    data.slots(s, request, n + c.w)[:: c.page] // c.page
                    for request, n in enumerate(data.lens)
                ]
            )
            self.wrappers.append(self.plan(ids.int()))
            self.caches.append(tuple(t.view(-1, c.page, c.hkv, c.d) for t in (s.k, s.v)))

    def plan(self, page_ids: torch.Tensor):
        raise NotImplementedError

    def launch(self, i: int) -> torch.Tensor:
        s = self.data.sets[i]
        self.wrappers[i].run(s.q, self.caches[i], out=s.out)
        return s.out


class FlashInferDecode(FlashInfer):
    """BatchDecode on tensor cores; W = 1."""

    name = "flashinfer-decode"

    def applies(self, case: AttnCase) -> bool:
        return super().applies(case) and case.w == 1

    def plan(self, page_ids):
        import flashinfer

        c = self.data.case
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace(self.data.device), "NHD", use_tensor_cores=True, backend="fa2"
        )
        heads = (c.hq, c.hkv, c.d, c.page)
        wrapper.plan(self.indptr, page_ids, self.last_page_len, *heads, **self.types)
        return wrapper


class FlashInferPrefill(FlashInfer):
    """BatchPrefill, fa2 as SGLang calls it; W > 1."""

    def applies(self, case: AttnCase) -> bool:
        return super().applies(case) and case.w > 1

    def mask(self) -> dict:
        raise NotImplementedError

    def plan(self, page_ids):
        import flashinfer

        c = self.data.case
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace(self.data.device), "NHD", backend="fa2"
        )
        where = (self.qo_indptr, self.indptr, page_ids, self.last_page_len)
        wrapper.plan(*where, c.hq, c.hkv, c.d, c.page, **self.mask(), **self.types)
        return wrapper


class FlashInferCausal(FlashInferPrefill):
    """A chain of W rows."""

    name = "flashinfer-causal"
    chain_only = True

    def mask(self) -> dict:
        return {"causal": True}


class FlashInferTreeMask(FlashInferPrefill):
    """A tree as a full mask, packed to bits in `plan`, so outside of the timed graph."""

    name = "flashinfer-treemask"

    def mask(self) -> dict:
        return {"custom_mask": self.data.full_mask()}


class SglangTriton(Peer):
    """SGLang's Triton backend: split decode for W = 1, the extend kernel for verify."""

    name = "sglang-triton"

    def available(self, device: torch.device) -> str | None:
        package = "sglang.kernels.ops.attention"
        return _needs_cuda(device, f"{package}.extend_attention", f"{package}.decode_attention")

    def prepare(self, data: AttnData):
        c, device = data.case, data.device
        self.data = data
        seen = [n + 1 for n in data.lens] if c.w == 1 else data.lens  # decode: the new row too
        self.kv_indptr = _indptr(seen, device)
        self.kv_indices = [
            torch.cat([data.slots(s, request, n) for request, n in enumerate(seen)])
            for s in data.sets
        ]
        if c.w > 1:
            self.qo_indptr = _indptr([c.w] * c.bs, device)
            self.mask = data.full_mask()
            self.mask_indptr = _indptr([c.w * (n + c.w) for n in data.lens], device, torch.int64)
            return
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        splits = SGLANG_MAX_KV_SPLITS
        self.partial = torch.empty((c.bs, c.hq, splits, c.d), dtype=torch.float32, device=device)
        self.lse = torch.empty((c.bs, c.hq, splits), dtype=torch.float32, device=device)
        self.num_splits = torch.zeros(c.bs, dtype=torch.int32, device=device)
        get_num_kv_splits_triton[(1,)](
            self.num_splits,
            data.seq_lens + 1,
            c.bs,
            1,
            c.hq,
            c.hkv,
            splits,
            torch.cuda.get_device_properties(device).multi_processor_count,
            MAX_NUM_SEQ=256,
        )

    def launch(self, i: int) -> torch.Tensor:
        data, s, c = self.data, self.data.sets[i], self.data.case
        if c.w == 1:
            from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

            scratch = (self.partial, self.lse, self.num_splits, SGLANG_MAX_KV_SPLITS)
            where = (self.kv_indptr, self.kv_indices[i])
            decode_attention_fwd(s.q, s.k, s.v, s.out, *where, *scratch, data.scale, 1.0, 1.0)
        else:
            from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

            where = (self.qo_indptr, self.kv_indptr, self.kv_indices[i])
            mask = (self.mask, True, self.mask_indptr)
            extend_attention_fwd(
                *(s.q, s.k_new, s.v_new, s.out, s.k, s.v),
                *(*where, *mask, c.w, 1.0, 1.0),
                sm_scale=data.scale,
            )
        return s.out


class Fa3(Peer):
    """FlashAttention 3, SGLang's default on Hopper, of sgl-kernel or of a library; always a chain.

    As SGLang calls it, decode has its tile schedule made once per step, verify once per layer.
    """

    name = "fa3"
    chain_only = True

    def available(self, device: torch.device) -> str | None:
        if not fa3_library.present():
            return _needs_cuda(device, "sgl_kernel.flash_attn")
        return _needs_cuda(device) or fa3_library.reason()

    def applies(self, case: AttnCase) -> bool:
        of_library = (case.dtype, case.d) == ("bf16", 128) and case.page % fa3_library.PAGE_OF_TMA
        return super().applies(case) and bool(of_library or not fa3_library.present())

    def prepare(self, data: AttnData):
        c = data.case
        self.data = data
        self.cache_seqlens = (data.seq_lens + c.w).int()
        self.cu_seqlens_q = _indptr([c.w] * c.bs, data.device)
        self.page_tables = [
            (s.table[data.req_pool_indices, :: c.page] // c.page).int().contiguous()
            for s in data.sets
        ]
        self.forward, self.schedule = None, None
        max_pages = self.page_tables[0].shape[1]
        heads = {"num_heads": c.hq, "num_heads_k": c.hkv}
        if fa3_library.present():
            self.forward = fa3_library.Forward(
                self.cache_seqlens,
                self.cu_seqlens_q,
                metadata_once=c.w == 1,
                bs=c.bs,
                total_q=c.bs * c.w,
                max_seqlen_q=c.w,
                page_size=c.page,
                num_pages=data.sets[0].k.shape[0] // c.page,
                max_pages=max_pages,
                num_splits=0,
                **heads,
            )
        elif c.w == 1:
            from sgl_kernel.flash_attn import get_scheduler_metadata

            self.schedule = get_scheduler_metadata(
                batch_size=c.bs,
                max_seqlen_q=1,
                max_seqlen_k=max_pages * c.page,
                headdim=c.d,
                cache_seqlens=self.cache_seqlens,
                cu_seqlens_q=self.cu_seqlens_q,
                qkv_dtype=data.dtype,
                page_size=c.page,
                causal=True,
                **heads,
            )

    def launch(self, i: int) -> torch.Tensor:
        data, s, c = self.data, self.data.sets[i], self.data.case
        if self.forward is not None:
            self.forward.launch(s.out, s.q, s.k, s.v, self.page_tables[i], data.scale)
            return s.out
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        return flash_attn_with_kvcache(
            q=s.q,
            k_cache=s.k.view(-1, c.page, c.hkv, c.d),
            v_cache=s.v.view(-1, c.page, c.hkv, c.d),
            cache_seqlens=self.cache_seqlens,
            page_table=self.page_tables[i],
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=c.w,
            softmax_scale=data.scale,
            causal=True,
            scheduler_metadata=self.schedule,
        )


class TorchSdpa(Peer):
    """torch: gather the rows, then scaled_dot_product_attention with a mask; equal lengths only."""

    name = "torch-sdpa"

    def available(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else "is the peer of the CPU ops"

    def applies(self, case: AttnCase) -> bool:
        return super().applies(case) and len(set(case.lens)) == 1

    def prepare(self, data: AttnData):
        c = data.case
        self.data = data
        total = c.kv + c.w
        self.slots = [s.table[data.req_pool_indices, :total].long() for s in data.sets]
        self.mask = torch.ones((c.bs, 1, c.w, total), dtype=torch.bool, device=data.device)
        self.mask[:, 0, :, c.kv :] = visible(data.words, c.w)

    def launch(self, i: int) -> torch.Tensor:
        c, s = self.data.case, self.data.sets[i]
        q = s.q.view(c.bs, c.w, c.hq, c.d).transpose(1, 2)
        k, v = (t[self.slots[i]].transpose(1, 2) for t in (s.k, s.v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, scale=self.data.scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(c.bs * c.w, c.hq, c.d)


PEERS = (FlashInferDecode, FlashInferCausal, FlashInferTreeMask, SglangTriton, Fa3, TorchSdpa)


def flashinfer_compiled() -> bool:
    """Whether FlashInfer has compiled kernels for this machine, so a first use takes no minute."""
    try:
        from flashinfer.jit import env
    except Exception:  # not installed, or not usable: the peer itself says why
        return False
    folders = (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR)
    return any(any(folder.rglob("*.so")) for folder in folders if folder.exists())
