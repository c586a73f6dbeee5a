"""Which layers this package's reload takes from vLLM's own."""

from __future__ import annotations

import types
from typing import Any

import pytest

from rl_memory_plugins.engines.vllm.reload import _is_for_this_package


def watched(*devices: str, holds: bool = False, deferred: bool = False, loadable: bool = True) -> Any:
    parameters = [types.SimpleNamespace(device=one, is_meta=one == "meta") for one in devices]
    layer, other = object(), object()
    templates = {
        layer: types.SimpleNamespace(is_deferred=deferred, is_loadable=lambda: False),  # transformed
        other: types.SimpleNamespace(is_deferred=False, is_loadable=lambda: loadable),
    }
    model = types.SimpleNamespace(
        parameters=lambda: parameters, named_modules=lambda: [("layer", layer), ("other", other)]
    )
    return types.SimpleNamespace(model=model, templates=templates, reload_holds_layers=holds)


@pytest.mark.parametrize(
    ("watch", "taken"),
    [
        (watched("cuda:0", "cuda:0", "meta"), True),
        (watched("cuda:0", "cpu"), False),  # some parameters are offloaded
        (watched("cuda:0", holds=True), False),
        (watched("cuda:0", deferred=True), False),
        (watched("cuda:0", loadable=False), False),
    ],
)
def test_which_layers_it_takes(watch: Any, taken: bool) -> None:
    assert _is_for_this_package(watch, ["layer"]) is taken
