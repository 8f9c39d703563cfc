"""Helpers of every room: checks of arguments, random streams, names and patterns."""

__version__ = "0.1.0"
