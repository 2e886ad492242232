"""A declaration gives the check with its message, and the row of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch

from foretoken import catalog
from foretoken.core.errors import ConfigError
from foretoken.engine.llm import LLM
from foretoken.options.model import EngineOptions, ModelOptions
from foretoken.options.option import Checked, Option, declared, documented, named
from foretoken.options.tables import rows_of
from foretoken_lab.option_tables import knobs, parameters

NAN, INF = float("nan"), float("inf")


@documented
@dataclass(frozen=True, kw_only=True)
class Mine(Checked):
    """Options of a third-party method."""

    path: Annotated[str | Path, Option("A folder.")]
    count: Annotated[int, Option("How many.", least=1, most=9, remedy="3 is usual")] = 3
    share: Annotated[float, Option("A share.", above=0, most=1)] = 0.5
    score: Annotated[float | None, Option("A score.", least=0, below=1)] = None
    kind: Annotated[str, Option("A kind.", choices=("first", "second"))] = "first"
    length: Annotated[int | str, Option("A length.", least=1, choices=("auto",))] = "auto"
    on: Annotated[bool, Option("A switch | a flag.")] = False
    sizes: Annotated[Sequence[int] | None, Option("Sizes.")] = None
    weights: Annotated[Mapping[str, float] | None, Option("Weights.")] = None

    def check_together(self) -> None:
        if self.on and self.count > 5:
            raise ConfigError("on with more than 5: lower count")


@pytest.mark.parametrize(
    ("name", "good", "kept"),
    [
        ("path", Path("a"), Path("a")),
        ("count", np.int64(9), 9),
        ("share", 1, 1.0),
        ("share", torch.tensor(0.25), 0.25),
        ("score", None, None),
        ("score", 0, 0.0),
        ("kind", "second", "second"),
        ("length", 7, 7),
        ("length", "auto", "auto"),
        ("on", True, True),
        ("sizes", [1, 2], (1, 2)),
        ("weights", {"a": 1.0}, {"a": 1.0}),
    ],
)
def test_allowed_values_keep_their_type(name: str, good: Any, kept: Any) -> None:
    found = getattr(Mine(**{"path": "x", name: good}), name)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("name", "bad", "allowed"),
    [
        ("path", (5, None, ""), "a path"),
        ("count", (0, 10, 3.0, True, "3", None), "an integer between 1 and 9: 3 is usual"),
        ("share", (0, 1.5, NAN, INF, 10**400, True, "1", None), r"a number in \(0, 1\]"),
        ("score", (-0.1, 1, False), r"a number in \[0, 1\)"),
        ("kind", ("frist",), "one of 'first', 'second': did you mean 'first'"),
        ("kind", (None, 3, True), "one of 'first', 'second'"),
        ("length", (0, "manual", 1.0, False, None), "'auto' or an integer, at least 1"),
        ("on", (0, 1, "yes", None), "true or false"),
        ("sizes", ("12", [1.0], [True], 3), "a list of integers"),
        ("weights", ([1], "a"), "a mapping"),
    ],
)
def test_the_rest_is_refused_with_name_value_and_remedy(name: str, bad: tuple[Any, ...], allowed: str) -> None:
    for value in bad:
        with pytest.raises(ConfigError, match=f"must be {allowed}") as caught:
            Mine(**{"path": "x", name: value})
        assert str(caught.value).startswith(f"{name}={value!r:.60} ")


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        Mine(path="x", count="9" * 1000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 150


def test_values_that_contradict_each_other() -> None:
    assert Mine(path="x", on=True, count=5).on
    with pytest.raises(ConfigError, match="lower count"):
        Mine(path="x", on=True, count=6)


def test_tables_have_every_option_with_its_default() -> None:
    assert [row["name"] for row in rows_of(Mine)] == [each.name for each in declared(Mine)]
    lines = knobs(Mine)
    assert lines[2] == "| `path` | required | A folder. |"
    assert "| `kind` | `first` | A kind. |" in lines
    assert "| `on` | `False` | A switch \\| a flag. |" in lines
    assert "| `count` | `3` | `--count` | How many. An integer between 1 and 9. |" in parameters(Mine)
    assert "\n    count: How many." in (Mine.__doc__ or "")


def test_an_option_without_a_declaration_has_no_help() -> None:
    @dataclass(frozen=True)
    class Plain:
        times: int = 3

    assert rows_of(Plain) == [{"name": "times", "type": "int", "default": 3, "help": ""}]
    assert rows_of(None) == []


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_every_option_of_every_method_is_declared(entry: catalog.Entry) -> None:
    config = entry.load().Config
    assert [each.name for each in declared(config)] == list(config.__dataclass_fields__)
    for each in declared(config):
        assert each.option.help.endswith(".")
        if not each.required:
            each.check(each.default)


def test_the_signature_of_an_llm_equals_the_declarations() -> None:
    """It is written out, for editors and type checkers; nothing may be missing, and no default another one."""
    import inspect

    given = inspect.signature(LLM).parameters
    for each in (*declared(ModelOptions), *declared(EngineOptions)):
        assert given[each.name].default == each.default
    known = {each.name for each in (*declared(ModelOptions), *declared(EngineOptions))}
    assert set(given) - known == {"model", "speculative_config", "others"}


def test_an_option_by_its_name() -> None:
    assert named(ModelOptions, "dtype").default == "auto"
