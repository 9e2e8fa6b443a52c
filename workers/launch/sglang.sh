#!/bin/sh
# usage: sglang.sh MODEL [FLAG ...]
#
# An SGLang server with the flags that the router reads, as of SGLang 0.5.23. Other flags are SGLang's own, as --port,
# --api-key or --tp-size; given here again, they count. KV_EVENTS_PORT (5557) and the port after it must be open to
# the router, and to nobody else: who reaches them reads the prompts' tokens.
# With data-parallel ranks, each of which publishes at the next port, --kv-events-config has to be given again, with a
# replay endpoint behind all of these.
set -eu
model=${1:?usage: sglang.sh MODEL [FLAG ...]}
shift
port=${KV_EVENTS_PORT:-5557}

# Its usage tells what was cached of each prompt: clients are charged by that, and predictions are corrected by it.
set -- --enable-cache-report "$@"
# /metrics: evictions, hits and the size of the cache. Its load is read from /v1/loads, which is always on.
set -- --enable-metrics "$@"
# What waits in the engine is served in the order in which the router sent it; lpm would order it again.
set -- --schedule-policy fcfs "$@"
# What its cache holds, exactly; by default a page is one token, and so is an event's block.
set -- --page-size 16 --kv-events-config "{\"publisher\": \"zmq\", \
\"endpoint\": \"tcp://*:$port\", \"replay_endpoint\": \"tcp://*:$((port + 1))\"}" "$@"

exec python3 -m sglang.launch_server --model-path "$model" "$@"
