"""Pages of a clean mapped file leave memory and come back with the same content; memory of any other kind stays."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.native import mapped, tiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SIZE = 64 * mmap.PAGESIZE


def file_of(tmp_path: Path) -> tuple[Tensor, bytes]:
    path = tmp_path / "weights"
    content = bytes(range(256)) * (SIZE // 256)
    path.write_bytes(content)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8), content


def resident(tensor: Tensor) -> int:
    """Pages in this process's memory, by its page map."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        return sum(entry >> 63 for entry in memoryview(pages.read(8 * (SIZE // mmap.PAGESIZE))).cast("Q"))


def test_pages_of_a_file_leave_and_come_back(tmp_path: Path) -> None:
    tensor, content = file_of(tmp_path)
    assert bytes(tensor.tolist()) == content
    assert resident(tensor) == 64
    mapped.leave(tensor[5:-5])
    assert resident(tensor) == 2
    assert bytes(tensor.tolist()) == content


def test_a_tensor_with_a_written_page_is_left_alone(tmp_path: Path) -> None:
    tensor, content = file_of(tmp_path)
    tensor[7] = 99
    mapped.leave(tensor)
    assert bytes(tensor.tolist()) == content[:7] + bytes([99]) + content[8:]
    assert resident(tensor) == 64
    mapped.leave(tensor[mmap.PAGESIZE :])
    assert resident(tensor) == 1
    assert tensor[7] == 99


def test_memory_without_a_file_is_left_alone() -> None:
    for tensor in (torch.full((1 << 20,), 7.0), torch.full((1 << 20,), 7.0)[::2], torch.ones(3)):
        kept = tensor.clone()
        mapped.leave(tensor)
        assert torch.equal(tensor, kept)


def test_a_large_file_leaves_memory_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a part of it is in memory next to its packed twin; every part is packed."""
    monkeypatch.setattr(tiles, "_PART", 16 * mmap.PAGESIZE)
    rows = file_of(tmp_path)[0].view(1024, -1)
    done: list[int] = []
    most = []

    def pack(first: int, end: int) -> None:
        rows[16 * first : 16 * end].sum()
        done.extend(range(first, end))
        most.append(resident(rows))

    tiles.by_all_threads(pack, 64, SIZE, rows)
    assert sorted(done) == list(range(64))
    assert max(most) <= 40  # the system may read some pages ahead
    assert resident(rows) <= 24
