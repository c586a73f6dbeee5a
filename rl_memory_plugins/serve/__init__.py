"""`rl-memory serve FILE.yaml`: several models behind one port, whose engines take turns on the GPUs.

The engines swap by themselves (`server/idle.py`). Here they are started one after the other, watched, and reached by
the `model` of a request.
"""
