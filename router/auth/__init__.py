"""Who a client is, and what it may have in flight and per minute."""
