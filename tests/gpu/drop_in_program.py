"""What test_drop_in runs: FlashInfer's own calls beside the typed ones, each on the same tensors."""

from __future__ import annotations

import flashinfer
import torch

from kernel_depot.kernels.attention import Attention, Backend, MaskMode
from kernel_depot.kernels.batch_decode import BatchDecodePlan
from kernel_depot.kernels.batch_prefill import BatchPrefillPlan
from kernel_depot.kernels.decode import single_decode
from kernel_depot.kernels.memory import CUDA, Device
from kernel_depot.kernels.norm import fused_add_rmsnorm, rmsnorm
from kernel_depot.kernels.page import append_paged_kv_cache
from kernel_depot.kernels.prefill import single_prefill

GPU = Device(CUDA, 0)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def compare(name: str, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    print("same bits" if torch.equal(theirs, ours) else "differs", name, flush=True)


def attention(mask: MaskMode) -> Attention:
    return Attention(8, 2, 128, 128, "f16", "f16", "f16", mask=mask)


def norms() -> None:
    x, weight = half(17, 4096), half(4096)
    out = torch.empty_like(x)
    rmsnorm(out, x, weight)
    compare("rmsnorm", flashinfer.rmsnorm(x, weight), out)
    residual = half(17, 4096)
    mine, my_residual = x.clone(), residual.clone()
    fused_add_rmsnorm(mine, my_residual, weight)
    flashinfer.fused_add_rmsnorm(x, residual, weight)
    compare("fused_add_rmsnorm", torch.cat([x, residual]), torch.cat([mine, my_residual]))


def single_requests() -> None:
    q, k, v = half(33, 8, 128), half(70, 2, 128), half(70, 2, 128)
    out = torch.empty_like(q)
    single_prefill(q, k, v, out, mask=MaskMode.CAUSAL)
    theirs = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, backend="fa2")
    compare("single_prefill", theirs, out)
    one = torch.empty_like(q[0])
    single_decode(q[0], k, v, one)
    compare("single_decode", flashinfer.single_decode_with_kv_cache(q[0], k, v), one)


def batches() -> None:
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    indptr = torch.tensor([0, 5, 6, 70], dtype=torch.int32)
    q, k, v = half(70, 8, 128), half(70, 2, 128), half(70, 2, 128)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(indptr.cuda(), indptr.cuda(), 8, 2, 128, causal=True, q_data_type=torch.float16)
    out = torch.empty_like(q)
    plan = BatchPrefillPlan.ragged(attention(MaskMode.CAUSAL), device=GPU, backend=Backend.AUTO)
    plan.plan(indptr, indptr)
    plan.run(q, k, v, out)
    compare("ragged prefill", wrapper.run(q, k, v), out)

    caches = half(9, 16, 2, 128), half(9, 16, 2, 128)
    pages = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    numbers = torch.randperm(9).int()
    last = torch.tensor([5, 16, 1], dtype=torch.int32)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    decode.plan(
        pages.cuda(), numbers.cuda(), last.cuda(), 8, 2, 128, 16,
        q_data_type=torch.float16, kv_data_type=torch.float16,
    )  # fmt: skip
    step = half(3, 8, 128)
    got = torch.empty_like(step)
    mine = BatchDecodePlan(attention(MaskMode.NONE), device=GPU)
    mine.plan(pages, numbers, last, page_size=16)
    mine.run(step, *caches, got)
    compare("batch decode", decode.run(step, caches), got)

    key, value = half(3, 2, 128), half(3, 2, 128)
    requests, positions = torch.arange(3).int().cuda(), torch.tensor([36, 15, 64]).int().cuda()
    copies = tuple(cache.clone() for cache in caches)
    places = (numbers.cuda(), pages.cuda(), last.cuda())
    flashinfer.append_paged_kv_cache(key, value, requests, positions, caches, *places)
    append_paged_kv_cache(key, value, requests, positions, *copies, *places)
    compare("paged append", torch.cat(caches), torch.cat(copies))


if __name__ == "__main__":
    norms()
    single_requests()
    batches()
