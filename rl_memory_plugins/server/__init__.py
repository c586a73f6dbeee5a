"""HTTP for both engines: the control routes, who may call them, and the gate before generation requests."""
