"""One hostile address beside ten polite clients: what it costs them, and what it makes the router hold."""
