"""One hostile address beside ten polite clients: what the attack costs the clients, and what it makes the router
hold.
"""
