"""A result says where it comes from."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from foretoken import zoo
from foretoken.core.provenance import git_commit, provenance

ZOO = Path(zoo.__file__).parent


def test_provenance_names_command_versions_and_machine(tmp_path):
    facts = provenance(["bench", "--set", "a b"], seed=3)
    assert facts["command"] == "foretoken bench --set 'a b'"
    assert facts["versions"]["torch"]
    assert facts["cpu"]
    assert facts["seed"] == 3
    assert git_commit(tmp_path) is None


def test_provenance_names_the_weights_of_bundled_models():
    models = provenance(["bench", "--model", "grown:base:100m"])["models"]
    weights = ZOO / "base" / "eagle" / "model.safetensors"
    assert models["base/eagle/model"] == hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    assert {"base/model", "draft/model"} <= models.keys()
    assert not any(name.startswith("moe") for name in models)
    assert "moe-tasks/model" in provenance([], model="zoo:moe")["models"]
    assert provenance(["train"], model="./mine")["models"] == {}


def git(folder, *arguments):
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)


def test_a_commit_is_dirty_where_code_differs_and_not_where_a_record_was_written(tmp_path):
    package, record = tmp_path / "src" / "foretoken", tmp_path / "lab" / "results" / "bench.json"
    for file in (package / "core.py", record):
        file.parent.mkdir(parents=True)
        file.write_text("1", encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    record.write_text("2", encoding="utf-8")
    assert "-dirty" not in git_commit(package)
    (package / "core.py").write_text("2", encoding="utf-8")
    assert git_commit(package).endswith("-dirty")
