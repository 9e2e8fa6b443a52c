"""Three replicas as processes before emulated workers, with a real Valkey or Redis server (`make test-cluster`)."""
