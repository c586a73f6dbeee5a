"""The pictures of docs/status-page.md: a real engine takes part in some rounds of a trainer, one of which fails.

    python -m integration.status_page --engine vllm --out docs

Needs a browser: see `integration/browser.py`.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from integration import browser
from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.models import SHAPES, new_model, write_model
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.trainer import ModelSource

if TYPE_CHECKING:
    import torch

ROUNDS, FAILS = 4, 4  # the update of the round `FAILS` breaks off, and is sent again
STAGE_S = 4.0  # of each round awake, and of each asleep
CLIP = {"x": 0, "y": 0, "width": browser.SIZE["width"], "height": 1620}


class Breaking(ModelSource):
    """The tensors of a trainer that breaks off."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(super().tensors()):
            if number == 20:
                raise RuntimeError("the trainer ran out of memory")
            yield item


def run_rounds(server: Server, model: Any) -> None:
    control = server.control
    for number in range(1, ROUNDS + 1):
        time.sleep(STAGE_S)
        control.sleep(2)
        time.sleep(STAGE_S)
        control.wake_up(["weights"])
        if number == FAILS:
            with suppress(RLMemoryError):
                control.update_weights(Breaking(model), weight_version=f"step-{number}", bucket_bytes=1 << 20)
        control.update_weights(model, weight_version=f"step-{number}")
        control.wake_up()
    control.sleep(1)
    time.sleep(STAGE_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="vllm", choices=ENGINES)
    parser.add_argument("--out", default=Path("docs"), type=Path)
    arguments = parser.parse_args()
    if browser.missing():
        parser.error(browser.missing())
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(write_model(Path(folder) / "model", SHAPES["small"], dtype="float32", seed=1), forked=True)
        model = new_model(launch.model, 2, launch.dtype)
        with (
            Server(ENGINES[arguments.engine](), launch, Path(folder) / "server.log") as server,
            browser.visiting() as visit,
        ):
            visit.page.goto(f"{server.url}/v1/rl_memory/ui")
            run_rounds(server, model)
            for scheme in ("light", "dark"):
                visit.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
                shot = Image.open(io.BytesIO(visit.page.screenshot(clip=CLIP, full_page=True)))  # type: ignore[arg-type]
                # Less than 100 kB: its few colours fit a palette.
                small = shot.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
                small.save(arguments.out / f"status-page-{scheme}.png", optimize=True)


if __name__ == "__main__":
    main()
