"""The data path: parses client calls, forwards them to workers and passes the answers back."""
