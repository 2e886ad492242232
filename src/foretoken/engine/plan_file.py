"""Plan files of ``foretoken plan``: a chosen recipe, and the model and machine that it was chosen for."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretoken.core.errors import ConfigError, MismatchError
from foretoken.core.provenance import cpu_name
from foretoken.models.fingerprint import fingerprint_of

VERSION = 1

log = logging.getLogger(__name__)


def is_plan_file(plan: Any) -> bool:
    """Whether the option ``plan`` names a file: the plans of the catalogue are bare words."""
    return isinstance(plan, Path) or (isinstance(plan, str) and (plan.endswith(".json") or "/" in plan))


def settled(settings: Mapping[str, Any] | None, name: str, source: Callable[[], str]) -> Mapping[str, Any] | None:
    """A ``speculative_config`` with a plan file replaced by the recipe that was chosen in it; others as they are.

    Args:
        name, source: of the target, as it is named and a function that says where it lies.
    Raises:
        ConfigError: the file cannot be read, is of another version, or stands with options that it decides.
        MismatchError: it was made for another model.
    """
    if not isinstance(settings, Mapping) or not is_plan_file(settings.get("plan")):
        return settings
    path = Path(settings["plan"]).expanduser()
    others = sorted(str(key) for key, value in settings.items() if key != "plan" and value is not None)
    if others:
        raise ConfigError(f"plan={path} decides method and options: leave {', '.join(others)} out, or the plan")
    plan = _read(path)
    made_for = plan["target"]
    if made_for["fingerprint"] != fingerprint_of(source()):
        raise MismatchError(
            f"plan {path} was made for '{made_for['name']}', not for '{name}' as it is now: make one with "
            f"'foretoken plan --model {name} --out {path.name}'"
        )
    machine = plan.get("machine", {})
    if machine.get("processor") != cpu_name():
        log.warning(
            "plan %s was made on another machine (%s): its choice may not be the fastest here; make one with "
            "'foretoken plan'",
            path,
            machine.get("processor"),
        )
    chosen = dict(plan["chosen"])
    if len({length for _, _, length in plan.get("schedule", ())}) > 1:
        # one number of tokens would be wrong for some numbers of requests: the controller decides
        chosen.pop("num_speculative_tokens", None)
    return chosen


def _read(path: Path) -> dict[str, Any]:
    """The content of a plan file.

    Raises:
        ConfigError: it is no plan of this version.
    """
    how = "make one with 'foretoken plan --out FILE'"
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"plan={path}: there is no such file; {how}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan={path} cannot be read ({error}): {how}") from None
    version = plan.get("version") if isinstance(plan, dict) else None
    if version is None:
        raise ConfigError(f"plan={path} is no plan of 'foretoken plan': {how}")
    if version != VERSION:
        older = isinstance(version, int) and version < VERSION
        remedy = "make it again with 'foretoken plan'" if older else "update foretoken, or make it again"
        raise ConfigError(f"plan={path} has version {version!r:.20}; this program reads version {VERSION}: {remedy}")
    target, chosen = plan.get("target"), plan.get("chosen")
    whole = isinstance(target, dict) and {"name", "fingerprint"} <= target.keys() and isinstance(chosen, dict)
    if not whole or not all(isinstance(each, list) and len(each) == 3 for each in plan.get("schedule", ())):
        raise ConfigError(f"plan={path} is damaged, it has no target or no choice: {how}")
    found: dict[str, Any] = plan
    return found
