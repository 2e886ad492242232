"""One run of a measuring script: its threads, the load of other programs, and the record of its results.

measurement = Measurement("prefill.py", options.json, threads=options.threads)
rows = ...
measurement.write({"rows": rows}, model=options.model)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foretoken.core.files import check_writable, write_whole
from foretoken.core.provenance import provenance
from foretoken_lab.peers.versions import Quiet, command, versions


class Measurement:
    """Begins a run; refuses a record that cannot be written before the measurement, not after it.

    Args:
        script: a file of ``lab/benchmarks``.
        path: the JSON file to write; None: no record.
        threads: of torch in this process; None: the script starts processes with their own number.
        option: the script's option for the path.
        peers: whether other engines are measured, so that the record needs their versions.
    Raises:
        ForetokenError: the file cannot be written.
    """

    def __init__(
        self, script: str, path: str | Path | None, *, threads: int | None, option: str = "--json", peers: bool = False
    ) -> None:
        self._script, self._path, self._threads, self._peers = script, path, threads, peers
        if path is not None:
            check_writable(Path(path), option)
        if threads is not None:
            torch.set_num_threads(threads)
        self._quiet = Quiet()

    def write(self, found: Mapping[str, Any], **settings: Any) -> None:
        """Write results with their provenance; warn if other programs used the processors meanwhile.

        Args:
            found: the results by name.
            settings: models, dtypes and other options, recorded as given.
        """
        others = self._quiet.report()
        if self._path is None:
            return
        facts = provenance([], **settings)
        facts |= {"command": command(self._script), "share_of_processors_used_by_others": others}
        if self._threads is not None:
            facts["threads"] = self._threads
        if self._peers:
            facts["versions"] |= versions()
        write_whole(Path(self._path), json.dumps({"provenance": facts, **found}, indent=1) + "\n")
