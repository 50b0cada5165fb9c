"""The builder: compiles kernel modules from a pinned source wheel into a wheel of the jit-cache layout."""
