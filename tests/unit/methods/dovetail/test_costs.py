"""How many nodes a verification can afford: the table, its hull, the elbow, and what serving makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from foretoken.core.draft import Draft
from foretoken.core.protocols import Budget, Context
from foretoken.methods.dovetail import costs
from foretoken.methods.dovetail.costs import Affordable, CostTable, Rate, measure
from foretoken.methods.dovetail.drafter import DovetailDrafter
from foretoken.methods.dovetail.network import Dovetail
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import untrained
from helpers.zoo_llms import with_config

ELBOW = CostTable(((1, 6.4e-3), (4, 6.7e-3), (8, 7.7e-3), (16, 11.5e-3), (32, 19.9e-3)))
CALIBRATED = tuple((tenth + 0.5) / 10 for tenth in range(10))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


def taken(table: CostTable, rate: float, reaches: list[float], requests: int = 1) -> int:
    """Nodes of a draft with these chances of acceptance, the best first."""
    least = tuple(rate * price for price in table.prices(requests, len(reaches)))
    rule = Affordable((1.0,) * 10, least)
    count = 0
    while count < len(reaches) and rule.worthwhile(reaches[count], 0.95, count):
        count += 1
    return count


def test_times_between_measured_rows_lie_on_the_hull() -> None:
    assert ELBOW.at(1) == pytest.approx(6.4e-3)
    assert ELBOW.at(2) == pytest.approx(6.5e-3)
    assert ELBOW.at(12) == pytest.approx(9.6e-3)
    assert ELBOW.at(48) == pytest.approx(28.3e-3)  # as the last piece goes on
    bumpy = CostTable(((1, 5.0), (2, 9.0), (4, 6.0), (8, 5.5), (16, 20.0)))
    assert bumpy.hull == [(1, 5.0), (8, 5.5), (16, 20.0)]  # what a busy machine made slow is left out
    prices = [round(each, 9) for each in bumpy.prices(1, 15)]
    assert prices == sorted(prices)


def test_the_draft_ends_at_the_elbow() -> None:
    """Every node stands with chance 0.06: at 200 tokens a second that pays for rows 2 to 8, and for none after."""
    assert taken(ELBOW, 200.0, [0.06] * 31) == 7
    assert taken(ELBOW, 200.0, [0.5] * 31) == 31
    assert taken(ELBOW, 200.0, [0.01] * 31) == 0
    assert taken(ELBOW, 200.0, [0.9, 0.5, 0.3, 0.2, 0.1, 0.08, 0.07, 0.06, 0.05]) == 7
    assert taken(ELBOW, 400.0, [0.06] * 31) == 3  # a faster engine has more expensive seconds


def test_a_straight_line_prices_the_elbow_wrongly() -> None:
    """Planted: one slope from first to last row ends the draft where rows are still nearly free."""
    line = CostTable((ELBOW.points[0], ELBOW.points[-1]))
    assert taken(line, 200.0, [0.06] * 31) == 0 != taken(ELBOW, 200.0, [0.06] * 31)


def test_requests_that_run_together_share_the_rows() -> None:
    alone, four = ELBOW.prices(1, 7), ELBOW.prices(4, 7)
    assert all(more >= less for less, more in zip(alone, four, strict=True))
    assert taken(ELBOW, 200.0, [0.06] * 31, requests=4) == 1


def test_confidences_are_corrected_by_accepted_tokens() -> None:
    rule = Affordable((0.0,) * 9 + (0.5,), (0.3, 0.3, 0.6))
    assert rule.worthwhile(1.0, 0.95, 0)
    assert not rule.worthwhile(1.0, 0.85, 0)  # predicted to be accepted, and never is
    assert not rule.worthwhile(0.5, 0.95, 0)
    assert not rule.worthwhile(1.0, 0.95, 2)
    assert not rule.worthwhile(1.0, 0.95, 3)  # beyond the measured costs


@pytest.mark.parametrize("points", [((1, 1.0),), ((2, 1.0), (4, 2.0)), ((1, 1.0), (1, 2.0)), ((1, 0.0), (2, 1.0))])
def test_tables_that_cannot_be(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="increasing rows from 1"):
        CostTable(points)


def test_a_rate_is_that_of_as_many_requests() -> None:
    rate = Rate()
    assert rate.of(1) == 0.0
    rate.add(1, 3, 0.01)
    rate.add(2, 8, 0.01)
    assert (rate.of(1), rate.of(2), rate.of(3)) == (pytest.approx(300.0), pytest.approx(800.0), 0.0)


def test_a_target_is_timed(model: LanguageModel) -> None:
    table = measure(model)
    assert [rows for rows, _ in table.points] == list(costs.ROWS)
    assert all(seconds > 0 for _, seconds in table.points)


class Watched(DovetailDrafter):
    """Remembers the sizes of its drafts, and learns nothing of times."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        self._rate = Rate()
        drafts = super().propose(contexts, budgets)
        self.largest = max([getattr(self, "largest", 0), *map(len, drafts)])
        return drafts


@pytest.mark.parametrize(
    ("table", "largest"),
    [
        (CostTable(((1, 1.0), (32, 1.0 + 1e-9))), 31),
        (CostTable(((1, 1.0), (8, 1.0 + 1e-9), (32, 1e6))), 7),
        (CostTable(((1, 1.0), (32, 1e6))), 0),
    ],
    ids=["free", "elbow", "dear"],
)
def test_serving_takes_what_the_table_affords(
    table: CostTable, largest: int, model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "measure", lambda target: table)
    drafter = Watched(Watched.Config(head=untrained(Dovetail, model, tmp_path / "head")), model)
    llm = with_config({"method": drafter, "num_speculative_tokens": 31}, target=model)
    llm.generate([{"prompt_token_ids": tokens_of(1, 20, 100)}], SamplingParams(max_tokens=30, ignore_eos=True))
    assert drafter.largest == largest
