"""`rl-memory plan`."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from plan_models import configured, written
from rich.console import Console
from typer.testing import CliRunner

from rl_memory_plugins import cli
from rl_memory_plugins.plan import Options, plan
from rl_memory_plugins.plan.command import DOES_NOT_FIT
from rl_memory_plugins.plan.options import NAMES
from rl_memory_plugins.plan.show import BAR, bar, show

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "plan.md").read_text()


@pytest.fixture
def folder(tmp_path):
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 16}
    return written(tmp_path / "model", configured("llama", **sizes, vocab_size=32000, head_dim=128))


def run(*words):
    return CliRunner().invoke(cli.app, ["plan", *map(str, words)], env={"COLUMNS": "80", "TERM": "dumb"})


def test_a_plan_that_fits_is_shown_and_its_exit_code_is_0(folder):
    done = run(folder, "--gpu", "h100-80", "--tp", 2, "--trainer", "fsdp2", "--optimizer", "adamw")
    assert done.exit_code == 0
    assert "It fits: " in done.stdout
    for word in ("rollout", "wake_kv_cache", "KV cache", "gradients", "on the host", "2 x h100-80"):
        assert word in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if line.startswith(("│", "┃")))


def test_it_says_what_is_in_use_if_the_engine_opens_beside_the_trainer(folder):
    words = (folder, "--gpu", "h100-80", "--kv-gib", 1)
    found = json.loads(run(*words, "--json").stdout)["beside"]
    assert f"opens before the trainer has left: {found / (1 << 30):.1f} GiB are then in use" in run(*words).stdout
    assert "before the trainer has left" not in run(*words, "--from-host").stdout


def test_a_plan_that_does_not_fit_says_what_to_change_and_has_its_own_exit_code(folder):
    done = run(folder, "--gpu", "rtx4090-24")
    assert done.exit_code == DOES_NOT_FIT == 3
    assert "It does not fit: training lacks" in done.stdout
    assert "--gpus 2: fits (more GPUs)" in done.stdout


def test_an_advice_is_words_for_the_command(folder):
    done = run(folder, "--fraction", 1.0)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("  --")]
    words, _, outcome = line.strip().partition(": ")
    assert outcome == "fits (a smaller KV cache)"
    assert run(folder, *words.split()).exit_code == 0


def test_json_is_the_whole_plan(folder):
    done = run(folder, "--sglang", "--fraction", 0.5, "--no-checkpointing", "--json")
    found = json.loads(done.stdout)
    expected = plan(folder, engine="sglang", fraction=0.5, checkpointing=False)
    assert found == json.loads(json.dumps(expected.to_record()))
    assert found["options"]["engine"] == "sglang" and found["fits"] is True


def test_every_option_of_a_plan_is_one_of_the_command(folder):
    words = shlex.split(
        "--gpu a100-80 --tp 2 --gpus 4 --fraction 0.5 --kv-gib 1.5 --max-running 8 --dtype float16 --kv-dtype fp8 "
        "--level 1 --trainer megatron --optimizer sgd --precision bf16 --micro-tokens 512 --offload optimizer "
        "--bucket-mib 64 --host-gib 512"
    )
    flags = ["--sglang", "--from-host", "--share-host-backups", "--no-checkpointing"]
    options = json.loads(run(folder, *words, *flags, "--json").stdout)["options"]
    default = Options()
    assert all(options[name] != getattr(default, name) for name in NAMES)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_is_drawn(folder, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plan{suffix}"
    assert run(folder, "--picture", file).exit_code == 0
    assert file.stat().st_size > 1000


def test_without_matplotlib_the_error_names_the_extra(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(folder, "--picture", tmp_path / "plan.png")
    assert done.exit_code == 1
    assert "rl_memory_plugins[picture]" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "InvalidRequestError: there is no nowhere"),
        (["MODEL", "--gpu", "h1000"], "InvalidRequestError: unknown GPU 'h1000': name one of h100-80, "),
        (["MODEL", "--tp", "3"], "cannot be cut into 3 parts"),
        (["MODEL", "--fraction", "1.5"], "fraction is 1.5, and must be above 0 and at most 1"),
        (["MODEL", "--optimizer", "lion"], "optimizer is 'lion', and must be adamw, "),
        (["MODEL", "--picture", "plan.txt"], "ends in .png, .svg or .pdf"),
    ],
)
def test_a_bad_request_is_a_message_and_exit_code_1(folder, words, message):
    done = run(*[folder if word == "MODEL" else word for word in words])
    assert done.exit_code == 1
    assert message in done.stderr and not done.stdout
    assert "Traceback" not in done.stderr


def test_a_picture_that_cannot_be_written_is_a_typed_error(folder, tmp_path):
    pytest.importorskip("matplotlib")
    done = run(folder, "--picture", tmp_path / "nowhere" / "plan.png")
    assert done.exit_code == 1
    assert "InvalidRequestError: cannot write" in done.stderr


def test_with_json_an_error_is_its_record(folder):
    done = run(folder, "--level", 3, "--json")
    record = json.loads(done.stderr)
    assert (record["error"], record["details"]["field"]) == ("InvalidRequestError", "level")
    assert (done.exit_code, done.stdout) == (1, "")


def test_a_number_that_is_none_is_bad_usage(folder):
    assert run(folder, "--tp", "two").exit_code == 2


def test_a_terminal_without_unicode_shows_ascii(folder):
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(plan(folder), Console(file=raw, width=80))
    raw.flush()
    assert "# engine" in raw.buffer.getvalue().decode("ascii")


def test_a_bar_is_as_long_as_the_gpu_and_marks_what_lacks(folder):
    fits, lacks = plan(folder), plan(folder, gpu=8)
    assert {len(bar(phase)) for phase in fits.phases} == {BAR}
    assert (
        bar(lacks.phase("training"))
        == "█" * bar(lacks.phase("training")).count("█") + "▒" * (BAR - bar(lacks.phase("training")).count("█")) + "!"
    )


def test_a_plan_imports_no_torch_and_no_engine(folder):
    script = (
        "import sys, rl_memory_plugins.plan as p, rl_memory_plugins.plan.command\n"
        f"p.plan({str(folder)!r})\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "vllm", "sglang", "numpy", "matplotlib", "pynvml", "cuda"}
    assert heavy.isdisjoint(done.stdout.split())


# -- the page ---------------------------------------------------------------------------------------


def test_the_page_has_every_option_with_its_default():
    command = typer.main.get_command(cli.app).commands["plan"]
    rows = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| `--")]
    listed = {name.strip(" `"): default.strip(" `") for names, default in rows for name in names.split(",")}
    flags = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts) if flag.startswith("--")}
    assert listed.keys() == flags - {"--help"}
    for one in command.params:
        shown = listed.get(one.opts[0])
        if one.opts[0].startswith("--") and one.default and not isinstance(one.default, bool):
            assert shown == str(one.default), one.opts


def test_the_page_names_every_choice():
    from rl_memory_plugins.plan.architectures import KNOWN
    from rl_memory_plugins.plan.gpus import GPUS
    from rl_memory_plugins.plan.options import CHOICES
    from rl_memory_plugins.plan.quantisation import METHODS

    choices = {choice for name, allowed in CHOICES.items() if name != "engine" for choice in allowed}
    for word in choices | {*GPUS, *KNOWN, *METHODS}:
        assert f"`{word}`" in PAGE, word
