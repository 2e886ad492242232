"""``draft``: a Llama of 2 layers and width 192, 6.5 times cheaper a token than ``base``, distilled on its own words.

The recipe is that of every draft (``foretoken.train.distil``). The openings that the target continues are those of
base's mixture, with more questions among them: a draft has to follow answers, whether they are right or not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foretoken.train import distil
from foretoken.train.mixture import Source
from foretoken_lab.recipes import sources as s
from foretoken_lab.recipes.base import mixture as base_mixture

_QUESTIONS = {"gsm8k": 0.24, "math": 0.08, "sgd_dialogues": 0.30, "topical_chat": 0.20}


def mixture(root: Path) -> list[Source]:
    """Base's mixture with more questions."""
    sources = [replace(source, share=_QUESTIONS.get(source.name, source.share)) for source in base_mixture(root)]
    return [*sources, s.corpus("webquestions", 0.06, root), s.corpus("efficientqa", 0.06, root)]


RECIPE = replace(distil.RECIPE, sources=mixture)
