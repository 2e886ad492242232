"""Writes the kept list of public names, tests/behaviour/public_surface.txt, after a deliberate change.

    python scripts/surface.py

docs/stability.md says how such a change is announced.
"""

from __future__ import annotations

from pathlib import Path

from foretoken_lab.public_surface import lines

KEPT = Path(__file__).resolve().parents[1] / "tests" / "behaviour" / "public_surface.txt"

if __name__ == "__main__":
    KEPT.write_text("\n".join(lines()) + "\n", encoding="utf-8")
