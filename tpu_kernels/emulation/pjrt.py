"""An XLA:CPU plugin completed so that torch_tpu accepts it in libtpu's place.

torch_tpu drives its device through the PJRT C API, a table of functions that the plugin hands out. Two things
keep a CPU plugin from standing in for libtpu: torch_tpu asks for an extension that only TPU plugins have, and
creates its client with options that only they know. `adapt` mends both in the plugin's own table, in memory;
the file is not touched.

The layouts are those of `xla/pjrt/c/pjrt_c_api.h` and `pjrt_c_api_tpu_topology_extension.h`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from pathlib import Path

from ..errors import EmulationError

# Older plugins lack calls that torch_tpu makes (output memory kinds, for one) and fail late and obscurely.
_OLDEST_API = (0, 115)

_TPU_TOPOLOGY_TYPE = 16
_INT64_TYPE = 1

# Machine code and no Python callbacks: the calls arrive on worker threads, for which the main thread may be
# waiting with the interpreter lock held. The argument structs of all these calls have the result at byte 16.
_RETURN_ONE = bytes.fromhex("c7 47 10 01 00 00 00  31 c0  c3")  # mov dword [rdi+16], 1; xor eax, eax; ret
_RETURN_FALSE = bytes.fromhex("c6 47 10 00  31 c0  c3")  # mov byte [rdi+16], 0; xor eax, eax; ret


class _Api(ctypes.Structure):
    """The head of `PJRT_Api`, as far as it is read or changed here."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extensions", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("errors_plugin_events", ctypes.c_void_p * 10),
        ("client_create", ctypes.c_void_p),
    ]


class _TpuTopology(ctypes.Structure):
    """`PJRT_TpuTopology_Extension`: one process with one chip that has one core and is one device."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("subslice", ctypes.c_void_p),
        ("is_subslice_topology", ctypes.c_void_p),
        ("subslice_device_id_from_full_device_id", ctypes.c_void_p),
        ("replace_host_bounds", ctypes.c_void_p),
        ("is_enhanced_barrier_enabled", ctypes.c_void_p),
        ("has_limited_ici_connectivity", ctypes.c_void_p),
        ("is_reachable_over_limited_ici", ctypes.c_void_p),
        # The nine counts, of processes, chips, cores and devices, in all and each per each.
        ("counts", ctypes.c_void_p * 9),
        # Ids, coordinates, bounds and slices: of use to several processes only, which are not emulated.
        ("unused", ctypes.c_void_p * 15),
    ]


class _NamedValue(ctypes.Structure):
    """`PJRT_NamedValue` holding an integer."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_int64),
        ("value_size", ctypes.c_size_t),
    ]


# What the plugin's table points to must live as long as the process.
_alive: list[object] = []


def adapt(plugin: Path) -> None:
    """Loads `plugin` and completes its PJRT table, for everyone who loads the same file in this process.

    Example:
        >>> adapt(Path("pjrt_c_api_cpu_plugin.so"))  # doctest: +SKIP
    """
    try:
        library = ctypes.CDLL(str(plugin), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        get_api = library.GetPjrtApi
    except (OSError, AttributeError) as error:
        raise EmulationError(f"{plugin} is not a PJRT plugin: {error}") from error
    get_api.restype = ctypes.c_void_p
    api = _Api.from_address(get_api())
    if (api.major, api.minor) < _OLDEST_API:
        raise EmulationError(
            f"{plugin} has version {api.major}.{api.minor} of the PJRT API; torch_tpu needs "
            f"{_OLDEST_API[0]}.{_OLDEST_API[1]} or newer. Leave `plugin` out to use the one that "
            "pip install 'tpu-kernels[emulation]' brings."
        )
    # The plugin takes as many devices as there are cores unless told; torch_tpu expects one a process.
    name = b"cpu_device_count"
    option = _NamedValue(
        struct_size=ctypes.sizeof(_NamedValue),
        name=name,
        name_size=len(name),
        type=_INT64_TYPE,
        value=1,
        value_size=1,
    )
    return_one, return_false, client_create = _native(
        _RETURN_ONE, _RETURN_FALSE, _with_option(option, api.client_create)
    )
    topology = _TpuTopology(
        struct_size=ctypes.sizeof(_TpuTopology),
        type=_TPU_TOPOLOGY_TYPE,
        next=api.extensions,
        is_subslice_topology=return_false,
        is_enhanced_barrier_enabled=return_false,
        has_limited_ici_connectivity=return_false,
        counts=(ctypes.c_void_p * 9)(*[return_one] * 9),
    )
    _alive.extend([library, option, topology])
    api.extensions = ctypes.addressof(topology)
    api.client_create = client_create


def _with_option(option: _NamedValue, client_create: int) -> bytes:
    """Code that calls `client_create` with `option` for all options, whatever the caller gave."""
    return (
        bytes.fromhex("48 b8") + struct.pack("<Q", ctypes.addressof(option))  # mov rax, option
        + bytes.fromhex("48 89 47 10")  # mov [rdi+16], rax: args->create_options
        + bytes.fromhex("48 c7 47 18 01 00 00 00")  # mov qword [rdi+24], 1: args->num_options
        + bytes.fromhex("48 b8") + struct.pack("<Q", client_create)  # mov rax, client_create
        + bytes.fromhex("ff e0")  # jmp rax
    )  # fmt: skip


def _native(*functions: bytes) -> list[int]:
    """The addresses of `functions`, machine code for x86-64, in memory where they can be called."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _alive.append(page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    addresses = []
    for function in functions:
        page.seek(-(-page.tell() // 16) * 16)
        addresses.append(start + page.tell())
        page.write(function)
    # Never writable and executable at once, which hardened systems refuse.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC):
        reason = os.strerror(ctypes.get_errno())
        raise EmulationError(f"This system allows no code made at run time ({reason}), which this needs.")
    return addresses
