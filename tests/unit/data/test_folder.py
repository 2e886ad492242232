"""The folder of the corpora: named, or found in the environment."""

from __future__ import annotations

import pytest

from foretoken.core.errors import ConfigError
from foretoken.data.folder import ENVIRONMENT, data_root


def test_the_data_folder_is_named_or_found(tmp_path, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(ConfigError, match=f"--data DIR, or set {ENVIRONMENT}"):
        data_root(None)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    assert data_root(None) == tmp_path
    with pytest.raises(ConfigError, match="there is no such folder"):
        data_root(tmp_path / "none")
