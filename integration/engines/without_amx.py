"""Makes vLLM take the kernels that every CPU has, in this process and its forks.

For CPUs with AMX vLLM takes other kernels, which pack weights otherwise and take fewer dtypes. The outcomes of tests,
and the committed records, must not depend on the machine.
"""

from __future__ import annotations

import torch

torch.cpu._is_amx_tile_supported = lambda: False
