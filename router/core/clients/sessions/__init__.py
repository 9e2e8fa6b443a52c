"""Agent sessions: calls that resend a growing context, and the clients that make them."""
