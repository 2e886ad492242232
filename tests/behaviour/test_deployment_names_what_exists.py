"""The files with which a server is deployed name what exists: metrics, files, options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from helpers.serving import NAME, served
from helpers.zoo_llms import with_config

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "compose.yaml").exists(), reason="not a checkout")


def test_the_board_asks_for_metrics_that_the_server_has() -> None:
    board = json.loads((ROOT / "deploy/grafana/foretoken.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for text in asked for name in re.findall(r"[a-z]+:\w+|process_\w+", text)}
    assert len(names) > 10
    with served(with_config({"method": "auto"})) as running:
        again = "The cat sat on the mat. " * 4
        running.send("/v1/completions", {"model": NAME, "prompt": again, "max_tokens": 24, "temperature": 0})
        _, exposed, _ = running.get("/metrics")
    known = set(re.findall(r"^([a-z_:]+)(?:\{| )", exposed, flags=re.MULTILINE))
    assert names - known == set()
    labels = {label for text in asked for label in re.findall(r"by \((\w+)\)", text)} - {"le"}
    assert all(f'{label}="' in exposed for label in labels)


def test_every_file_of_the_deployment_is_there_and_parses() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", ())]
    files = [ROOT / mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(files) == 4
    for file in [*files, *(ROOT / ".github/workflows").glob("*.yaml")]:
        assert yaml.safe_load(file.read_text(encoding="utf-8")), file


def test_the_image_starts_the_server_with_options_that_exist() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    (command,) = [json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD ")]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    assert command[0] == "serve" == compose["services"]["foretoken"]["command"][0]
    from foretoken.cli.run.serve import serve

    known = {f"--{name.replace('_', '-')}" for name in serve.__annotations__}
    used = {part for part in [*command, *compose["services"]["foretoken"]["command"]] if part.startswith("--")}
    assert used <= known
    (user,) = [line.removeprefix("USER ") for line in lines if line.startswith("USER ")]
    assert int(user) > 0
    assert any(f"--uid {user} " in line for line in lines)
