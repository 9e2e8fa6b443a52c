"""Finds workers: by a host name, in a file, by the API of Kubernetes."""
