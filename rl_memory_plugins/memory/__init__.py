"""Pausable memory: allocators of tagged regions, the host backup, and the state machine of one rank."""
