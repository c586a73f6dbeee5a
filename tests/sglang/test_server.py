"""The server's side in frameworks that start SGLang's processes and serve its app themselves, as verl does."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

SCRIPT = """
    import asyncio, json, os, socket
    import httpx, uvicorn
    import sglang.srt.entrypoints.engine as engines
    from sglang.srt.entrypoints.http_server import Engine, ServerArgs, _GlobalState, app, set_global_state
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
    from sglang.srt.managers.tokenizer_manager import ServerStatus
    from sglang.srt.utils import kill_process_tree
    from tests.sglang.conftest import PROMPT

    OPTIONS = {
        "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
        "grammar_backend": "none", "disable_overlap_schedule": True, "skip_tokenizer_init": True,
        "skip_server_warmup": True, "max_total_tokens": 4096, "log_level": "error",
        "enable_memory_saver": bool(os.environ["RL_MEMORY"]),  # SGLang's own does not start on a CPU
    }

    async def main():
        args = ServerArgs(model_path=FOLDER, **OPTIONS)
        manager, templates, scheduler, *_ = Engine._launch_subprocesses(
            server_args=args,
            init_tokenizer_manager_func=engines.init_tokenizer_manager,
            run_scheduler_process_func=engines.run_scheduler_process,
            run_detokenizer_process_func=engines.run_detokenizer_process,
        )
        set_global_state(_GlobalState(tokenizer_manager=manager, template_manager=templates, scheduler_info=scheduler))
        app.is_single_tokenizer_mode = True
        app.server_args = args
        app.warmup_thread_kwargs = {"server_args": args}
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
            serving = asyncio.create_task(server.serve(sockets=[bound]))
            while not server.started:
                await asyncio.sleep(0.1)
            manager.server_status = ServerStatus.Up
            answers = []
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                async def call(method, path, **body):
                    response = await client.request(method, path, **body)
                    version = response.headers.get("x-weight-version")
                    answers.append([path, response.status_code, response.text, version])

                request = {"json": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}}
                await call("POST", "/generate", **request)
                await call("GET", "/memory")
                if answers[-1][1] == 200:
                    await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]), None)
                    await call("GET", "/memory")
                    await call("POST", "/generate", **request)
                    await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]), None)
                    await call("POST", "/generate", **request)
            server.should_exit = True
            await serving
        print(json.dumps(answers), flush=True)

    try:
        asyncio.run(main())
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_an_app_that_a_framework_serves(forked_python: Callable[..., str], enabled: bool) -> None:
    output = forked_python(SCRIPT, RL_MEMORY="1" if enabled else "")
    first, status, *rest = json.loads(output.splitlines()[-1])
    if not enabled:
        assert (first[1], first[3], status[1]) == (200, None, 404)
        return
    assert (first[1], first[3]) == (200, "default")
    memory, asleep, last = rest
    [engine] = json.loads(memory[2])["engines"]
    states = {name: tag["state"] for rank in engine["ranks"] for name, tag in rank["tags"].items()}
    assert states["kv_cache"] == "discarded" and states["weights"] == "resident"
    assert asleep[1] == 503 and json.loads(asleep[2])["error"]["details"]["reason"] == "asleep"
    assert last[1] == 200
