"""What another distribution adds to Foretoken: entry points by group and name, imported when they are used.

    foretoken.commands    "analyze", "train.base"   a typer application, a function, or a Command of train/command.py
    foretoken.models      "grown"                   MadeModels (models/made.py), for ``--model grown:base:100m``
    foretoken.suites      "rules"                   a Suite (bench/suite.py), for ``foretoken bench --suite``
    foretoken.reports     "html"                    record, columns, sections -> text, for ``foretoken bench --report``
    foretoken.questions   "arithmetic"              a QuestionSet of the lab, for ``foretoken train judge``
    foretoken.features    "store"               StoredFeatures (train/trainer.py), for ``foretoken train … --features``
    foretoken.corpora     "generated"               share -> Source (train/mixture.py), for ``--corpus NAME``
    foretoken.mixtures    "base"                    folder of the corpora -> list of Source, for ``--data DIR``

The distribution ``foretoken-lab`` (``lab/`` in the repository) declares some of each in its pyproject.toml.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from foretoken.core.errors import ConfigError

COMMANDS = "foretoken.commands"
MODELS = "foretoken.models"
SUITES = "foretoken.suites"
REPORTS = "foretoken.reports"
QUESTIONS = "foretoken.questions"
FEATURES = "foretoken.features"
CORPORA = "foretoken.corpora"
MIXTURES = "foretoken.mixtures"

GET_LAB = "install it with: pip install foretoken-lab (in a clone of the repository: pip install ./lab)"


@cache
def declared(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, in alphabetical order; empty where no distribution declares any."""
    return {each.name: each for each in sorted(entry_points(group=group), key=lambda each: each.name)}


def loaded(group: str, name: str) -> Any | None:
    """What an entry point names, imported; None where none has this name."""
    found = declared(group).get(name)
    return None if found is None else found.load()


def required(group: str, name: str, wanted: str) -> Any:
    """What an entry point names, imported.

    Args:
        wanted: the option, command or name in the user's spelling, for the message.
    Raises:
        ConfigError: the distribution that declares it is not installed.
    """
    found = loaded(group, name)
    if found is None:
        raise ConfigError(f"{wanted} is part of foretoken-lab; {GET_LAB}")
    return found
