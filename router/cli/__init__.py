"""The command `d2lpm` and its subcommands."""
