"""What operators see: metrics, fairness reports, explanations of single requests, and logs."""
