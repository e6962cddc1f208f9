"""The embedded model, as package data in `tiny/`. No code; knows nothing of how it is run."""
