"""A certificate fails when any part does, and reads as text and as JSON."""

from __future__ import annotations

import json

from foretoken.certify.certificate import Certificate, Section


def test_certificate_reads_as_text_and_as_json() -> None:
    sections = (Section("teeth", True, "fine"), Section("greedy_text", False, "2 of 3"))
    certificate = Certificate("ngram", {"verifier": "match"}, "zoo:base", "same stream", True, sections, 1.25)
    assert not certificate.passed
    found = json.loads(json.dumps(certificate.to_dict()))
    assert found["passed"] is False
    assert found["sections"][1]["name"] == "greedy_text"
    assert str(certificate).splitlines() == [
        "ngram verifier=match on zoo:base: promises same stream",
        "  pass  teeth        fine",
        "  FAIL  greedy_text  2 of 3",
        "FAILED in 1.2 s",
    ]
