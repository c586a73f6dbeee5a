"""Steps that an interrupt must not leave half done.

An interrupt is what a signal handler raises that is no `Exception`: Ctrl-C, `sys.exit` at SIGTERM, a cancelled task of
Ray.
"""

from __future__ import annotations

from collections.abc import Callable

TRIES = 8
"""How often a step is begun: whoever interrupts it so often shall get through."""


def to_its_end(step: Callable[[], None]) -> None:
    """Run a step that may be run again, until it has ended; then raise the last interrupt, if there was one."""
    interrupt: BaseException | None = None
    for _ in range(TRIES):
        try:
            step()
            break
        except Exception:
            raise
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
