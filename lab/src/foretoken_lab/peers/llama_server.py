r"""llama.cpp's own server on the weights that ours serves, for ``foretoken bench serve``.

    python -m foretoken_lab.peers.llama_server --model grown:base:100m --port 8090 &
    python -m foretoken_lab.peers.llama_server --model grown:base:100m --port 8092 --draft zoo:draft \\
        -- --spec-draft-n-max 4 &
    foretoken serve grown:base:100m --no-prefix-caching --threads 2 --port 8091 &
    foretoken bench serve --url ours=http://127.0.0.1:8091 --url llama.cpp=http://127.0.0.1:8090

It writes the model (and a draft) as GGUF, once, into the user's cache folder, prints the command of ``llama-server``
and becomes it. Options after ``--`` go to ``llama-server``. Its cache of prompts is off, as ours has to be: later
rounds repeat the same prompts, and no server may reuse an earlier round.

``llama-server`` is built from llama.cpp's sources, which the package llama-cpp-python brings (``vendor/llama.cpp``):

    cmake -G Ninja SOURCES -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    ninja llama-server
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil

from foretoken.core.errors import ConfigError
from foretoken_lab.peers import adapters


def main() -> None:
    options = _options()
    binary = shutil.which(options.binary)
    if binary is None:
        raise ConfigError(
            f"--binary {options.binary}: there is no such program; the first lines of this file say how to build it"
        )
    if adapters.import_llama_cpp() is None:
        raise SystemExit(2)
    command = [binary, "--model", str(adapters.kept_gguf(options.model, options.dtype)), "--alias", options.model]
    if options.draft:
        command += ["--model-draft", str(adapters.kept_gguf(options.draft, "bfloat16")), "--spec-type", "draft-simple"]
    command += ["--port", str(options.port), "--threads", str(options.threads), "--threads-batch", str(options.threads)]
    # llama-server shares --ctx-size out among its slots
    command += ["--parallel", str(options.slots), "--ctx-size", str(options.slots * options.context)]
    command += ["--flash-attn", "on", "--jinja", "--no-cache-prompt", "--log-disable", *options.more]
    print(shlex.join(command), flush=True)
    os.execv(binary, command)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="llama-server", help="name on the PATH, or a file")
    parser.add_argument("--model", default="grown:base:100m", help="Llama layout")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", *adapters.QUANTISED])
    parser.add_argument("--draft", help="a draft model of the same vocabulary, in bfloat16")
    parser.add_argument("--slots", type=int, default=32, help="requests that run at once")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("more", nargs="*", help="for llama-server, after --")
    return parser.parse_args()


if __name__ == "__main__":
    main()
