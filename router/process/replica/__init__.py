"""The processes of one replica of a cluster: a scheduler that leads or waits, and fronts that follow whoever leads."""
