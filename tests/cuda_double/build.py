"""Build the CUDA double for this interpreter's torch and install it in place of the CUDA libraries.

    python tests/cuda_double/build.py [--cuda-include FOLDER]

Use a separate environment, because the double's libraries take the place of NVIDIA's. runtime/ becomes libcudart.so.13
and libcuda.so.1. The other libraries that torch links become stubs whose functions return success. kernels/ becomes an
extension. torch loads cuda_double.py through an entry point.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = Path(sysconfig.get_paths()["purelib"])
TORCH = PACKAGES / "torch"
CUDA = PACKAGES / "nvidia" / "cu13"

RUNTIME, DRIVER, MONITOR = "libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"
SOURCES = {
    RUNTIME: sorted(set((HERE / "runtime").glob("*.cpp")) - {HERE / "runtime" / "driver.cpp"}),
    DRIVER: [HERE / "runtime" / "driver.cpp"],
}
KERNELS = sorted((HERE / "kernels").glob("*.cpp"))

UNVERSIONED = {
    "libnccl.so.2": r"nccl",
    "libcufile.so.0": r"cuFile",
    "libcusparseLt.so.0": r"cusparseLt",
    "libcurand.so.10": r"curand",
    "libnvshmem_host.so.3": r"nvshmem",
    DRIVER: r"cu(?!File)[A-Z]",
}
"""Libraries whose symbols have no version, with the beginnings of their symbols' names."""

ANSWERS = {
    "cublasCreate_v2": "*(void**)a = (void*)0x1000; return 0;",
    "cublasLtGetVersion": "return 130000;",
    "cudnnCreate": "*(void**)a = (void*)0x1000; return 0;",
    "cudnnGetCudartVersion": "return 13000;",
    "cudnnGetErrorString": 'return (long)"stub";',
    "cudnnGetVersion": "return 92400;",
    "cuptiActivityEnable": "return 1;",
    "cuptiGetResultString": '*(const char**)b = "stub"; return 0;',
    "cuptiSubscribe": "return 1;",
    "cusparseCreate": "*(void**)a = (void*)0x1000; return 0;",
    "cusparseGetErrorString": 'return (long)"stub";',
    "ncclGetErrorString": 'return (long)"stub";',
    "ncclGetLastError": 'return (long)"stub";',
    "ncclGetVersion": "*(int*)a = 23007; return 0;",
    "nvmlDeviceGetComputeRunningProcesses": "*(unsigned*)b = 0; return 0;",
    "nvmlDeviceGetGpuFabricInfoV": "return 0;",  # the state stays "none"
    "nvmlDeviceGetHandleByPciBusId_v2": "*(void**)b = (void*)0x1000; return 0;",
    "nvmlDeviceGetNvLinkRemoteDeviceType": "return 3;",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": "return 3;",
    "nvmlInit_v2": "return 0;",
    "nvmlSystemGetCudaDriverVersion_v2": "*(int*)a = 13000; return 0;",
    "nvrtcGetErrorString": 'return (long)"stub";',
}
"""Bodies of stubs that do more than return success."""

Symbol = tuple[str, str]
"""Name and version, which may be ""."""


def run(*command: object) -> str:
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def symbols_by_library() -> dict[str, set[Symbol]]:
    """Return the symbols that torch uses of each NVIDIA library that it links."""
    symbols: dict[str, set[Symbol]] = defaultdict(set)
    paths = sorted((TORCH / "lib").glob("*.so"))
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda path: run("readelf", "-dW", "--dyn-syms", path), paths))
    for output in outputs:
        linked = re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", output)
        symbols.update((library, symbols[library]) for library in linked)
        for name, version in re.findall(r" UND (\w+)(?:@(\S+))?", output):
            for library in linked:
                prefix = UNVERSIONED.get(library)
                if version == library or (version == "NVSHMEM" and library.startswith("libnvshmem")):
                    symbols[library].add((name, version))
                elif not version and prefix and re.match(prefix, name):
                    symbols[library].add((name, ""))
    symbols[MONITOR] = {(name, "") for name in ANSWERS if name.startswith("nvml")}  # torch opens it at run time
    return symbols


def written_functions(sources: Iterable[Path]) -> set[str]:
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    return set(re.findall(r"\b(__cuda\w+|cuda\w+|cu[A-Z]\w+)\(", text))


def write_stubs(path: Path, names: Iterable[str]) -> Path:
    functions = (
        f"long {name}(void* a, void* b, void* c, void* d) {{ {ANSWERS.get(name, 'return 0;')} }}"
        for name in sorted(names)
    )
    path.write_text("\n".join(['extern "C" {', *functions, "}"]), encoding="utf-8")
    return path


def write_versions(path: Path, symbols: Iterable[Symbol]) -> list[str]:
    """Write a version script, and return the linker's arguments for it."""
    versions = sorted({version for _, version in symbols} - {""})
    path.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions), encoding="utf-8")
    return [f"-Wl,--version-script={path}"] if versions else []


def build_library(library: str, symbols: set[Symbol], folder: Path, include: Path) -> str:
    """Build one of NVIDIA's libraries from the sources here, if any, and stubs for the rest."""
    sources = SOURCES.get(library, [])
    missing = {name for name, _ in symbols} - written_functions(sources)
    others = [CUDA / "lib" / RUNTIME] if library == DRIVER else []
    run(
        *("g++", "-std=c++17", "-O2", "-g", "-shared", "-fPIC", "-w", "-o", CUDA / "lib" / library),
        *(*sources, write_stubs(folder / f"{library}.cpp", missing), f"-I{include}", *others),
        *(f"-Wl,-soname,{library}", "-Wl,-rpath,$ORIGIN", "-lpthread", "-ldl"),
        *write_versions(folder / f"{library}.map", symbols),
    )
    return f"{library}: {len(symbols)} functions, {len(missing)} of them stubs"


def compile_kernels(source: Path, folder: Path, include: Path) -> Path:
    compiled = folder / f"{source.stem}.o"
    torch_include = TORCH / "include"
    run(
        *("g++", "-std=c++20", "-O1", "-fPIC", "-w", "-c", "-o", compiled, source, f"-I{include}"),
        *(f"-I{torch_include}", f"-I{torch_include / 'torch/csrc/api/include'}"),
    )
    return compiled


def link_kernels(compiled: Iterable[Path]) -> None:
    run(
        *("g++", "-shared", "-o", PACKAGES / "cuda_double_kernels.so", *compiled, f"-L{TORCH / 'lib'}"),
        *(f"-L{CUDA / 'lib'}", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda", f"-l:{RUNTIME}"),
    )


def install_module() -> None:
    shutil.copy(HERE / "cuda_double.py", PACKAGES)
    information = PACKAGES / "cuda_double-1.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda_double\nVersion: 1\n", encoding="utf-8")
    entry_points = "[torch.backends]\ncuda_double = cuda_double:autoload\n"
    (information / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-include", type=Path, default=CUDA / "include", help="headers of CUDA 13.0")
    include = parser.parse_args().cuda_include
    (CUDA / "lib").mkdir(parents=True, exist_ok=True)
    symbols = symbols_by_library()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        kernels = [pool.submit(compile_kernels, source, folder, include) for source in KERNELS]
        print(build_library(RUNTIME, symbols[RUNTIME], folder, include))  # first, because others link it
        rest = [
            pool.submit(build_library, library, symbols[library], folder, include)
            for library in sorted(symbols)
            if library != RUNTIME
        ]
        for library in rest:
            print(library.result())
        link_kernels([kernel.result() for kernel in kernels])
    install_module()
    print(f"CUDA double: built for the torch in {TORCH}")


if __name__ == "__main__":
    main()
