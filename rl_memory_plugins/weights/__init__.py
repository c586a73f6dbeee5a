"""Weight updates in place: from a trainer process to the ranks of an engine."""
