"""What an object of the CuTe-DSL may contain, checked before it is linked; see `inspection` for the host's.

The candidate's source runs in the process that writes the object, so the object may be anything. Lists say
what may be there, never what may not, and were read off the DSL's own objects (4.8.1: 48 configurations of
both Hopper templates and 38 other kernels have nothing else; one that prints from the device is refused).

    host    launch code: it calls the DSL's runtime and tvm-ffi's errors and stream by name. No allocation, no
            stream, graph, event or callback of its own, no library found at run time; nothing that it may
            write but the handles of the loaded kernels; no constructor, one destructor, which unloads them
    device  one uncompressed image, that of which the resources are read. No memory that outlives a launch
            (module-level variables), no tables in memory or in constant banks of its own, and no symbol from
            outside: printf, assert, malloc and launches from the device all are calls of such symbols

Not seen here: what the host's instructions do. They run in the judge's process as any native code does, and
what they could win is bounded by the parent's clock (`cuda_timing`). System calls are not searched for, as
little as on the host: in 1 of 87 honest launch codes `0f 05` is part of something else.
"""

import re
import struct

from evotune.fitness import elf
from evotune.fitness.elf import Elf, ElfError, Section

_HOST_SECTIONS = re.compile(
    r"|\.l?text|\.l?rodata(\.cst\d+)?|\.lbss|\.fini_array|\.rela\.(ltext|fini_array|eh_frame)|\.eh_frame"
    r"|\.symtab|\.strtab|\.shstrtab|\.note\.GNU-stack"
)
CALLS = frozenset(
    (
        *("_GLOBAL_OFFSET_TABLE_", "cuda_dialect_init_library_once", "cuda_dialect_unload_library_once"),
        *("_cudaLibraryLoadData", "_cudaLibraryGetKernel", "_cuKernelGetAttribute", "_cudaFuncSetAttribute"),
        *("_cudaKernelSetAttributeForDevice", "_cudaGetDevice", "_cudaSetDevice", "_cudaDeviceGetAttribute"),
        *("_cudaLaunchKernelEx", "_cuTensorMapEncodeTiled", "CuteDSLRT_TVMFFISetRaisedCudaError"),
        *("TVMFFIErrorSetRaisedFromCStr", "TVMFFIErrorSetRaisedFromCStrParts", "TVMFFIEnvGetStream"),
        # Before a trap, where a descriptor of the tensor memory accelerator cannot be made.
        *("cuda_dialect_print_on_error", "cuda_dialect_get_error_name", "printf", "memcpy"),
    )
)
_FATBIN = struct.Struct("<IHHQ")  # magic, version, header size, size of what follows
_IMAGE = struct.Struct("<HHIQII")  # kind, version, header size, size, size compressed, options' size
_FATBIN_MAGIC, _IMAGE_IS_ELF = 0xBA55ED50, 2
_CUDA_MACHINE = 190
_HANDLE_BYTES = 8  # of the library, and of each kernel in it
_PARAMETERS = ".nv.constant0."  # one such bank for each kernel; functions that it calls have none

_DEVICE_SECTIONS = re.compile(
    r"|\.shstrtab|\.strtab|\.symtab(_shndx)?|\.debug_frame|\.rela?\.(debug_frame|text\..+)|\.text\..+"
    r"|\.nv\.info(\..+)?|\.nv\.callgraph|\.nv\.compat|\.nv\.rel\.action|\.nv\.prototype|\.note\.nv\..+"
    r"|\.nv\.shared\..+|\.nv\.constant[02]\..+"
)
_DEVICE_SYMBOLS = frozenset(("", ".nv.reservedSmem.offset0"))


def why_refused(code: bytes, entry: str) -> str | None:
    """What the object has that none of the DSL's has, or what it lacks; None when nothing."""
    try:
        parsed = Elf(code)
        if parsed.type != elf.REL or parsed.machine not in (elf.X86_64, elf.AARCH64):
            return "not a relocatable object"
        image = device_image(parsed)
        if isinstance(image, str):
            return image
        device = Elf(image)
        kernels = [s for s in device.sections if s.name.startswith(_PARAMETERS)]
        return (
            _host_symbols_problem(parsed, entry)
            or _host_sections_problem(parsed, len(kernels))
            or _device_problem(device)
        )
    except ElfError as error:
        return f"not an object of the DSL: {error}"


def device_image(parsed: Elf) -> bytes | str:
    """The device ELF file inside an object, or why there is not exactly one. Raises ElfError."""
    found = [s for s in parsed.symbols() if s.name == "kernels_binary" and s.section < len(parsed.sections)]
    if len(found) != 1:
        return f"{len(found)} images of device code, where one is due"
    content = parsed.content(parsed.sections[found[0].section])
    blob = content[found[0].value : found[0].value + found[0].size]
    if len(blob) < _FATBIN.size + _IMAGE.size:
        return "the image of its device code is cut off"
    magic, _, header, size = _FATBIN.unpack_from(blob)
    kind, _, image_header, image_size, compressed, _ = _IMAGE.unpack_from(blob, _FATBIN.size)
    whole = (
        (magic, header) == (_FATBIN_MAGIC, _FATBIN.size)
        and (kind, compressed) == (_IMAGE_IS_ELF, 0)
        and size == image_header + image_size == len(blob) - _FATBIN.size
    )
    if not whole:
        return "its device code is not one uncompressed image"
    image = blob[_FATBIN.size + image_header :]
    if image[18:20] != _CUDA_MACHINE.to_bytes(2, "little"):
        return "its device code is for no GPU"
    images = [at for at in _places(parsed.data, b"\x7fELF") if at]
    containers = list(_places(parsed.data, _FATBIN_MAGIC.to_bytes(4, "little")))
    if len(images) != 1 or len(containers) != 1:
        return "device code beside that of which the resources are read"
    return image


def _places(data: bytes, wanted: bytes) -> list[int]:
    """Where bytes occur."""
    return [match.start() for match in re.finditer(re.escape(wanted), data)]


def _host_symbols_problem(parsed: Elf, entry: str) -> str | None:
    ours, internal = f"__tvm_ffi_{entry}", f"__cute_internal_{entry}_"
    symbols = parsed.symbols()
    indirect = next((s.name for s in symbols if s.type == elf.INDIRECT), None)
    if indirect is not None:
        return f"symbol {indirect} is resolved by code when the object is loaded"
    called = {s.name for s in symbols if s.section == elf.UNDEFINED and s.name}
    shown = {s.name for s in symbols if s.section != elf.UNDEFINED and s.binding != elf.LOCAL}
    if foreign := sorted(called - CALLS):
        return f"foreign symbols: {', '.join(foreign[:5])}"
    if ours not in shown:
        return f"the object does not export {entry}"
    if others := sorted(name for name in shown - {ours} if not name.startswith(internal)):
        return f"it exports {', '.join(others[:5])}"
    return None


def _host_sections_problem(parsed: Elf, kernels: int) -> str | None:
    for section in parsed.sections:
        problem = _host_section_problem(parsed, section, kernels)
        if problem is not None:
            return problem
    return None


def _host_section_problem(parsed: Elf, section: Section, kernels: int) -> str | None:
    name, flags = section.name, section.flags
    if name.startswith((".init", ".preinit", ".ctors")):
        return f"section {name} would run code when the object is loaded"
    if not _HOST_SECTIONS.fullmatch(name):
        return f"section {name} has no place in an object of the DSL"
    if flags & elf.THREAD:
        return f"section {name} is thread-local data"
    if name == ".fini_array":
        return None if section.size == 8 else f"{section.size // 8} destructors, where one is due"
    if flags & elf.WRITE and flags & elf.EXECUTE:
        return f"section {name} is executable and writable"
    if flags & elf.WRITE and section.size != _HANDLE_BYTES * (kernels + 1):
        return f"{section.size} bytes of writable data in {name}, where {kernels} kernels need a handle each"
    return None


def _device_problem(device: Elf) -> str | None:
    for symbol in device.symbols():
        if symbol.section == elf.UNDEFINED and symbol.name not in _DEVICE_SYMBOLS:
            return f"its device code calls {symbol.name}"
    kept = next((s for s in device.sections if s.name.startswith(".nv.global")), None)
    if kept is not None:
        return f"{kept.size} bytes of device memory that outlive a launch ({kept.name})"
    stray = next((s.name for s in device.sections if not _DEVICE_SECTIONS.fullmatch(s.name)), None)
    return None if stray is None else f"section {stray} has no place in a kernel's device code"
