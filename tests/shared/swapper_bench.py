"""An `ActivationSwapper` with its own scratch file."""

from __future__ import annotations

from pathlib import Path

from eventually import becomes_true

from hf_lohan.activations.swapper import SPILL_BLOCK, SPILL_KIND, ActivationSwapper
from hf_lohan.device import BufferPool, CpuDevice, Device, HostStack
from hf_lohan.files import FileBackend, IoEngine, StorePath
from hf_lohan.store import GRANULE_NUMEL, RecordFiles, RecordSpec, StoreLayout

GRANULE_BYTES = GRANULE_NUMEL  # one element is one byte
NUM_BUFFERS = 3


class SwapperBench:
    """An `ActivationSwapper` with `ram_bytes` of RAM and `ssd_granules` of SSD. It has `num_buffers` staging buffers of
    two granules each."""

    def __init__(
        self,
        folder: Path,
        *,
        ram_bytes: int = 0,
        ssd_granules: int = 0,
        backend: FileBackend | None = None,
        device: Device | None = None,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self.device = device or CpuDevice()
        ram = HostStack(self.device)
        ram.reallocate(ram_bytes)
        self.swapper = ActivationSwapper(self.device, ram)
        self.io = IoEngine(2, GRANULE_BYTES, 1 << 20, backend)
        self.staging: BufferPool | None = None
        self._files: RecordFiles | None = None
        if ssd_granules:
            record = RecordSpec(SPILL_BLOCK, SPILL_KIND, "uint8", ssd_granules * GRANULE_BYTES)
            layout = StoreLayout((record,), (StorePath(str(folder), 1 << 30),))
            self._files = RecordFiles.create_files(layout, [str(folder)], "activations.bin", self.io)
            self.staging = BufferPool(
                self.device, name="staging", num_buffers=num_buffers, buffer_bytes=2 * GRANULE_BYTES
            )
            self.swapper.use_ssd(self._files, self.staging, record.numel)

    def settle(self) -> None:
        """Wait until no transfer is running."""
        self.swapper.wait_until_idle()
        if self._files is not None:
            self._files.wait_until_idle()

    @property
    def ram_in_use(self) -> int:
        return self.swapper._ram.bytes_in_use

    @property
    def ssd_in_use(self) -> int:
        spill = self.swapper._spill
        return 0 if spill is None else spill.intervals.in_use

    def is_empty(self) -> bool:
        """Wait for all transfers and return whether all memory and all buffers are free."""
        self.settle()
        return becomes_true(self._is_empty)

    def _is_empty(self) -> bool:
        buffers_are_back = self.staging is None or self.staging.num_free == self.staging.num_buffers
        return buffers_are_back and self.ram_in_use == self.ssd_in_use == 0

    def close(self) -> None:
        self.swapper.close()
        if self._files is not None:
            self._files.close()
        self.io.close()
