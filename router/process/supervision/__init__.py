"""The supervisor of `d2lpm serve --processes`, which starts the other processes and keeps them running."""
