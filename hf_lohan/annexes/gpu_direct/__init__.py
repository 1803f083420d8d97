"""GPUDirect Storage: weights and swapped activations go between drives and device memory past host memory.

It saves the copies through RAM and the CPU's checksums, if a trial shows that it is faster here. It has only run on a
double of NVIDIA's library. It costs a trial of some seconds in a process of its own, 256 MiB of device memory
meanwhile, and pinned device memory. `cufile` calls the library, `trials` decides, and `xxh3` hashes on the device.
"""

from hf_lohan.annexes.gpu_direct.trials import open_direct_io, uses_direct_io, why_not
