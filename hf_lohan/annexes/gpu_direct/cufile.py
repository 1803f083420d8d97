"""GPUDirect Storage: reads and writes between files and device memory, without host memory.

`CuFileLibrary` calls NVIDIA's libcufile directly, and `KvikioLibrary` calls it through kvikio. `CuFileBackend` is a
`FileBackend` that uses one of them. Compatibility mode, in which libcufile copies through host memory, is forbidden.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import importlib.util
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hf_lohan.files.data_file import DeviceIoError, DeviceSpan, FileBackend
from hf_lohan.files.directories import SECTOR_BYTES
from hf_lohan.files.errors import NO_ROOM
from hf_lohan.threads import Owner

_LIBRARY = "libcufile.so.0"
_SETTINGS = "CUFILE_ENV_PATH_JSON"
"""Environment variable with the path of libcufile's settings."""
_FORCED = "CUFILE_FORCE_COMPAT_MODE"
_CUDA_ERROR = 5011

ERROR_TEXTS: Mapping[int, str] = {
    5001: "the kernel module nvidia-fs is not loaded",
    5002: "a property is invalid",
    5003: "a property is out of range",
    5004: "nvidia-fs has a different version than libcufile",
    5005: "the version of nvidia-fs cannot be read",
    5006: "the driver is closing",
    5007: "this platform has no GPUDirect Storage",
    5008: "this file's file system or drive has no GPUDirect Storage",
    5009: "this GPU has no GPUDirect Storage",
    5010: "nvidia-fs refused a call",
    5011: "the CUDA driver failed",
    5012: "an address is not device memory",
    5013: "memory has the wrong type",
    5014: "an address range leaves its allocation",
    5015: "the thread has another CUDA context",
    5016: "more memory was to be mapped than can be pinned",
    5017: "an access leaves the mapped memory",
    5018: "this type of file is not supported",
    5019: "the file was opened with flags that are not supported",
    5020: "the file was not opened with O_DIRECT",
    5022: "an argument is invalid",
    5023: "the memory is registered already",
    5024: "the memory is not registered",
    5025: "access to the driver or the file was denied",
    5026: "the driver is open already",
    5027: "the file is not registered",
    5028: "the file is registered already",
    5029: "there is no GPU",
    5030: "libcufile failed internally",
    5031: "no file descriptor is left",
    5033: "the driver could not be set up",
    5034: "GPUDirect Storage is disabled for this file by libcufile's settings",
    5035: "a batch could not be submitted",
    5036: "device memory could not be pinned",
    5037: "the batch is full",
    5038: "streams are not supported",
    5039: "a batch could not be set up",
    5040: "a batch could not be submitted",
    5041: "the status of a batch could not be read",
    5042: "a batch could not be cancelled",
    5043: "libcufile has no memory left",
    5044: "the drive failed",
    5045: "memory could not be registered",
    5046: "libcufile's hash failed",
    5047: "the CUDA context is invalid",
    5048: "nvidia-fs failed internally",
    5049: "compatibility mode is off",
    5050: "libcufile failed",
}
"""Meaning of each error number of libcufile."""


def error_text(call: str, code: int, cuda_code: int = 0) -> str:
    """Return a clause for an error: the call ``call`` of libcufile failed with the number ``code``."""
    text = ERROR_TEXTS.get(code, "the number is not known")
    of_cuda = f", CUDA error {cuda_code}" if code == _CUDA_ERROR else ""
    return f"{call} failed with {code} ({text}{of_cuda})"


class _Status(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("cuda_code", ctypes.c_int)]


class _FileReference(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("pointer", ctypes.c_void_p)]


class FileDescription(ctypes.Structure):
    """libcufile's CUfileDescr_t."""

    _fields_ = [("type", ctypes.c_int), ("file", _FileReference), ("operations", ctypes.c_void_p)]


_OPAQUE_FD = 1
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "cuFileDriverOpen": (_Status, []),
    "cuFileDriverClose_v2": (_Status, []),
    "cuFileHandleRegister": (_Status, [ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(FileDescription)]),
    "cuFileHandleDeregister": (None, [ctypes.c_void_p]),
    "cuFileBufRegister": (_Status, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]),
    "cuFileBufDeregister": (_Status, [ctypes.c_void_p]),
    "cuFileRead": (ctypes.c_ssize_t, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_long] * 2]),
    "cuFileWrite": (ctypes.c_ssize_t, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_long] * 2]),
}
"""The eight functions of libcufile that we call."""


class CuFileLibrary:
    """Calls eight functions of libcufile, which torch's CUDA wheels install. The driver is open until `close`. Calls
    release the GIL, may come from any thread, and raise `DeviceIoError`."""

    def __init__(self, functions: Any = None) -> None:
        """``functions``: an object with libcufile's functions, such as a test double. Raises `DeviceIoError` if the
        library is not found or its driver does not open."""
        self._functions = functions if functions is not None else _load()
        with _settings_without_compatibility():
            self._check("cuFileDriverOpen", self._functions.cuFileDriverOpen())

    def register_file(self, fd: int) -> int:
        """Return a handle for a file that is open with O_DIRECT."""
        handle = ctypes.c_void_p()
        description = FileDescription(_OPAQUE_FD, _FileReference(fd=fd), None)
        status = self._functions.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(description))
        self._check("cuFileHandleRegister", status)
        return handle.value or 0

    def forget_file(self, handle: int) -> None:
        self._functions.cuFileHandleDeregister(handle)

    def register_memory(self, address: int, num_bytes: int) -> None:
        """Pin an allocation for direct transfers. Without this, data are copied once more on the device."""
        self._check("cuFileBufRegister", self._functions.cuFileBufRegister(address, num_bytes, 0))

    def forget_memory(self, address: int) -> None:
        self._check("cuFileBufDeregister", self._functions.cuFileBufDeregister(address))

    def read(self, handle: int, span: DeviceSpan, offset: int) -> int:
        """Read from ``offset`` in the file to ``span``. Returns the number of bytes read, which may be smaller."""
        return self._moved("cuFileRead", handle, span, offset)

    def write(self, handle: int, span: DeviceSpan, offset: int) -> int:
        return self._moved("cuFileWrite", handle, span, offset)

    def close(self) -> None:
        self._check("cuFileDriverClose", self._functions.cuFileDriverClose_v2())

    def _moved(self, call: str, handle: int, span: DeviceSpan, offset: int) -> int:
        ctypes.set_errno(0)
        moved = int(getattr(self._functions, call)(handle, span.base, span.nbytes, offset, span.offset))
        if moved >= 0:
            return moved
        if moved == -1:
            number = ctypes.get_errno() or errno.EIO
            raise DeviceIoError(number, f"{call} failed ({os.strerror(number)})")
        raise DeviceIoError(errno.EIO, error_text(call, -moved))

    def _check(self, call: str, status: Any) -> None:
        if status.code:
            raise DeviceIoError(errno.EIO, error_text(call, abs(status.code), status.cuda_code))


def _load() -> Any:
    """Load libcufile. A torch that was built for CUDA has loaded it already."""
    refused = ""
    for path in (_LIBRARY, *_installed_libraries()):
        try:
            library = ctypes.CDLL(path, use_errno=True)
            for name, (result, arguments) in _PROTOTYPES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            return library
        except (OSError, AttributeError) as error:
            refused = refused or str(error)
    raise DeviceIoError(errno.ENOENT, f"libcufile cannot be loaded ({refused}); install nvidia-cufile")


def _installed_libraries() -> list[str]:
    packages = importlib.util.find_spec("nvidia")
    folders = list(packages.submodule_search_locations or ()) if packages is not None else []
    return sorted(path for folder in folders for path in glob.glob(os.path.join(folder, "*", "lib", _LIBRARY)))


@contextmanager
def _settings_without_compatibility() -> Iterator[None]:
    """In this context, libcufile reads a copy of the user's settings that forbids compatibility mode and allows p2pdma.
    Raises `DeviceIoError` if the user's file cannot be read."""
    path = os.environ.get(_SETTINGS)
    settings: dict[str, Any] = {}
    if path:
        try:
            with open(path, encoding="utf-8") as file:
                # The file may have comment lines, as libcufile's example has.
                lines = [line for line in file if not line.lstrip().startswith("//")]
            settings = json.loads("".join(lines))
        except (OSError, ValueError) as error:
            raise DeviceIoError(errno.EINVAL, f"{_SETTINGS} names {path}, which cannot be read ({error})") from error
    settings.setdefault("properties", {}).update(allow_compat_mode=False, use_pci_p2pdma=True)
    with tempfile.TemporaryDirectory(prefix="lohan-cufile-") as folder:
        settings.setdefault("logging", {}).setdefault("dir", folder)  # the default is the working directory
        changed = os.path.join(folder, "cufile.json")
        with open(changed, "w", encoding="utf-8") as file:
            json.dump(settings, file)
        before = {name: os.environ.pop(name) for name in (_SETTINGS, _FORCED) if name in os.environ}
        os.environ[_SETTINGS] = changed
        try:
            yield
        finally:
            os.environ.pop(_SETTINGS)
            os.environ.update(before)


class KvikioLibrary:
    """Makes the same transfers through kvikio. kvikio waits for the device's default stream on every call, so
    `CuFileLibrary` is preferred. Compatibility mode is refused too."""

    def __init__(self, *, allows_host_copies: bool = False) -> None:
        """``allows_host_copies``: use kvikio's compatibility mode, for tests without a driver."""
        try:
            import kvikio
            import kvikio.defaults
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceIoError(errno.ENOENT, f"kvikio cannot be imported ({error})") from error
        self._kvikio = kvikio
        kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON if allows_host_copies else kvikio.CompatMode.OFF)

    def register_file(self, fd: int) -> Any:
        with _errors_of("kvikio.CuFile"):
            return self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")

    def forget_file(self, handle: Any) -> None:
        handle.close()

    def register_memory(self, address: int, num_bytes: int) -> None:
        with _errors_of("kvikio.memory_register"):
            self._kvikio.memory_register(_CudaArray(address, num_bytes))

    def forget_memory(self, address: int) -> None:
        with _errors_of("kvikio.memory_deregister"):
            self._kvikio.memory_deregister(_CudaArray(address, 1))

    def read(self, handle: Any, span: DeviceSpan, offset: int) -> int:
        with _errors_of("kvikio's raw_read"):
            return int(handle.raw_read(_CudaArray.of(span), size=span.nbytes, file_offset=offset))

    def write(self, handle: Any, span: DeviceSpan, offset: int) -> int:
        with _errors_of("kvikio's raw_write"):
            return int(handle.raw_write(_CudaArray.of(span), size=span.nbytes, file_offset=offset))

    def close(self) -> None:
        """Do nothing, because kvikio closes the driver when the process ends."""


class _CudaArray:
    """Device memory with the interface that kvikio needs."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip

    @classmethod
    def of(cls, span: DeviceSpan) -> _CudaArray:
        return cls(span.base + span.offset, span.nbytes)


@contextmanager
def _errors_of(call: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise DeviceIoError(errno.EIO, f"{call} failed ({error})") from error


def open_direct_library() -> CuFileLibrary | KvikioLibrary:
    """Open libcufile, or kvikio if libcufile is not found. Raises `DeviceIoError`."""
    try:
        return CuFileLibrary()
    except DeviceIoError as error:
        if error.errno != errno.ENOENT or importlib.util.find_spec("kvikio") is None:
            raise
    return KvikioLibrary()


class CuFileBackend(FileBackend):
    """Transfers device memory with libcufile, and host memory with system calls. Transfers of device memory begin and
    end at whole sectors of the file. A file is registered at its first transfer of device memory."""

    def __init__(
        self, library: CuFileLibrary | KvikioLibrary, enter_thread: Callable[[], object] = lambda: None
    ) -> None:
        """``enter_thread`` makes the device current in the calling thread."""
        self._library = library
        self._enter_thread = enter_thread
        self._handles: dict[int, Any] = {}
        self._memory: list[int] = []
        self._lock = threading.Lock()
        self._here = threading.local()
        self._owner = Owner()
        self.direct_read_bytes = 0
        """Bytes read to device memory so far."""
        self.direct_write_bytes = 0
        """Bytes written from device memory so far."""

    def close(self, fd: int) -> None:
        with self._lock:
            handle = self._handles.pop(fd, None)
        if handle is not None:
            self._library.forget_file(handle)
        super().close(fd)

    def read_to_device(self, fd: int, offset: int, span: DeviceSpan) -> int:
        moved_bytes = self._move(self._library.read, fd, offset, span)
        with self._lock:
            self.direct_read_bytes += moved_bytes
        return moved_bytes

    def write_from_device(self, fd: int, offset: int, span: DeviceSpan) -> int:
        moved_bytes = self._move(self._library.write, fd, offset, span)
        with self._lock:
            self.direct_write_bytes += moved_bytes
        return moved_bytes

    def register_memory(self, address: int, num_bytes: int) -> bool:
        """Pin an allocation until `close_library`, because many transfers use it. Returns False if this is refused.
        Then data are copied once more on the device."""
        try:
            self._library.register_memory(address, num_bytes)
        except DeviceIoError:
            return False
        self._memory.append(address)
        return True

    def forget_memory(self) -> None:
        """Unpin all registered memory, before it is freed."""
        while self._memory:
            with suppress(DeviceIoError):  # the driver unpins it when it closes
                self._library.forget_memory(self._memory.pop())

    def close_library(self) -> None:
        """Unpin all memory and close the driver. All files must be closed. Does nothing in a forked process, because
        that must not use libcufile."""
        if not self._owner.is_here:
            return
        assert not self._handles, "a file is open"
        self.forget_memory()
        with suppress(DeviceIoError):  # the driver may stay open without harm until the process ends
            self._library.close()

    def _move(self, call: Callable[[Any, DeviceSpan, int], int], fd: int, offset: int, span: DeviceSpan) -> int:
        assert offset % SECTOR_BYTES == 0 and span.nbytes % SECTOR_BYTES == 0, "device memory moves in whole sectors"
        if not getattr(self._here, "has_entered", False):
            self._enter_thread()
            self._here.has_entered = True
        try:
            moved_bytes = call(self._handle(fd), span, offset)
        except DeviceIoError as error:
            if error.errno in NO_ROOM:
                raise
            # Not EINVAL, which means to the caller that the file system has no O_DIRECT.
            raise DeviceIoError(errno.EIO, error.text) from error
        if not 0 <= moved_bytes <= span.nbytes:
            raise DeviceIoError(errno.EIO, f"libcufile says that it moved {moved_bytes} of {span.nbytes} bytes")
        whole_bytes = moved_bytes - moved_bytes % SECTOR_BYTES
        if moved_bytes and not whole_bytes:
            raise DeviceIoError(errno.EIO, f"libcufile moved {moved_bytes} bytes, which is less than a sector")
        return whole_bytes

    def _handle(self, fd: int) -> Any:
        with self._lock:
            if fd not in self._handles:
                self._handles[fd] = self._library.register_file(fd)
            return self._handles[fd]
