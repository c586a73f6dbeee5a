"""The checks of this machine and this environment. Each function looks at one thing and returns a `Finding`."""
