"""Run where a wheel is installed: its library for this processor decodes, and no compiler is needed."""

from __future__ import annotations

import os
import sys
import tempfile

os.environ["PATH"] = tempfile.mkdtemp()  # nothing is found there
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # nothing was compiled before
os.environ.pop("CC", None)

from foretoken import LLM, SamplingParams
from foretoken.native import build

print(origin := build.origin())
llm = LLM("zoo:base", dtype="int8", speculative_config={"method": "ngram"})
(out,) = llm.generate(["Tom has 12 marbles."], SamplingParams(max_tokens=16))
print(out.text)
fused = llm.target.native_decoder is not None
sys.exit(None if fused and origin and origin.startswith("installed") else "the installed decoder was not used")
