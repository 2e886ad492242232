"""Which draws a verifier may make while all its verdicts are enumerated."""

from __future__ import annotations

import pytest

from foretoken.certify.enumeration import ReplayedStreams
from foretoken.core.errors import ConfigError


def test_a_draw_that_cannot_be_enumerated_is_refused_with_the_ones_that_can() -> None:
    streams = ReplayedStreams()
    with pytest.raises(ConfigError, match="raw uniform cannot be enumerated: use bernoulli"):
        streams.uniform("accept", 1)
    with pytest.raises(ConfigError, match="generator cannot be enumerated: use bernoulli"):
        streams.generator("accept")
