"""Tables and figures. Only the command line imports this package, and only it needs matplotlib."""
