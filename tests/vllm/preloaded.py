"""The last module that the process imports of which the tests' processes are forks; see `tests/vllm/child.py`.

vLLM collects garbage at several points of a start and of a wake. Each collection would look at all objects of all
imported modules, which takes a quarter of a second, and would copy their memory.
"""

import gc

import integration.engines.without_amx  # noqa: F401

gc.collect()
gc.freeze()
