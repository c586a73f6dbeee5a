"""The server's side in frameworks that make vLLM's app and engine themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

# The order of SkyRL: the arguments come from elsewhere, the app is built, and then the engine is made.
SCRIPT = """
    import asyncio, base64, json, pickle, socket, sys
    from pathlib import Path
    import httpx, uvicorn
    from tests.vllm.conftest import PROMPT, engine_options

    OPTIONS, KEY = json.loads(sys.argv[1]), "a key"

    async def main():
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        args = pickle.loads(base64.b64decode(sys.argv[2]))
        app = build_app(args, ("generate",))
        from vllm import AsyncEngineArgs, AsyncLLMEngine

        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**engine_options(Path(FOLDER)), **OPTIONS))
        await init_app_state(engine, app.state, args, ("generate",))
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
            serving = asyncio.create_task(server.serve(sockets=[bound]))
            while not server.started:
                await asyncio.sleep(0.1)
            answers = []
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                async def call(method, path, key=KEY, **body):
                    headers = {"Authorization": f"Bearer {key}"}
                    response = await client.request(method, path, headers=headers, **body)
                    version = response.headers.get("x-weight-version")
                    answers.append([path, response.status_code, response.text, version])

                completion = {"json": {"model": FOLDER, "prompt": PROMPT, "max_tokens": 2}}
                await call("POST", "/v1/completions", **completion)
                await call("GET", "/memory")
                if answers[-1][1] == 200:
                    await call("POST", "/sleep?tags=kv_cache")
                    await call("GET", "/memory")
                    await call("POST", "/v1/completions", **completion)
                    await call("POST", "/v1/completions", key="another", **completion)
                    await call("POST", "/wake_up")
                    await call("POST", "/v1/completions", **completion)
            server.should_exit = True
            await serving
        engine.shutdown()
        print(json.dumps(answers))

    if __name__ == "__main__":
        asyncio.run(main())
"""


@pytest.fixture(scope="module")
def parsed(forked_python: Callable[..., str]) -> str:
    """The arguments of a server, parsed by a process without plugins."""
    script = """
        import base64, pickle
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", FOLDER, "--api-key", "a key"])
        print(base64.b64encode(pickle.dumps(args)).decode())
    """
    return forked_python(script, VLLM_PLUGINS="none").splitlines()[-1]


@pytest.mark.parametrize("by", ["variable", "argument", "nothing"])
def test_an_app_that_is_built_before_its_engine(forked_python: Callable[..., str], parsed: str, by: str) -> None:
    """Without the routes `/sleep?tags=kv_cache` sleeps everything, and refusals are answers of 500."""
    options: dict[str, Any] = {"additional_config": {"rl_memory": {}}} if by == "argument" else {}
    variable = "1" if by == "variable" else ""
    output = forked_python(SCRIPT, json.dumps(options), parsed, RL_MEMORY=variable, VLLM_SERVER_DEV_MODE="1")
    first, status, *rest = json.loads(output.splitlines()[-1])
    if by == "nothing":
        assert (first[1], first[3], status[1]) == (200, None, 404)
        return
    assert (first[1], first[3]) == (200, "default")
    sleep, memory, asleep, stranger, wake, last = rest
    assert sleep[1] == 200, sleep
    [engine] = json.loads(memory[2])["engines"]
    states = {name: tag["state"] for rank in engine["ranks"] for name, tag in rank["tags"].items()}
    assert states["kv_cache"] == "discarded" and states["weights"] == "resident"
    assert asleep[1] == 503 and json.loads(asleep[2])["error"]["details"]["reason"] == "asleep"
    assert stranger[1] == 401  # vLLM checks its key before the gate
    assert (wake[1], last[1]) == (200, 200)
