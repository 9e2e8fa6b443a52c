#!/bin/sh
# usage: vllm.sh MODEL [FLAG ...]
#
# A vLLM server with the flags that the router reads, as of vLLM 0.33. Other flags are vLLM's own, as --port,
# --api-key or --tensor-parallel-size; given here again, they count. KV_EVENTS_PORT (5557) and the port after it must
# be open to the router, and to nobody else: who reaches them reads the prompts' tokens.
# With data-parallel ranks, each of which publishes at the next port, --kv-events-config has to be given again, with a
# replay endpoint behind all of these.
set -eu
model=${1:?usage: vllm.sh MODEL [FLAG ...]}
shift
port=${KV_EVENTS_PORT:-5557}

# Its usage tells what was cached of each prompt: clients are charged by that, and predictions are corrected by it.
set -- --enable-prompt-tokens-details "$@"
# Its metrics tell how long blocks lie unused before they are evicted. The rest of them are always on.
set -- --kv-cache-metrics "$@"
# What waits in the engine is served in the order in which the router sent it.
set -- --scheduling-policy fcfs "$@"
# What its cache holds, exactly.
set -- --kv-events-config "{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \
\"endpoint\": \"tcp://*:$port\", \"replay_endpoint\": \"tcp://*:$((port + 1))\"}" "$@"

exec vllm serve "$model" "$@"
