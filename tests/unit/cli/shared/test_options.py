"""Values of options that commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.cli.shared.options import named_folders
from foretoken.core.errors import ConfigError


def test_folders_of_adapters_have_names(tmp_path: Path) -> None:
    assert named_folders([f"a={tmp_path}", f"b={tmp_path}"]) == {"a": str(tmp_path), "b": str(tmp_path)}
    for given in (str(tmp_path), f"={tmp_path}", "a=", f"a={tmp_path}/none"):
        with pytest.raises(ConfigError, match=r"--lora .*: write NAME=DIR, with a LoRA folder that exists"):
            named_folders([given])
    with pytest.raises(ConfigError, match="'a' names two folders"):
        named_folders([f"a={tmp_path}", f"a={tmp_path}"])
