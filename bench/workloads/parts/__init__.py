"""The parts of workloads: arrivals, lengths, prompts, traffic."""
