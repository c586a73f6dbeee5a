"""What `integration.trainers.verl_grpo` measures inside verl. `VERL_USE_EXTERNAL_MODULES` imports it in each process.

Each value is a line of the file that `VERL_WATCH` names: a JSON object with one key, the metric.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from verl.utils import ray_utils
from verl.utils.debug import metrics
from verl.workers.rollout import base

FILE = "VERL_WATCH"


def write(metric: str, value: float) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps({metric: value}) + "\n")


def _timed(metric: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    async def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = await call(*args, **kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if os.environ.get("RANK", "0") == "0":
            write(metric, time.perf_counter() - start)
        return result

    return timed


def _watched_rollout(original: Callable[..., type]) -> Callable[..., type]:
    """The rollout of a trainer process, with its wakes and syncs timed."""

    def get_rollout_class(*args: Any, **kwargs: Any) -> type:
        found = original(*args, **kwargs)
        return type(
            found.__name__,
            (found,),
            {"resume": _timed("wake_s", found.resume), "update_weights": _timed("sync_s", found.update_weights)},
        )

    return get_rollout_class


def _watched_sleep(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """verl decorates the call that puts all engines to sleep, as it makes the class."""

    def auto_await(call: Any) -> Any:
        return original(_timed("sleep_s", call) if call.__name__ == "sleep_replicas" else call)

    return auto_await


def _watched_difference(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """verl's own metric is a difference of probabilities."""

    def calculate_debug_metrics(data: Any) -> Any:
        gap = (data.batch["rollout_log_probs"] - data.batch["old_log_probs"]).abs()
        write("logprob_difference", float(gap[data.batch["response_mask"].bool()].mean()))
        return original(data)

    return calculate_debug_metrics


ray_utils.auto_await = _watched_sleep(ray_utils.auto_await)
base.get_rollout_class = _watched_rollout(base.get_rollout_class)
metrics.calculate_debug_metrics = _watched_difference(metrics.calculate_debug_metrics)
