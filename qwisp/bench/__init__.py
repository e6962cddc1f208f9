"""`python -m qwisp.bench`, a file per question. Knows the public API and counters, no internals."""
