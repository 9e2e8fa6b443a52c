#!/bin/sh
# usage: vllm.sh MODEL [FLAG ...]
#
# Starts a vLLM server with the flags that the router needs, as of vLLM 0.33. Further flags, such as --port,
# --api-key or --tensor-parallel-size, are passed on, and override those set here. KV_EVENTS_PORT (5557) and the port
# after it must be open to the router only: anyone who can reach them can read the tokens of prompts.
# With data-parallel ranks, each of which publishes at the next port, give --kv-events-config again, with a replay
# endpoint behind all of these ports.
set -eu
model=${1:?usage: vllm.sh MODEL [FLAG ...]}
shift
port=${KV_EVENTS_PORT:-5557}

# The usage reports how much of each prompt was cached: it determines charges and corrects predictions.
set -- --enable-prompt-tokens-details "$@"
# The metrics also report how long blocks lie unused before they are evicted. All other metrics are always on.
set -- --kv-cache-metrics "$@"
# The engine serves its own queue in the order in which the router sent the requests.
set -- --scheduling-policy fcfs "$@"
# KV events report exactly what the cache holds.
set -- --kv-events-config "{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \
\"endpoint\": \"tcp://*:$port\", \"replay_endpoint\": \"tcp://*:$((port + 1))\"}" "$@"

exec vllm serve "$model" "$@"
