"""One heavy client beside four light ones, live on emulated workers."""
