"""What test_drop_in runs with flashinfer-python 0.7: its calls and the typed ones, on the same tensors."""

from __future__ import annotations

import flashinfer
import torch

from kernel_depot.kernels.attention import Attention, Backend, MaskMode
from kernel_depot.kernels.batch_prefill import BatchPrefillPlan
from kernel_depot.kernels.memory import CUDA, Device
from kernel_depot.kernels.norm import fused_add_rmsnorm, rmsnorm
from kernel_depot.kernels.page import append_paged_kv_cache

GPU = Device(CUDA, 0)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def compare(name: str, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    print("same bits" if torch.equal(theirs, ours) else "differs", name, flush=True)


def attention() -> Attention:
    return Attention(8, 2, 128, 128, "bf16", "bf16", "bf16", mask=MaskMode.CAUSAL)


def norms() -> None:
    x, weight = numbers(17, 4096), numbers(4096)
    out = torch.empty_like(x)
    rmsnorm(out, x, weight)
    compare("rmsnorm", flashinfer.rmsnorm(x, weight), out)
    residual = numbers(17, 4096)
    mine, my_residual = x.clone(), residual.clone()
    fused_add_rmsnorm(mine, my_residual, weight)
    flashinfer.fused_add_rmsnorm(x, residual, weight)
    compare("fused_add_rmsnorm", torch.cat([x, residual]), torch.cat([mine, my_residual]))


def prefills() -> None:
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    indptr = torch.tensor([0, 5, 6, 70], dtype=torch.int32)
    q, k, v = numbers(70, 8, 128), numbers(70, 2, 128), numbers(70, 2, 128)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        indptr.cuda(), indptr.cuda(), 8, 2, 128,
        causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    out = torch.empty_like(q)
    plan = BatchPrefillPlan.ragged(attention(), device=GPU, backend=Backend.FA2)
    plan.plan(indptr, indptr)
    plan.run(q, k, v, out)
    compare("ragged prefill", wrapper.run(q, k, v), out)

    caches = numbers(9, 16, 2, 128), numbers(9, 16, 2, 128)
    pages = torch.tensor([0, 1, 2, 7], dtype=torch.int32)
    order = torch.randperm(9).int()
    last = torch.tensor([5, 16, 7], dtype=torch.int32)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    paged.plan(
        indptr.cuda(), pages.cuda(), order[:7].cuda(), last.cuda(), 8, 2, 128, 16,
        causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    mine = BatchPrefillPlan.paged(attention(), device=GPU, backend=Backend.FA2)
    mine.plan(indptr, pages, kv_indices=order[:7], last_page_len=last, page_size=16)
    got = torch.empty_like(q)
    mine.run(q, *caches, got)
    compare("paged prefill", paged.run(q, caches), got)

    key, value = numbers(3, 2, 128), numbers(3, 2, 128)
    requests, positions = torch.arange(3).int().cuda(), torch.tensor([4, 15, 70]).int().cuda()
    copies = tuple(cache.clone() for cache in caches)
    places = (order[:7].cuda(), pages.cuda(), last.cuda())
    flashinfer.append_paged_kv_cache(key, value, requests, positions, caches, *places)
    append_paged_kv_cache(key, value, requests, positions, *copies, *places)
    compare("paged append", torch.cat(caches), torch.cat(copies))


if __name__ == "__main__":
    norms()
    prefills()
