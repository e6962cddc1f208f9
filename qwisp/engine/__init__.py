"""Checkpoint, forward pass, sampling and text: where the parts meet. Knows no HTTP and no plots."""
