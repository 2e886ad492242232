"""A plan file stands for the recipe that was chosen in it, for the model that it was made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.shared.settings import RecipeFlags
from foretoken.core.errors import ConfigError, ForetokenError, MismatchError
from foretoken.core.provenance import cpu_name
from foretoken.engine.plan_file import VERSION
from foretoken.models.fingerprint import fingerprint_of
from helpers import zoo_llms

_CHOSEN = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 5}


def write(folder: Path, **changes: Any) -> Path:
    """A plan for the bundled target, with some fields replaced."""
    target = {"name": "zoo:base", "fingerprint": fingerprint_of(zoo_llms.target().source), "dtype": "float32"}
    plan = {"version": VERSION, "target": target, "machine": {"processor": cpu_name()}, "chosen": _CHOSEN, **changes}
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def test_a_plan_is_the_recipe_of_a_library_call_and_of_a_command(tmp_path: Path) -> None:
    path = write(tmp_path)
    config = RecipeFlags(plan=path).config("zoo:base")
    for settings in ({"plan": str(path)}, {"plan": path}, config):
        recipe = zoo_llms.with_config(settings).recipe
        assert (recipe.method, recipe.num_nodes, recipe.adaptive) == ("ngram", 5, False)


def test_a_length_that_depends_on_the_number_of_requests_is_left_to_the_controller(tmp_path: Path) -> None:
    recipe = zoo_llms.with_config({"plan": write(tmp_path, schedule=[[1, 7, 5], [8, 8, 0]])}).recipe
    assert (recipe.method, recipe.adaptive) == ("ngram", True)
    assert zoo_llms.with_config({"plan": write(tmp_path, schedule=[[1, 1, 5]])}).recipe.num_nodes == 5


def test_a_plan_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, target={"name": "./other", "fingerprint": "0" * 64, "dtype": "int8"})
    with pytest.raises(MismatchError, match=r"made for './other', not for 'zoo:base'.*foretoken plan --model zoo:base"):
        zoo_llms.with_config({"plan": str(path)})


def test_a_plan_of_another_machine_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, machine={"processor": "Z80"})
    assert zoo_llms.with_config({"plan": str(path)}).recipe.method == "ngram"
    assert "another machine (Z80)" in caplog.text
    caplog.clear()
    zoo_llms.with_config({"plan": str(write(tmp_path))})
    assert not caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 0}, "version 0.*make it again with 'foretoken plan'"),
        ({"version": VERSION + 1}, "update foretoken"),
        ({"version": None}, "is no plan of 'foretoken plan'"),
        ({"chosen": None}, "is damaged"),
        ({"target": []}, "is damaged"),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused_with_the_remedy(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        zoo_llms.with_config({"plan": str(write(tmp_path, **changes))})


def test_a_file_that_holds_no_json_or_is_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match="no such file"):
        zoo_llms.with_config({"plan": str(path)})
    path.write_text("not json")
    with pytest.raises(ConfigError, match="cannot be read"):
        zoo_llms.with_config({"plan": str(path)})


def test_a_plan_with_options_that_it_decides_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(ConfigError, match="leave method out"):
        zoo_llms.with_config({"plan": str(path), "method": "suffix"})
    with pytest.raises(ConfigError, match="leave --set out"):
        RecipeFlags(sets=["tree=topk"], plan=path).config("zoo:base")
    with pytest.raises(ForetokenError, match="no such file"):
        RecipeFlags(plan=tmp_path / "none.json").config("zoo:base")


def test_plans_of_the_catalogue_keep_their_names() -> None:
    assert zoo_llms.with_config({"method": "ngram", "plan": "prefix_tree"}).recipe.plan.exact
