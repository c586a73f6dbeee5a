"""Kinds of models and weights, and whether an update of each leaves an engine as a fresh start from disk does."""
