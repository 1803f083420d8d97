"""GPUDirect Storage: weights and swapped activations move between drives and device memory without host memory.

It avoids copies through RAM and checksums on the CPU, and is used only if a trial shows that it is faster. It has only
been tested with a fake of NVIDIA's library. A trial takes a few seconds in a separate process, and 256 MiB of device
memory. A run needs pinned device memory. `cufile` calls the library, `trials` decides, and `xxh3` hashes on the device.
"""

from hf_lohan.annexes.gpu_direct.trials import open_direct_io, uses_direct_io, why_not
