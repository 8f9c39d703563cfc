"""What every room may use: checks of arguments, random streams, names and patterns."""
