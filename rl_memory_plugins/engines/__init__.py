"""One package for each engine: hooks and adapters. No rule of the contract is decided here."""
