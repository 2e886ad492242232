"""The tree's size by the number of requests: the table, and its use in serving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.core.draft import Draft
from foretoken.core.errors import ModelError
from foretoken.methods.scylla.drafter import ScyllaDrafter
from foretoken.methods.scylla.network import Scylla
from foretoken.methods.scylla.width import Widths
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import untrained
from helpers.zoo_llms import with_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


@pytest.fixture
def head(model: LanguageModel, tmp_path: Path) -> Path:
    return Path(untrained(Scylla, model, tmp_path / "head", layers=2))


def write(folder: Path, model: LanguageModel, table: Any, **changes: Any) -> None:
    record = {"algorithm": "scylla_widths", "target_fingerprint": fingerprint_of(model.source), "widths": table}
    (folder / "widths.json").write_text(json.dumps({**record, **changes}))


def prompts(count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": tokens_of(seed, 6 + seed, 100)} for seed in range(count)]


def test_between_measured_batches_it_is_interpolated() -> None:
    widths = Widths(((2, 16), (4, 8), (8, 0)))
    assert [widths.at(batch) for batch in (1, 2, 3, 4, 5, 6, 7, 8, 100)] == [16, 16, 12, 8, 6, 4, 2, 0, 0]
    found = [widths.at(batch) for batch in range(1, 20)]
    assert found == sorted(found, reverse=True)
    assert widths.most == 16
    assert Widths(((3, 5),)).at(1) == Widths(((3, 5),)).at(9) == 5


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ([], {}, "widths is empty"),
        ([[1, 4], [2, 8]], {}, "8 nodes for 2 requests, but 4 for 1"),
        ([[2, 4], [2, 4]], {}, "2 requests come after 2"),
        ([[1, "many"]], {}, "pairs of requests and nodes"),
        ({"1": 4}, {}, "pairs of requests and nodes"),
        ([[1, 4]], {"algorithm": "else"}, "no algorithm 'scylla_widths'"),
        ([[1, 4]], {"target_fingerprint": "0", "target": "zoo:base"}, "another target ('zoo:base')"),
    ],
    ids=str,
)
def test_damaged_tables(table: Any, changes: dict[str, Any], message: str, model: LanguageModel, head: Path) -> None:
    write(head, model, table, **changes)
    with pytest.raises(ModelError) as caught:
        ScyllaDrafter(ScyllaDrafter.Config(head=str(head)), model)
    assert message in str(caught.value)
    assert "foretoken calibrate scylla" in str(caught.value)


def test_a_table_that_is_named_must_be_there(model: LanguageModel, head: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        ScyllaDrafter(ScyllaDrafter.Config(head=str(head), widths=str(head / "nowhere.json")), model)


class Counting(ScyllaDrafter):
    """Notes the requests and the longest draft of every step."""

    def propose(self, contexts: Any, budgets: Any) -> list[Draft]:
        drafts = super().propose(contexts, budgets)
        self.seen = [*getattr(self, "seen", []), (len(contexts), max(map(len, drafts)))]
        return drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_width_follows_the_batch_and_the_text_does_not(
    temperature: float, model: LanguageModel, head: Path
) -> None:
    """Requests of different lengths, so that the batch shrinks and the width changes between rounds."""
    params = [
        SamplingParams(max_tokens=8 + 6 * number, ignore_eos=True, temperature=temperature, seed=5)
        for number in range(4)
    ]
    plain = with_config({"method": "none"}, target=model).generate(prompts(4), params)
    for table in ([[1, 6], [2, 4], [3, 2], [4, 0]], [[1, 1]], [[1, 16], [4, 4]], [[1, 60]]):
        write(head, model, table)
        drafter = Counting(Counting.Config(head=str(head), width=4), model)
        llm = with_config({"method": drafter, "verifier": "match", "num_speculative_tokens": 60}, target=model)
        outputs = llm.generate(prompts(4), params)
        assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]
        widths = Widths(tuple(map(tuple, table)))
        if temperature == 0:  # drafts of seeded requests are another matter
            assert all(nodes <= widths.at(batch) for batch, nodes in drafter.seen)
            assert {batch for batch, _ in drafter.seen} >= {1, 4}
            if widths.at(1) <= 16:  # near the end of a text no more nodes fit
                assert max(nodes for batch, nodes in drafter.seen if batch == 1) == widths.at(1)


def test_a_table_decides_the_length_and_says_so(model: LanguageModel, head: Path) -> None:
    write(head, model, [[1, 6], [4, 2]])
    llm = with_config({"method": "scylla", "head": str(head)}, target=model)
    assert (llm.recipe.num_nodes, llm.recipe.adaptive) == (6, False)
    assert llm.recipe.drafter.explanation == "nodes by requests: 6 for 1, 2 for 4"
    (head / "widths.json").unlink()
    assert with_config({"method": "scylla", "head": str(head)}, target=model).recipe.adaptive
