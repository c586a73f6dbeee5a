"""What the demo is made of, without an engine."""

from __future__ import annotations

import io
import subprocess
import sys

import psutil
import torch
from rich.console import Console

from integration.demo_output import Output
from integration.timeline import Timeline, resident_bytes
from integration.trainer_process import OnDisk
from rl_memory_plugins.trainer import PausableMemory


def test_without_a_terminal_a_line_is_written_as_its_step_ends():
    log = io.StringIO()
    with Output(Console(file=log, width=40)) as output:
        output.begin("round 1  sleep level 2")
        assert log.getvalue() == ""
        output.end(
            0.5, {"engine": 2_000_000_000, "trainer": 500_000_000}, "a note that is longer than the console is wide"
        )
        [line] = log.getvalue().splitlines()
    expected = "round 1 sleep level 2 0.50 s engine 2.00 GB trainer 0.50 GB"
    assert " ".join(line.split()) == f"{expected} a note that is longer than the console is wide"


def test_a_stage_that_is_shorter_than_the_sampling_has_samples_of_its_start_and_its_end():
    held = {"engine": 8, "trainer": 1}
    with Timeline({name: lambda name=name: held[name] for name in held}) as timeline, timeline.stage("sleep"):
        held["engine"] = 2
    [stage] = timeline.stages
    assert (stage.name, timeline.samples["engine"][0], timeline.samples["engine"][-1]) == ("sleep", 8, 2)


def test_the_most_memory_together_is_that_of_one_time():
    held = {"engine": 8, "trainer": 1}
    timeline = Timeline({name: lambda name=name: held[name] for name in held})
    timeline.take()
    held |= {"engine": 2, "trainer": 5}
    timeline.take()
    assert (timeline.peak("engine"), timeline.peak("trainer"), timeline.peak_together()) == (8, 5, 9)


def test_what_several_processes_share_counts_once():
    script = "import torch; print(flush=True); input()"  # a new process: libraries are much of its memory
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        process = psutil.Process(child.pid)
        info = process.memory_info()
        twice = resident_bytes([process, process])
        child.kill()
    assert abs(twice - (2 * info.rss - info.shared)) < 0.1 * info.rss
    assert info.shared > 0.1 * twice  # else the above would show little


def test_sleeping_tensors_on_disk_take_no_memory_and_come_back(tmp_path):
    parameters = [torch.nn.Parameter(torch.randn(2000, 3000)), torch.nn.Parameter(torch.randn(7))]
    expected = [parameter.detach().clone() for parameter in parameters]
    away = OnDisk(tmp_path / "weights.bin")
    memory = PausableMemory(dropped=("parameters",), device="cpu")
    memory.adopt(parameters, tag="parameters")
    before = resident_bytes([psutil.Process()])
    away.save(parameters)
    memory.sleep()
    assert before - resident_bytes([psutil.Process()]) > 0.9 * expected[0].nbytes
    memory.wake()
    away.load()
    for parameter, tensor in zip(parameters, expected, strict=True):
        assert torch.equal(parameter, tensor)
