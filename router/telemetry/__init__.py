"""What operators see: metrics, fairness reports, explanations, logs."""
