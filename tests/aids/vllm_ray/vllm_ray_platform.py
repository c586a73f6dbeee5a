"""See `vllm_ray`. vLLM imports this module when it asks for the platform."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"
