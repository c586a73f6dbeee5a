"""The SGLang adapter. Its entry point is here; nothing is imported before it is called.

| file         | runs in                 | adapts                                                              |
|--------------|-------------------------|---------------------------------------------------------------------|
| switch.py    | every process           | the flag and the keyword that enable it                             |
| options.py   | every process           | how the options travel                                              |
| modes.py     | every process           | modes that are refused at the start                                 |
| install.py   | every process           | the composition root: all hooks, and how SGLang starts processes    |
| worker.py    | each scheduler process  | regions, the rank's agent, the model's loader                       |
| scheduler.py | each scheduler process  | the controller's ranks and engine, refusal of requests              |
| native_calls.py | each scheduler process | SGLang's own release, resume and weight updates                     |
| metrics.py   | each scheduler process  | SGLang's gauges of memory                                           |
| client.py    | the tokenizer's process | calls to the schedulers, `Engine`'s methods, SGLang's own calls     |
| server.py    | the HTTP server         | routes, authentication, the 503 gate                                |
| health.py    | the HTTP server         | the health routes                                                   |
| messages.py  | every process           | the one request type and its reply                                  |
| tp_memory_balance.py | each scheduler process | the check that tensor-parallel ranks see the same free memory       |

Every tensor-parallel rank has its own scheduler, receives every request, and runs the same controller in step
with the others: they decide alike because they see the same replies of all ranks.
"""

from __future__ import annotations


def register() -> None:
    """Entry point `sglang.srt.plugins`: called once in every process of SGLang that loads plugins."""
    from rl_memory_plugins.engines.sglang import switch

    switch.register()
