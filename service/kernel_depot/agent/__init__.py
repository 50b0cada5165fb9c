"""The agent: a node's long-lived client. It keeps the cache as the depot wants it, proves it, reports."""
