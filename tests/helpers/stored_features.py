"""A store of a target's hidden states, as ``foretoken train features`` of the lab writes it."""

from __future__ import annotations

from foretoken_lab.features.extract import extract
from foretoken_lab.features.taps import Wanted

__all__ = ["Wanted", "extract"]
