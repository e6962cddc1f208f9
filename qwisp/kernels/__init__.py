"""Arrays and row-exact operations on them. Knows nothing of requests, or of experts on disk."""
