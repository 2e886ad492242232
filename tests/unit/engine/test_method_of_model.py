"""A draft model or head that is named without a method drafts within `auto`, where that can hold it."""

import pytest

from foretoken import zoo
from foretoken.engine.method_of_model import method_of_model


@pytest.mark.parametrize(
    ("model", "options", "method"),
    [
        ("zoo:draft", {"num_speculative_tokens", "model"}, "auto"),
        ("zoo:draft", {"tree"}, "draft_model"),
        ("zoo:draft", {"draft_model.dtype"}, "draft_model"),
        *(("zoo:draft", {option}, "draft_model") for option in ("extend", "executor", "lane", "verifier")),
        (zoo.path("base") / "eagle", (), "auto"),
        (zoo.path("base") / "eagle", {"width"}, "eagle"),
        (zoo.path("base") / "kangaroo" / "exit-2", (), "kangaroo"),  # its drafts begin inside the target
        (zoo.path("draft") / "sprinter", (), "sprinter"),  # it has a rule of its own
        (zoo.path("base") / "judge", (), "judge"),  # a verifier's
    ],
)
def test_it_drafts_within_auto_or_alone(model, options, method):
    assert method_of_model(str(model), options) == method
