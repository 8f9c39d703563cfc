"""What every room may use: checks of arguments, random streams, names and patterns."""

__version__ = "0.1.0"
