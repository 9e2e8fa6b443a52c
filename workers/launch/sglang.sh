#!/bin/sh
# usage: sglang.sh MODEL [FLAG ...]
#
# Starts an SGLang server with the flags that the router needs, as of SGLang 0.5.23. Further flags, such as --port,
# --api-key or --tp-size, are passed on, and override those set here. KV_EVENTS_PORT (5557) and the port after it must
# be open to the router only: anyone who can reach them can read the tokens of prompts.
# With data-parallel ranks, each of which publishes at the next port, give --kv-events-config again, with a replay
# endpoint behind all of these ports.
set -eu
model=${1:?usage: sglang.sh MODEL [FLAG ...]}
shift
port=${KV_EVENTS_PORT:-5557}

# The usage reports how much of each prompt was cached: it determines charges and corrects predictions.
set -- --enable-cache-report "$@"
# /metrics reports evictions, hits and the size of the cache. The load is read from /v1/loads, which is always on.
set -- --enable-metrics "$@"
# The engine serves its own queue in the order in which the router sent the requests; lpm would reorder them.
set -- --schedule-policy fcfs "$@"
# KV events report exactly what the cache holds. By default a page, and so a block of an event, is one token.
set -- --page-size 16 --kv-events-config "{\"publisher\": \"zmq\", \
\"endpoint\": \"tcp://*:$port\", \"replay_endpoint\": \"tcp://*:$((port + 1))\"}" "$@"

exec python3 -m sglang.launch_server --model-path "$model" "$@"
