"""What a process holds on the GPU beside the regions, against the driver's own account of the process."""

from __future__ import annotations

import json

from processes import run

MiB = 1 << 20


def test_every_byte_beside_the_regions_has_a_cause():
    output = run(
        """
        import json, torch
        from rl_memory_plugins.memory import residual
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
        from rl_memory_plugins.tags import Tag
        vmm = CudaVmmAllocator(0)
        with residual.attributed("nccl"):
            pass
        before = vmm.residual_memory()
        with vmm.region(Tag.KV_CACHE):
            cache = torch.empty(512 << 20, dtype=torch.uint8, device="cuda:0")
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda:0")
        graph, static = torch.cuda.CUDAGraph(), torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
        with torch.cuda.graph(graph):
            result = static + 1
        torch.cuda.empty_cache()
        awake = vmm.residual_memory(), residual.process_bytes(0)
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        vmm.release(Tag.KV_CACHE)
        caching = vmm.residual_memory()
        torch.cuda.empty_cache()
        asleep = vmm.residual_memory(), residual.process_bytes(0)
        vmm.reserve(Tag.KV_CACHE).commit()
        print(json.dumps([before, awake, caching, asleep]))
        """
    )
    before, awake, caching, asleep = json.loads(output)
    causes, used = asleep
    print(causes, used)
    grown = {name: causes[name] - before.get(name, 0) for name in ("workspace", "graphs")}
    assert 320 * MiB <= grown["workspace"] <= 400 * MiB
    assert 64 * MiB <= grown["graphs"] <= 128 * MiB
    # The region is none of it, resident or not, nor is what torch keeps for later.
    assert awake[0]["workspace"] == caching["workspace"] == causes["workspace"]
    if used is None:  # NVML does not tell processes apart here: no number is made up
        assert set(causes) == {"workspace", "graphs"}
    else:
        assert causes["context"] > 64 * MiB
        assert abs(sum(causes.values()) - used) < 64 * MiB
        assert abs(sum(caching.values()) - used) < 64 * MiB
        assert abs(awake[1] - used - 512 * MiB) < 4 * MiB


def test_what_another_process_holds_is_not_ours():
    output = run(
        """
        import json, subprocess, sys, torch
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
        vmm = CudaVmmAllocator(0)
        workspace = torch.zeros(1, device="cuda:0")
        alone = vmm.residual_memory()
        code = (
            "import sys, torch; held = torch.zeros(4 << 30, dtype=torch.uint8, device='cuda:0');"
            "print(1, flush=True); sys.stdin.read()"
        )
        other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        other.stdout.readline()
        together = vmm.residual_memory()
        other.kill()
        other.wait()
        print(json.dumps([alone, together]))
        """
    )
    alone, together = json.loads(output)
    print(alone, together)
    assert together["workspace"] == alone["workspace"]
    assert together.get("other", 0) <= alone.get("other", 0) + 64 * MiB
