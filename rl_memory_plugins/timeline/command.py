"""The command `rl-memory timeline`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.timeline.history import History, read_handoffs, timeline_in
from rl_memory_plugins.timeline.page import html_page
from rl_memory_plugins.timeline.perfetto import perfetto_trace
from rl_memory_plugins.timeline.records import Event, Timeline

with needs("cli"):
    import typer
    from rich.console import Console
    from rich.live import Live

    from rl_memory_plugins.timeline.show import shown

DEFAULT_URL = "http://127.0.0.1:8000"
REFRESH_S = 1.0
KEPT = 1000
"""The events that the live view keeps of a server."""


def timeline(
    url: Annotated[
        list[str] | None,
        typer.Option(
            "--url", envvar="RL_MEMORY_URL", help=f"A server's address, by default {DEFAULT_URL}; may be repeated."
        ),
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="RL_MEMORY_API_KEY", help="The servers' admin or API key.")] = "",
    handoff: Annotated[
        list[Path] | None, typer.Option(help="A file of HandoffReport.append_to; may be repeated.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the servers' answers as JSON, by address.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures into this file.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev into this file.")] = None,
) -> None:
    """Show what the memory of engines did over time: every second until Ctrl-C, once, or as a file."""
    try:
        trainers = {str(file): read_handoffs(file) for file in handoff or []}
        with ExitStack() as clients:
            engines = {one: clients.enter_context(EngineClient(one, api_key)) for one in url or _default(trainers)}
            answers = {name: timeline_in(client.timeline()) for name, client in engines.items()}
            history = History(answers, trainers)
            for file, write in ((html, html_page), (perfetto, perfetto_trace)):
                if file is not None:
                    _write(file, write(history))
            if as_json:
                typer.echo(json.dumps(msgspec.to_builtins(answers), indent=2))
            elif once:
                Console().print(shown(history))
            elif html is None and perfetto is None:
                _watch(engines, trainers, answers)
    except RLMemoryError as error:
        typer.echo(json.dumps(error.to_record()) if as_json else f"{error.code}: {error.message}", err=True)
        raise typer.Exit(1) from None


def _default(trainers: Mapping[str, Any]) -> list[str]:
    return [] if trainers else [DEFAULT_URL]


def _watch(engines: Mapping[str, EngineClient], trainers: Mapping[str, Any], answers: dict[str, Timeline]) -> None:
    """Show the timelines until the user ends the command."""
    with Live(shown(History(answers, trainers)), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(REFRESH_S)
                missing: dict[str, str] = {}
                for name, client in engines.items():
                    try:
                        answers[name] = extended(answers[name], client.timeline)
                    except RLMemoryError as error:  # it may come back
                        missing[name] = error.message
                live.update(shown(History(answers, trainers), missing), refresh=True)
        except KeyboardInterrupt:
            return


def extended(former: Timeline, ask: Callable[[int], Mapping[str, Any]]) -> Timeline:
    """The former answer with the events since; those of a server that has started again replace the former."""
    answer = timeline_in(ask(former.next))
    if answer.timeline != former.timeline:
        return timeline_in(ask(0))
    by_first = {_first(event): event for event in former.events}
    for event in answer.events:
        by_first.pop(_first(event), None)  # it stands for those calls too
        by_first[_first(event)] = event
    events = [*by_first.values()]
    gone = [former.dropped, *(event.seq for event in events[:-KEPT])]
    if answer.dropped:
        gone.append(former.next + answer.dropped)
    return msgspec.structs.replace(answer, events=events[-KEPT:], dropped=max(gone))


def _first(event: Event) -> int:
    return event.first_seq or event.seq  # a server before this field joins no calls


def _write(file: Path, content: str) -> None:
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {file}: {error}", field="file", got=str(file)) from None
