from __future__ import annotations

import pytest
import torch
from torch import nn

from foretoken.models.prepack import PackedLinear, can_prepack, prepack

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_prepack(dtype, CPU)]

pytestmark = pytest.mark.skipif(not DTYPES, reason="this build of torch has no oneDNN")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(48, 64), (64, 33), (7, 130)], ids=str)
def test_packed_equals_plain(dtype: torch.dtype, bias: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(*shape, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    for rows in (1, 2, 3, 7, 8, 9, 16, 33, 64, 70):
        x = torch.randn(1, rows, shape[0]).to(dtype)
        with torch.inference_mode():
            ours, exact = packed(x), linear.double()(x.double())
            plain = linear.to(dtype)(x)
        assert ours.shape == plain.shape
        assert ours.dtype == dtype
        # one rounding of the result, and of float32 sums
        torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5 if bias else 2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(48, 64), (64, 33), (7, 130)], ids=str)
def test_the_weight_can_still_be_read(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Routers read it, or its dtype: hunyuan_v1_moe and longcat_flash do."""
    linear = nn.Linear(*shape).to(dtype)
    assert torch.equal(PackedLinear(linear).weight, linear.weight)


def test_only_exact_linear_layers_are_replaced() -> None:
    class Router(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(8, 8), "router": Router(8, 4), "list": nn.ModuleList([nn.Linear(8, 2)])})
    model["conv"] = nn.Conv1d(8, 8, 1)
    assert prepack(model) == 2
    assert isinstance(model["a"], PackedLinear)
    assert isinstance(model["list"][0], PackedLinear)
    assert type(model["router"]) is Router


def test_a_shared_layer_and_a_tied_weight_stay_right() -> None:
    torch.manual_seed(1)
    embedding, head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    ids = torch.arange(11)
    with torch.inference_mode():
        expected = head(embedding(ids))
        before = embedding.weight.clone()
        prepack(model)
        assert torch.equal(embedding.weight, before)
        torch.testing.assert_close(model["head"](model["embedding"](ids)), expected)


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")], ids=str
)
def test_what_cannot_be_packed(dtype: torch.dtype, device: str) -> None:
    assert not can_prepack(dtype, torch.device(device))
