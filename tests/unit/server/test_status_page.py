"""The files of the status page: who gets them, with which headers, and what they hold."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from fake_control import FakeControl
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient

from rl_memory_plugins import admission, errors
from rl_memory_plugins.server import status_page
from rl_memory_plugins.server.attach import attach
from rl_memory_plugins.server.status_page import PAGE
from rl_memory_plugins.tags import Content, TagState

REPOSITORY = Path(__file__).parents[3]
FOLDER = Path(status_page.__file__).parent
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in status_page.MEDIA_TYPES)
ADDRESSES = [PAGE, *(f"{PAGE}/{name}" for name in FILES if name != "index.html")]
NEVER_SENT = {"EngineAsleepError", "AuthenticationError", "PermissionDeniedError", "NoAnswerError", "EngineLostError"}
"""Errors that no transition ends with."""


def local_client(app: FastAPI, host: str = "127.0.0.1") -> TestClient:
    return TestClient(app, "http://localhost", client=(host, 1234))


def text(name: str) -> str:
    return (FOLDER / name).read_text()


@pytest.fixture
def guarded(control: FakeControl) -> TestClient:
    """A server with a key, of which the engine itself asks every caller."""
    app = FastAPI()
    attach(app, lambda: control, control.status_now, keys=["secret"], generation=())

    @app.middleware("http")
    async def engines_own(request: Any, call_next: Any) -> Any:
        has_key = request.headers.get("authorization") == "Bearer secret"
        return await call_next(request) if has_key else Response("Unauthorized", 401)

    return local_client(app, "192.0.2.9")


@pytest.mark.parametrize("address", ADDRESSES)
def test_each_file_comes_with_strict_headers(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 200 and answer.content
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
    assert policy.pop("frame-ancestors") == policy.pop("trusted-types") == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy == dict.fromkeys(["script-src", "style-src", "img-src", "connect-src"], "'self'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["content-type"].partition(";")[0] == status_page.MEDIA_TYPES[Path(address).suffix or ".html"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_the_page_needs_no_key_and_comes_before_the_engines_own_check(guarded: TestClient, address: str) -> None:
    assert guarded.get(address).status_code == 200


@pytest.mark.parametrize("route", ["memory", "timeline", "installation"])
def test_its_data_need_the_key(guarded: TestClient, route: str) -> None:
    assert guarded.get(f"/v1/rl_memory/{route}").status_code == 401
    key = {"authorization": "Bearer secret"}
    assert guarded.get(f"/v1/rl_memory/{route}", headers=key).status_code == 200


def test_without_a_key_its_data_are_for_clients_on_this_machine(app: FastAPI) -> None:
    far = local_client(app, "192.0.2.9")
    assert far.get(PAGE).status_code == 200
    assert far.get("/v1/rl_memory/memory").status_code == 403


def test_only_reads_are_answered(guarded: TestClient) -> None:
    head = guarded.head(PAGE)
    assert head.status_code == 200 and int(head.headers["content-length"]) > 0
    for method in ("POST", "PUT", "DELETE"):
        assert guarded.request(method, PAGE).status_code == 401  # the engine's
    assert guarded.get(f"{PAGE}/__init__.py").status_code == 401
    assert guarded.get(f"{PAGE}/../memory").status_code == 401


def test_a_browser_gets_a_file_once(client: TestClient) -> None:
    first = client.get(PAGE)
    again = client.get(PAGE, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get(PAGE, headers={"if-none-match": '"other"'}).status_code == 200


def test_a_slash_at_the_end_leads_to_the_page(client: TestClient) -> None:
    assert client.get(f"{PAGE}/", follow_redirects=False).headers["location"] == "../ui"
    assert client.get(f"{PAGE}/").text == text("index.html")


def test_an_app_below_a_root_path_has_it_too(control: FakeControl) -> None:
    app = FastAPI(root_path="/engine")
    attach(app, lambda: control, control.status_now, keys=(), generation=())
    client = local_client(app)
    assert client.get(PAGE).status_code == client.get(f"/engine{PAGE}").status_code == 200


def test_the_files_name_each_other_and_nothing_elsewhere() -> None:
    for name in FILES:
        content = text(name).replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$|\s// .*$", "", content, flags=re.MULTILINE), f"{name} has an address"
    linked = {match.removeprefix("ui/") for match in re.findall(r'(?:href|src)="([^"]+)"', text("index.html"))}
    imported = {found for name in FILES for found in re.findall(r'from "\./([\w.]+)"', text(name))}
    assert linked | imported | {"index.html"} == set(FILES)


def test_nothing_makes_markup_of_a_text_or_keeps_the_key() -> None:
    page = text("index.html")
    assert not re.search(r"<style|<script(?![^>]*src=)| on\w+=| style=", page)
    assert " name=" not in page.replace('<meta name="', "")  # a form without the script puts nothing into an address
    for name in FILES:
        unsafe = (
            r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|Function\(|Storage|cookie|indexedDB"
        )
        assert not re.search(unsafe, text(name)), name


def keys_of(constant: str) -> list[str]:
    """The keys of an object in `words.js`."""
    body = re.search(rf"export const {constant} = {{\n(.*?)^}};", text("words.js"), re.MULTILINE | re.DOTALL)
    assert body is not None
    return re.findall(r"^  (\w+):", body[1], re.MULTILINE)


def test_each_state_and_error_has_its_words() -> None:
    assert set(keys_of("REASONS")) == {*admission.REASONS, "starting"}
    assert keys_of("CONTENTS") == list(Content)
    assert keys_of("TAG_STATES") == list(TagState)
    names = {name for name in vars(errors) if name.endswith("Error")} - NEVER_SENT
    assert set(keys_of("REMEDIES")) == names


def luminance(colour: str) -> float:
    """Of `#rrggbb`, as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_have_enough_contrast(scheme: int) -> None:
    block = re.findall(r":root {(.*?)}", text("page.css"), re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", block))
    for ground in ("ground", "surface"):
        for name in colours.keys() - {"ground", "surface", "line"}:
            light, dark = sorted((luminance(colours[ground]), luminance(colours[name])), reverse=True)
            areas = name in ("weights", "kv-cache", "cuda-graph")  # which are no text
            assert (light + 0.05) / (dark + 0.05) >= (3 if areas else 4.5), f"{name} on {ground}"


def test_a_wheel_holds_the_files(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="pip install hatchling: it builds the wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    packed = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "/status_page/" in name}
    assert packed == {*FILES, "__init__.py"}
