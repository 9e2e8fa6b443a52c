"""BalanceRoute's tables, repeated with emulated ranks in step, and what they do not report: waits and fairness."""
