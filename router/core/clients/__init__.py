"""Clients as the core knows them: their service, their shares and their queues."""
