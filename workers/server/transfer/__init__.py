"""I/O: how the processes of prefill and decode engines exchange KV."""
