"""A tiny target in both dtypes, and runners of heads over pairs for it."""

from __future__ import annotations

import pytest

from foretoken.drafting.feature_heads import runner
from foretoken.drafting.feature_heads.pair_network import LayeredNetwork
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers.feature_heads import save_tiny
from helpers.pairs import DTYPES, HEADS
from helpers.untrained import random_part


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    found = {dtype: load(str(folder), dtype=dtype, device="cpu") for dtype in DTYPES}
    if found["float32"].native_decoder is None:
        pytest.skip("no native decoder here")
    return found


@pytest.fixture(scope="module")
def runners(models: dict[str, LanguageModel]) -> dict[tuple[str, str, bool], Runner]:
    """Of every head and dtype, with a table of the tokens' parts and without."""
    found = {}
    for name, (kind, fields) in HEADS.items():
        for dtype, model in models.items():
            head: LayeredNetwork = random_part(kind, model, **fields)
            found[name, dtype, True] = Runner(model, head)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runner, "TABLE_BYTES", 0)
                found[name, dtype, False] = Runner(model, head)
    return found
