"""A vLLM platform: the CPU, whose workers vLLM's Ray executor places on the GPUs that Ray counts.

vLLM's platform for CPUs names no resource of Ray's, and the executor refuses it. Ray takes the number of GPUs from its
user, and the workers compute on the CPU.
"""


def register() -> str:
    return "vllm_ray_platform.RayCpuPlatform"
