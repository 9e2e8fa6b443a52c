"""The two calls of a request whose prompt one engine computes and another one decodes, by connector."""
