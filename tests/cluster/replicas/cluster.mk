# Three replicas as processes, with a real Valkey or Redis server: Debian's, unpacked into .venv and not installed.
# `make test-cluster CLUSTER_ROUNDS=5 CLUSTER_CLIENTS=200` repeats each fault, under more load;
# CLUSTER_STORE_SECONDS=60 is for how long the store is down. `python -m tests.cluster.replicas.cost` shows what replicas
# cost, and what the processes of one router do.
.PHONY: test-cluster

test-cluster: $(STAMP)
	@$(VENV)/bin/python -m tests.cluster.replicas.environment
	$(VENV)/bin/pytest tests/cluster/replicas -q -rs -p no:randomly
