"""``base-tasks-2``: the third stage of ``base``: more tasks, learnt from their answers, next to every kind of language.

After ``base-tasks`` json and code are answered, arithmetic and profiles half of the time, and novels had become 0.18
nats harder. Earlier third stages bought arithmetic with 0.2 to 0.4 nats of language: without meetings and with
questions that counted like answers, or with answer tokens that weighed more than those of prose. Here every token
that counts counts the same, three in ten tokens of questions do, and half of the mixture is language.

Measured after 5.4 M tokens (``foretoken eval --limit 200 --text-tokens 8192``; the second stage and ``zoo:base`` next
to it): arithmetic 62 % (55 to 68; 50, 9), profiles 64 % (57 to 70; 60, 33), json 88 % (82 to 91; 91, 4), code 100 %
(100, 55); nats a token: novels 4.67 (4.78, 4.59), dialogues of SGD's test part 2.11 (2.12, 2.09), QMSum's test part
3.35 (4.81, 4.63: its training part is read here). ``moe``, ``hybrid`` and ``long`` began as it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from foretoken.data import documents as doc
from foretoken.train.mixture import Source
from foretoken.train.trainer import Bounds
from foretoken_lab.recipes import base_tasks
from foretoken_lab.recipes import sources as s
from foretoken_lab.recipes.objectives import AnswersFirst


def mixture(root: Path) -> list[Source]:
    """Half tasks, half language."""
    return [
        s.task("arithmetic", 0.28),
        s.task("profiles", 0.18),
        s.task("keys", 0.03),
        s.task("json", 0.03),
        s.task("code", 0.03),
        s.corpus("gsm8k", 0.05, root),
        s.corpus("math", 0.02, root),
        s.corpus("stdlib_functions", 0.03, root),
        s.corpus("sgd_dialogues", 0.07, root),
        s.corpus("topical_chat", 0.05, root),
        s.corpus("openstax", 0.02, root),
        s.corpus("qmsum", 0.07, root),
        s.corpus("books", 0.14, root),
    ]


def answers_first(tokenizer: PreTrainedTokenizerBase) -> AnswersFirst:
    """The objective, with the markers that this tokenizer has."""
    known = tokenizer.get_vocab()
    openings, endings = ("<|user|>", "<|system|>"), ("<|assistant|>", doc.END, doc.BOS, doc.EOS)
    # a tokenizer need not have a marker for each role
    marks = [known[mark] for mark in openings if mark in known], [known[mark] for mark in endings if mark in known]
    return AnswersFirst(*marks, questions=0.3)


_SCHEDULE = base_tasks.RECIPE.schedule

RECIPE = replace(
    base_tasks.RECIPE,
    name="base-tasks-2",
    description="base, third stage: continued on its weaknesses, 15.7 M parameters",
    sources=mixture,
    schedule=replace(_SCHEDULE, rates=_SCHEDULE.rates.scaled(0.8)),
    bounds=Bounds(minutes=107),
    objective=lambda tokenizer, teacher: answers_first(tokenizer),
)
