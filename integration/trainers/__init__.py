"""Trainers that people use, on engines with this package and without."""
