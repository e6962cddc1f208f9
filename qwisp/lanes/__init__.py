"""Sequences, positions and the state of each lane. Knows nothing of weights or of experts."""
