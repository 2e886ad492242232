"""Quantised weights: their values, refusals, and the numbers of a product."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.forward import quantised_weight
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight, Rows, product, rounded, rows_of


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some(bits: int, group: int, *, signed: bool, minimum: bool) -> QuantisedWeight:
    outputs, inputs = 3, 256
    generator = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator)
    codes_OK = (codes - 2 ** (bits - 1)).to(torch.int8) if signed else codes.to(torch.uint8)
    groups = inputs // group
    return QuantisedWeight(
        codes_OK, 0.1 * noise(outputs, groups), 0.3 * noise(outputs, groups, seed=1) if minimum else None, bits
    )


@pytest.mark.parametrize(("bits", "group", "most"), [(8, None, 1.02 / 254), (8, 32, 1.02 / 254), (4, 32, 1.02 / 30)])
def test_every_element_goes_to_the_nearest_code(bits: int, group: int | None, most: float) -> None:
    weight_OK = noise(40, 96)
    found = rounded(weight_OK, bits, group, name="w")
    values = weight_OK.view(40, -1, group or 96)
    span = 2 * values.abs().amax(-1) if bits == 8 else values.amax(-1) - values.amin(-1)
    error = (found.dense() - weight_OK).view_as(values).abs().amax(-1)
    assert (error <= most * span).all()
    assert found.group == (group or 96)
    assert torch.equal(found.scale_OG.half().float(), found.scale_OG)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_by_parts_is_rounding(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of the last rows decides for all how scales are kept."""
    for weight_OK in (noise(20, 64), torch.cat([noise(18, 64), 1e-6 * noise(2, 64)])):
        monkeypatch.setattr(quantised_weight, "_ROWS", 4096)
        whole = rounded(weight_OK, bits, 32)
        monkeypatch.setattr(quantised_weight, "_ROWS", 3)
        parts = rounded(weight_OK, bits, 32)
        assert torch.equal(parts.codes_OK, whole.codes_OK)
        assert torch.equal(parts.scale_OG, whole.scale_OG)
        assert parts.minimum == whole.minimum == (bits == 4)
        assert torch.equal(parts.dense(), whole.dense())


def test_small_weights_keep_their_precision() -> None:
    """Below the resolution of float16, scales stay float32."""
    weight_OK = noise(16, 64)
    groups = weight_OK.view(16, 2, 32)
    span = groups.amax(-1) - groups.amin(-1)
    for factor in (2.0**-24, 2.0**30):
        found = rounded(weight_OK * factor, 4, 32)
        error = (found.dense() / factor - weight_OK).view_as(groups).abs().amax(-1)
        assert (error <= 1.001 / 30 * span).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_without_any_spread(bits: int) -> None:
    for value in (0.0, -1.5, 0.25):
        weight_OK = torch.full((3, 64), value)
        assert torch.allclose(rounded(weight_OK, bits, 32).dense(), weight_OK, rtol=1e-3)


def test_columns_in_another_order() -> None:
    order_K = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    weight_OK = noise(8, 64)
    sorted_ = rounded(weight_OK[:, order_K], 4, 16)
    turned = QuantisedWeight(sorted_.codes_OK, sorted_.scale_OG, sorted_.minimum_OG, 4, order_K, "turned")
    assert torch.equal(turned.dense()[:, order_K], sorted_.dense())
    x_TK = noise(3, 64, seed=9)
    assert torch.equal(QuantisedLinear(turned)(x_TK), QuantisedLinear(sorted_)(x_TK[:, order_K]))


def changed(**parts: object) -> Callable[[], QuantisedWeight]:
    def make() -> QuantisedWeight:
        given = {
            "codes_OK": torch.zeros(4, 64, dtype=torch.uint8),
            "scale_OG": torch.ones(4, 2),
            "minimum_OG": torch.zeros(4, 2),
            "bits": 4,
            "name": "model.layers.7.mlp.up_proj.weight",
        }
        return QuantisedWeight(**{**given, **parts})  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (changed(bits=3), "3 bits"),
        (changed(codes_OK=torch.zeros(4, 64)), "float32"),
        (changed(codes_OK=torch.zeros(64, dtype=torch.int8)), r"\[64\]"),
        (changed(codes_OK=torch.full((4, 64), 16, dtype=torch.uint8)), "to 16"),
        (changed(codes_OK=torch.full((4, 64), -9, dtype=torch.int8)), "-9"),
        (changed(scale_OG=torch.ones(4, 3)), r"scales \[4, 3\]"),
        (changed(scale_OG=torch.ones(3, 2)), r"scales \[3, 2\]"),
        (changed(scale_OG=torch.ones(4, 8), minimum_OG=None), "groups of 8"),
        (changed(scale_OG=torch.full((4, 2), torch.nan)), "scales that are not finite"),
        (changed(minimum_OG=torch.full((4, 2), torch.inf)), "minimums that are not finite"),
        (changed(minimum_OG=torch.zeros(4, 1)), r"minimums \[4, 1\]"),
        (changed(scale_OG=torch.ones(4, 2).half()), "float16"),
        (changed(order_K=torch.zeros(64, dtype=torch.int64)), "permutation"),
        (lambda: rounded(torch.zeros(4, 48), 4, 32, name="model.layers.7.mlp.up_proj.weight"), "48"),
        (lambda: rounded(torch.full((4, 32), torch.nan), 8, name="model.layers.7.mlp.up_proj.weight"), "not finite"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Callable[[], QuantisedWeight], what: str) -> None:
    with pytest.raises(ModelError, match=rf"model\.layers\.7\.mlp\.up_proj\.weight.*{what}"):
        make()


@pytest.mark.parametrize("minimum", [False, True], ids=["", "minimum"])
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 128), (8, 32), (8, 256)])
def test_a_product_is_the_formula(bits: int, group: int, signed: bool, minimum: bool) -> None:
    """Against fractions: integers are exact, and the sums over cells are rounded one by one."""
    weight = some(bits, group, signed=signed, minimum=minimum)
    rows = rows_of(noise(2, 256, seed=5))
    found_TO = product(rows, weight)
    for t in range(2):
        for o in range(3):
            expected, exact = by_hand(rows, weight, t, o)
            assert found_TO[t, o] == expected
            assert float(found_TO[t, o]) == pytest.approx(float(exact), rel=1e-3)


def by_hand(rows: Rows, weight: QuantisedWeight, t: int, o: int) -> tuple[Tensor, Fraction]:
    """One number of a product: as it is rounded, and exactly."""
    group, inputs, zero = weight.group, weight.codes_OK.shape[1], torch.zeros(())
    y, exact = zero, Fraction(0)
    for begin in range(0, inputs, max(group, 32)):
        scaled, stepped, alone_stepped = zero, zero, zero
        for first in range(begin, begin + max(group, 32), min(group, 32)):
            cell = range(first, first + min(group, 32))
            g, step = first // group, rows.step_TS[t, first // 32]
            codes, a = (
                [int(each[k]) for k in cell] for each in (weight.codes_OK[o].tolist(), rows.codes_TK[t].tolist())
            )
            dot, alone = sum(i * j for i, j in zip(codes, a, strict=True)), sum(a)
            scale, minimum = weight.scale_OG[o, g], zero if weight.minimum_OG is None else weight.minimum_OG[o, g]
            scaled = scaled + scale * torch.tensor(float(dot))
            scaled = scaled + minimum * torch.tensor(float(alone))
            stepped = stepped + step * torch.tensor(float(dot))
            alone_stepped = alone_stepped + step * torch.tensor(float(alone))
            exact += Fraction(float(step)) * (Fraction(float(scale)) * dot + Fraction(float(minimum)) * alone)
        if group <= 32:
            y = y + step * scaled
        else:
            y = y + scale * stepped
            y = y + minimum * alone_stepped
    return y, exact


def test_the_largest_codes_stay_exact() -> None:
    """255 * 127 * 32 in each of 256 cells: what float32 holds exactly, and their sum, a multiple of 2^8, too."""
    weight = QuantisedWeight(torch.full((2, 8192), 255, dtype=torch.uint8), torch.ones(2, 1), None, 8)
    assert product(rows_of(torch.full((1, 8192), 127.0)), weight)[0, 0] == 255 * 127 * 8192.0


def test_a_large_channel_coarsens_its_own_step_only() -> None:
    """One input of 64 that is 1,000 times as large: those of the other step keep their eight bits."""
    x_TK = noise(1, 64)
    x_TK[0, 5] = 1000
    rows = rows_of(x_TK)
    assert rows.step_TS.shape == (1, 2)
    found_K = (rows.codes_TK.view(1, 2, 32) * rows.step_TS[..., None]).flatten()
    assert (found_K[32:] - x_TK[0, 32:]).abs().max() <= 0.51 * x_TK[0, 32:].abs().max() / 127
    y_TO = QuantisedLinear(rounded(torch.eye(64), 8, 32))(x_TK)
    assert torch.allclose(y_TO[0, 32:], x_TK[0, 32:], atol=0.02)


def test_rows_are_rounded_to_the_nearest_step() -> None:
    rows = rows_of(torch.tensor([[1.0, -127.0, 2.5, 3.5, -0.5, 0.0]]))
    assert rows.codes_TK.tolist() == [[1, -127, 2, 4, 0, 0]]
    assert rows.step_TS.tolist() == [[1.0]]


def test_rows_that_cannot_be_rounded() -> None:
    x_TK = torch.tensor([[0.0, 0.0], [1e-38, 1e-40], [torch.nan, 1.0], [torch.inf, 1.0], [2.0, 1.0]])
    y_TO = QuantisedLinear(rounded(torch.eye(2), 8))(x_TK)
    assert (y_TO[:2] == 0).all()
    assert y_TO[2:4].isnan().all()
    assert torch.allclose(y_TO[4], torch.tensor([2.0, 1.0]), rtol=0.01)


def test_a_row_does_not_see_its_neighbours() -> None:
    """Bits of a row among many are those that it has alone."""
    layer = QuantisedLinear(rounded(noise(48, 128), 4, 32), noise(48))
    x_TK = noise(33, 128, seed=2) * torch.logspace(-3, 3, 33)[:, None]
    together = layer(x_TK)
    for t in range(33):
        assert torch.equal(layer(x_TK[t : t + 1])[0], together[t])


@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.02), (4, 0.12)])
def test_a_layer_stands_for_the_dense_one(bits: int, allowed: float) -> None:
    weight_OK, bias_O, x = noise(64, 128), noise(64, seed=1), noise(2, 5, 128, seed=2).bfloat16()
    layer = QuantisedLinear(rounded(weight_OK, bits, None if bits == 8 else 32), bias_O)
    expected = torch.nn.functional.linear(x.float(), weight_OK, bias_O)
    found = layer(x)
    assert found.dtype == torch.bfloat16
    assert found.shape == (2, 5, 64)
    assert (found.float() - expected).square().mean().sqrt() < allowed * expected.std()
    assert (layer.in_features, layer.out_features) == (128, 64)


def test_no_rows_at_all() -> None:
    """A span of layers may be run without any."""
    layer = QuantisedLinear(rounded(noise(40, 64), 4, 32))
    assert layer(torch.empty(1, 0, 64)).shape == (1, 0, 40)
