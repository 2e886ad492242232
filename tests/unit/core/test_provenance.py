"""A result says where it comes from."""

from __future__ import annotations

from foretoken.core.provenance import git_commit, provenance


def test_provenance_names_command_versions_and_machine(tmp_path):
    facts = provenance(["bench", "--set", "a b"], seed=3)
    assert facts["command"] == "foretoken bench --set 'a b'"
    assert facts["versions"]["torch"]
    assert facts["cpu"]
    assert facts["seed"] == 3
    assert git_commit(tmp_path) is None
