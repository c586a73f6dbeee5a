"""Adapters for trainers. Each is one file, imports its trainer when it is used, and holds no rule of the contract."""
