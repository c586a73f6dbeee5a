"""Adapters for trainers, one file each. An adapter imports its trainer, and holds no rule of the contract."""
