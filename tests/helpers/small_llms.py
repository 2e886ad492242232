"""The smaller model of the bundled pair as the target: a step takes a fifth of the time of one of the larger.

For tests of promises that hold for any target. ``ALTERED`` drafts for it: about half of its tokens stand.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from foretoken import zoo
from foretoken.engine.llm import LLM
from helpers import zoo_llms
from helpers.adapters import shelf
from helpers.variants import DRAFT, Case
from helpers.zoo_llms import PROMPTS as PROMPTS
from helpers.zoo_llms import Recipes
from helpers.zoo_llms import assert_idle as assert_idle
from helpers.zoo_llms import ids as ids
from helpers.zoo_llms import prompt_ids as prompt_ids

ALTERED = "altered:"  # for the option `model`: a copy of the target with other weights here and there


class _Recipes(Recipes):
    def with_config(self, config: Mapping[str, Any] | None, **options: Any) -> LLM:
        if config and config.get("model") == ALTERED:
            config = {**config, "model": altered()}
        return super().with_config(config, **options)


_over_draft = _Recipes("zoo:draft")
base, target, greedy, truth = _over_draft.base, _over_draft.target, _over_draft.greedy, _over_draft.truth
with_config, with_drafter = _over_draft.with_config, _over_draft.with_drafter


@cache
def altered() -> str:
    """The folder of that copy."""
    folder = Path(tempfile.mkdtemp(dir=shelf())) / "draft"
    shutil.copytree(zoo.path("draft"), folder, ignore=shutil.ignore_patterns("sprinter"))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * 0.2
        weights[name] = (weight.float() + noise).to(weight.dtype) if weight.ndim > 1 else weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def over(case: Case) -> Recipes:
    """Recipes over this target; over the larger one where drafts leave it after some of its layers, and where a part
    was made for the bundled pair.
    """
    of_the_pair = case.entry.load().declared.draft_model and case.variant.untrained is not None
    return zoo_llms.OVER_BASE if of_the_pair or case.entry.name in ("kangaroo", "del") else _over_draft


def config_of(case: Case, rule: str | None, count: int | str) -> dict[str, Any]:
    """The ``speculative_config`` over that target, which does not draft for itself."""
    config = case.config(over(case).target(), rule, count)
    if over(case) is _over_draft and config.get("model") == DRAFT:
        config["model"] = ALTERED
    return config
