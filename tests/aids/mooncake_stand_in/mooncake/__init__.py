"""A stand-in for Mooncake. Put its parent folder first on PYTHONPATH. It is a test aid and is never installed."""
