"""Kernel Depot: pinned GPU kernel binaries, verified once, shared by all, proven on each node."""

__version__ = "0.1.0"
