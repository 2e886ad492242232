"""``base-reflect``: a target that was taught to reflect: it reads a draft again and says what should stand there.

Half of its training text are answers of tasks with a draft in them, a prompt to reflect, and the corrected answer
(:mod:`foretoken_lab.recipes.reflections`); the other half is the mixture of ``base-tasks``, so that the first reading
stays.
All weights are trained: it is another target, with an accuracy of its own.

    foretoken train base --recipe base-reflect --from stage-2 --data DATA --out reflect

(stage-2: see ``base-tasks``.) What the reading is worth is measured by ``foretoken bench --suite reflective``.

Measured after 1.51 M tokens (``foretoken eval --limit 100``, 95 %; stage-2 next to it): arithmetic 41 % (32 to 51; 44),
profiles 58 % (48 to 67; 59), json 89 % (81 to 94; 92), code 100 %, but 5.14 nats a token of novels for 4.76. The second
reading does less harm than that of stage-2, and no good.
These weights are not bundled.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from foretoken.train.mixture import Encode, Source, scaled
from foretoken.train.trainer import Bounds
from foretoken_lab.recipes import base_tasks, base_tasks_2
from foretoken_lab.recipes.reflections import Counted, Reflections, reflections

DRAFT = "zoo:draft"


def mixture(root: Path) -> list[Source]:
    """Reflections on four tasks; then what ``base-tasks`` reads."""
    return [
        reflections("arithmetic", 0.26),
        reflections("profiles", 0.10),
        reflections("json", 0.08),
        reflections("code", 0.06),
        *scaled(base_tasks.mixture(root), 0.5),
    ]


def _encode(tokenizer: PreTrainedTokenizerBase) -> tuple[Encode, int]:
    made = Reflections(tokenizer, DRAFT)
    return made.encode, made.num_ids


def _objective(tokenizer: PreTrainedTokenizerBase, teacher: object) -> Counted:
    begins = tokenizer.bos_token_id
    return Counted(base_tasks_2.answers_first(tokenizer), len(tokenizer), -1 if begins is None else int(begins))


_SCHEDULE = base_tasks.RECIPE.schedule

RECIPE = replace(
    base_tasks.RECIPE,
    name="base-reflect",
    description=f"base, taught to read drafts of {DRAFT} again and put them right, 15.7 M parameters",
    sources=mixture,
    schedule=replace(_SCHEDULE, rates=_SCHEDULE.rates.scaled(0.7)),
    bounds=Bounds(minutes=30),
    encode=_encode,
    objective=_objective,
)
