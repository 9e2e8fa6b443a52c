"""Replicas on several machines that are one router: who leads, how fronts find the leader, and the state they share."""
