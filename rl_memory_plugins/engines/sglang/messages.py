"""The request from the tokenizer's process to the schedulers, and its reply.

A reply carries the `rid` of its request. SGLang's own communicators match replies by their order instead, so a
cancelled call gives every later call the wrong reply.
"""

from __future__ import annotations

from sglang.srt.managers import io_struct


class RLMemoryReqInput(io_struct.BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """`payload` is a command, encoded by `commands.encode_command`."""

    payload: bytes


class RLMemoryReqOutput(io_struct.BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """`payload` is one engine's reply, encoded by `commands.encode_reply`."""

    payload: bytes


io_struct.hook_custom_types(RLMemoryReqInput, RLMemoryReqOutput)
