"""A worker of vLLM that shares GPU 0 with the other ranks; imported by name in their processes."""

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker


class WorkerOnOneGpu(Worker):
    """Exchanges tensors with gloo, through the host; see `vllm_lanes.ONE_GPU_ENVIRONMENT`."""

    def init_device(self) -> None:
        """Join the others on GPU 0."""
        current_platform.dist_backend = "gloo"
        self.local_rank = 0
        super().init_device()
