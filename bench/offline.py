"""Compile kernels for a GPU that is not installed.

    with compiling_for("sm_90") as compiled:
        layer_norm(x, weight, bias)  # tensors on the CPU; compiles, launches nothing

Launch wrappers run unchanged, so every kernel is specialised as it will be on the GPU and lands in
Triton's cache under the key that a run there looks up. That key covers Triton's own files (the same
wheel, hence the same Python version), the kernel's source and its line number; the cache also
stores absolute paths, so it must be used in the folder where it was filled (TRITON_CACHE_DIR).
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

# Shared memory that one program may use, by compute capability (CUDA programming guide).
MAX_SHARED_BYTES = {
    80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip
ARCHITECTURES = tuple(f"sm_{capability}" for capability in MAX_SHARED_BYTES)


@dataclass(frozen=True)
class CompiledKernel:
    """One specialisation of a kernel and what it needs; `stack_bytes` above 0 means spills."""

    name: str
    arch: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    cubin: bytes = field(repr=False)


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[list[CompiledKernel]]:
    """Make launches compile for `arch` ("sm_90") and do nothing else.

    Yields:
        the kernels launched so far, each specialisation once, in order of first launch.

    Raises:
        ValueError: `arch` is not one of `ARCHITECTURES`.
        RuntimeError: kernels are interpreted in this process (TRITON_INTERPRET).
        triton.runtime.errors.OutOfResources: (from a launch) more shared memory than `arch` has.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"{arch!r} is none of {', '.join(ARCHITECTURES)}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "compiling_for: unset TRITON_INTERPRET, interpreted kernels do not compile"
        )
    drivers = triton.runtime.driver
    previous = drivers._active
    driver = _OfflineDriver(arch)
    drivers.set_active(driver)
    try:
        yield driver.compiled
    finally:
        drivers.set_active(previous)


class _OfflineDriver:
    """The part of Triton's driver that compiling and launching touch."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.capability = int(arch.removeprefix("sm_"))
        self.compiled: list[CompiledKernel] = []
        self.utils = self  # Triton looks for load_binary and get_device_properties there

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Compiled kernels are remembered by device number: no two architectures may share one.
        return 1000 + self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED_BYTES[self.capability]}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        registers, stack = _resources(cubin)
        kernel = CompiledKernel(name, self.arch, registers, stack, shared, cubin)
        return "module", kernel, registers, stack // 4, 1024

    def launcher_cls(self, source: object, metadata: object) -> "_Recorder":
        return _Recorder()


class _Recorder:
    """Stands for a launch; the kernel's handle is what `load_binary` returned."""

    def __call__(
        self, x: int, y: int, z: int, stream: int, kernel: CompiledKernel, *_: Any
    ) -> None:
        compiled = triton.runtime.driver.active.compiled
        if kernel not in compiled:
            compiled.append(kernel)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and stack bytes, from cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return int(registers), int(stack)
