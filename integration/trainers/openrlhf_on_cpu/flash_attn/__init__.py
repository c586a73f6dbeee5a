"""A stand-in for flash-attn, which has no build for CPUs. OpenRLHF imports it in each process of the trainer, and calls
it only for packed samples. It also stands in for what OpenRLHF calls of `torch.cuda` without asking for a GPU.
"""

import torch


class _Device(str):
    """Where torch takes a device, the CPU; in a name, the index of a GPU."""

    def __format__(self, _: str) -> str:
        return "0"


torch.cuda.set_device = lambda device: None
torch.cuda.current_device = lambda: _Device("cpu")
torch.cuda.synchronize = lambda device=None: None
