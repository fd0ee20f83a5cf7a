"""The command `vapo` and its subcommands."""
