"""Packed weights lie in large pages where there are any; their contents are the same."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from foretoken.core import pages


@pytest.mark.parametrize("shape", [(3, 5), (3, 1024, 512), (2048, 1024)], ids=["small", "many pages", "whole pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_a_contiguous_copy_of_any_layout(shape, dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    turned = values.transpose(0, 1)
    for tensor in (values, turned):
        kept = pages.in_large_pages(tensor)
        assert kept.is_contiguous()
        assert kept.dtype == dtype
        assert torch.equal(kept, tensor)


@pytest.mark.skipif(sys.platform != "linux", reason="for Linux only")
def test_the_system_is_advised_on_large_tensors_only(monkeypatch):
    advised = []

    class Memory(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            advised.append((len(self), *advice))
            raise OSError  # as where it is refused

    monkeypatch.setattr(pages.mmap, "mmap", Memory)
    tensor = torch.arange(5 << 18, dtype=torch.float32)  # two pages and a half
    kept = pages.in_large_pages(tensor)
    assert advised == [(7 << 20, 14)]  # and a page more, for the alignment
    assert kept.data_ptr() % (2 << 20) == 0
    assert torch.equal(kept, tensor)
    pages.in_large_pages(torch.zeros(100))
    assert len(advised) == 1
