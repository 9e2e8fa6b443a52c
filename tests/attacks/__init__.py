"""One hostile address beside ten polite clients: what the attack costs the clients and makes the router hold."""
