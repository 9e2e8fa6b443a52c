"""What workloads are made of: arrivals, lengths, prompts, traffic."""
