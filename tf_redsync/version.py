"""The version of this package, for what is imported without the rest of it."""

__version__ = "0.1.0"
