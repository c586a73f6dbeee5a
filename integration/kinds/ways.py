"""The ways of updating weights that are tried on every kind."""

from __future__ import annotations

STREAM, PARTIAL, RECOVERY, OWN = WAYS = ("stream", "partial", "recovery", "own route")
"""A complete update by this package; two updates of some layers each; a complete update after one that broke off; the
engine's own load from disk."""
