"""The CuTe toolchain: what it reads from objects, and what a hostile source does to it: nothing."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evotune.errors import StudyError
from evotune.fitness import cute_toolchain
from evotune.fitness.cute_toolchain import (
    CuteToolchain,
    blocks_per_sm,
    embedded_cubin,
    ptx_digest,
    resource_usage,
    trimmed,
)
from evotune.fitness.outcome import Failed, Failure, Resources, Stage
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import Compiled, CompileError
from evotune.search_space.template import Unit

LIMITS = Limits(wall_s=20)

SCALE = """
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


class Scale:
    @cute.jit
    def __call__(self, x: cute.Tensor, factor: cutlass.Float32, stream):
        self.kernel(x, factor).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, factor: cutlass.Float32):
        tx, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        s = smem.allocate_tensor(cutlass.Float32, cute.make_layout(SIZE), byte_alignment=16)
        s[tx] = x[tx]
        cute.arch.barrier()
        x[tx] = s[63 - tx] * factor


def build(constants):
    global SIZE
    SIZE = constants["SIZE"]
    x = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int64(),), stride_order=(0,), assumed_align=16)
    return Scale(), (x, cutlass.Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
"""
UNIT = Unit("cute", SCALE, "scale", (("SIZE", 64),))


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox.detect()


@pytest.fixture(scope="module")
def toolchain() -> Iterator[CuteToolchain]:
    lack = cute_toolchain.missing()
    if lack is not None:
        pytest.skip(lack)
    made = CuteToolchain()
    yield made
    made.close()


class TestReading:
    def test_resource_usage_has_one_row_per_kernel(self) -> None:
        text = (
            "Resource usage:\n Common:\n  GLOBAL:0\n Function a:\n"
            "  REG:122 STACK:8 SHARED:1024 LOCAL:16 CONSTANT[0]:872 TEXTURE:0\n"
            " Function b:\n  REG:12 STACK:0 SHARED:2048 LOCAL:0 CONSTANT[0]:1\n"
        )
        assert resource_usage(text) == [
            {"REG": 122, "STACK": 8, "SHARED": 1024, "LOCAL": 16},
            {"REG": 12, "STACK": 0, "SHARED": 2048, "LOCAL": 0},
        ]

    @pytest.mark.parametrize(
        ("threads", "registers", "shared", "blocks"),
        [
            (128, 32, 0, 16),  # threads: 2048 / 128
            (32, 16, 0, 32),  # the limit on blocks
            (128, 128, 0, 4),  # registers: 65536 / (128 · 128)
            (128, 129, 0, 3),  # 129 · 32 rounds up to 4352 a warp: 15 warps, 3 blocks
            (128, 32, 100 * 1024, 2),  # 228 KiB / 101 KiB
            (128, 32, 227 * 1024, 1),
            (128, 32, 228 * 1024, 0),
        ],
    )
    def test_occupancy(self, threads: int, registers: int, shared: int, blocks: int) -> None:
        assert blocks_per_sm(threads, registers, shared) == blocks

    def test_ptx_digest_masks_entry_names_and_nothing_else(self) -> None:
        ptx = ".visible .entry {name}(\n mov.u32 %r1, {value};\n// end {name}"
        first = ptx_digest(ptx.format(name="kernel_a_0", value=1))
        assert ptx_digest(ptx.format(name="other", value=1)) == first
        assert ptx_digest(ptx.format(name="kernel_a_0", value=2)) != first

    def test_embedded_cubin_is_the_device_elf_not_a_host_one(self) -> None:
        host = b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little") + bytes(40)
        device = b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little") + b"code"
        assert embedded_cubin(host + device) == device
        assert embedded_cubin(host + host) is None

    def test_trimmed_keeps_the_candidates_frames_and_the_message(self) -> None:
        dsl = "\n".join(f'  File "/site/cutlass/{i}.py", line {i}, in f\n    dsl({i})' for i in range(40))
        log = (
            "Traceback (most recent call last):\n"
            f'  File "/scratch/job/kernel.py", line 7, in build\n    return boom()\n{dsl}\n'
            "cutlass.DSLRuntimeError: N % 8 == 0\n  got 20\n"
        )
        kept = trimmed(log)
        assert "line 7, in build" in kept
        assert "return boom()" in kept
        assert "DSLRuntimeError: N % 8 == 0" in kept
        assert "got 20" in kept
        assert "dsl(20)" not in kept

    def test_a_missing_dsl_is_one_line_that_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "cutlass" else find(name)
        )
        with pytest.raises(StudyError, match=r"nvidia-cutlass-dsl.*evotune\[cuda\]"):
            CuteToolchain()
        assert "\n" not in (cute_toolchain.missing() or "\n")


def build(
    toolchain: CuteToolchain, sandbox: Sandbox, unit: Unit, limits: Limits = LIMITS
) -> Compiled | CompileError:
    with sandbox.scratch() as scratch:
        return toolchain.compile(unit, scratch, sandbox, limits)


def built(toolchain: CuteToolchain, sandbox: Sandbox, unit: Unit) -> tuple[Compiled, Resources]:
    compiled = build(toolchain, sandbox, unit)
    assert isinstance(compiled, Compiled), compiled.log
    resources = toolchain.inspect(unit, compiled)
    assert isinstance(resources, Resources), resources
    return compiled, resources


@pytest.mark.compile
class TestCompile:
    def test_an_object_and_its_resources_come_back(self, toolchain: CuteToolchain, sandbox: Sandbox) -> None:
        compiled, resources = built(toolchain, sandbox, UNIT)
        assert compiled.object.startswith(b"\x7fELF")
        assert b"__tvm_ffi_scale" in compiled.object
        assert ".entry" in compiled.files[".ptx"].decode()
        values = resources.values
        assert values["threads"] == 64
        assert values["shared_bytes"] == 256
        assert values["stack_bytes"] == 0
        assert 8 <= values["registers"] <= 32
        assert values["blocks_per_sm"] == 32
        assert values["code_bytes"] > 0

    def test_resources_follow_the_constants(self, toolchain: CuteToolchain, sandbox: Sandbox) -> None:
        unit = replace(UNIT, constants=(("SIZE", 1024),))
        assert built(toolchain, sandbox, unit)[1].values["shared_bytes"] == 4096

    def test_the_same_code_under_other_names_has_one_digest(
        self, toolchain: CuteToolchain, sandbox: Sandbox
    ) -> None:
        renamed = SCALE.replace("class Scale", "class Reverse").replace("Scale()", "Reverse()")
        renamed = renamed.replace("factor", "f").replace("        s[tx]", "        # first\n        s[tx]")
        changed = SCALE.replace("s[63 - tx]", "s[tx]")
        digests = [
            ptx_digest(built(toolchain, sandbox, replace(UNIT, text=text))[0].files[".ptx"].decode())
            for text in (SCALE, renamed, changed)
        ]
        assert digests[0] == digests[1]
        assert digests[0] != digests[2]

    def test_an_object_of_another_entry_is_refused(self, toolchain: CuteToolchain, sandbox: Sandbox) -> None:
        compiled, _ = built(toolchain, sandbox, UNIT)
        refused = toolchain.inspect(replace(UNIT, entry="kda_forward"), compiled)
        assert isinstance(refused, Failed)
        assert (refused.failure, refused.stage) == (Failure.REFUSED, Stage.INSPECT)
        assert "does not export kda_forward" in refused.detail

    def test_foreign_symbols_are_refused(self, toolchain: CuteToolchain, sandbox: Sandbox) -> None:
        compiled, _ = built(toolchain, sandbox, UNIT)
        hostile = compiled.object.replace(b"TVMFFIEnvGetStream", b"system\0GetStreamXX")
        refused = toolchain.inspect(UNIT, replace(compiled, object=hostile))
        assert isinstance(refused, Failed)
        assert "foreign symbols: system" in refused.detail

    def test_garbage_is_refused(self, toolchain: CuteToolchain, sandbox: Sandbox) -> None:
        compiled, _ = built(toolchain, sandbox, UNIT)
        refused = toolchain.inspect(UNIT, replace(compiled, object=b"\x7fELF" + bytes(50)))
        assert isinstance(refused, Failed)
        assert refused.failure is Failure.REFUSED


HOSTILE = {
    "raises": ("    raise ValueError('no such tile')", Failure.BUILD_ERROR, "ValueError: no such tile"),
    "exits": ("    os._exit(0)", Failure.BUILD_ERROR, "exit status 0"),
    "crashes": ("    ctypes.string_at(0)", Failure.BUILD_ERROR, "SIGSEGV"),
    "hangs": ("    time.sleep(1000)", Failure.TIMEOUT, "more than 1 s"),
    "forks and ends": (
        "    for _ in range(20):\n        if os.fork() == 0: time.sleep(1000)\n    os._exit(7)",
        Failure.BUILD_ERROR,
        "exit status 7",
    ),
    "fork bomb": ("    while True: os.fork()", Failure.BUILD_ERROR, ""),
    "writes outside": ("    open('/usr/planted', 'w')", Failure.BUILD_ERROR, "Read-only file system"),
    "opens a socket": ("    socket.socket()", Failure.BUILD_ERROR, "not permitted"),
    "prints gigabytes": ("    while True: print('x' * 100000)", Failure.BUILD_ERROR, "printed more than"),
    "fills the disk": (
        "    for i in range(1000): open(str(i), 'wb').write(bytes(50 << 20))",
        Failure.BUILD_ERROR,
        "wrote more than",
    ),
    "eats memory": ("    bytearray(64 << 30)", Failure.BUILD_ERROR, "MemoryError"),
    "kills its parent": (
        "    os.kill(os.getppid(), 9); time.sleep(1000)",
        Failure.BUILD_ERROR,
        "killed from within",
    ),
    "reads its parent": (
        "    open(f'/proc/{os.getppid()}/mem', 'r+b')",
        Failure.BUILD_ERROR,
        "Permission denied",
    ),
    "forges an answer": (
        "    for fd in range(3, 20):\n"
        '        try: os.write(fd, b\'{"status": "built", "files": {}}\')\n'
        "        except OSError: pass\n"
        "    os._exit(0)",
        Failure.BUILD_ERROR,
        "forged result",
    ),
    "builds nothing": ("    return 3", Failure.BUILD_ERROR, "TypeError"),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_source_is_data_and_the_next_compile_works(
    name: str, toolchain: CuteToolchain, sandbox: Sandbox
) -> None:
    body, failure, detail = HOSTILE[name]
    text = f"import ctypes, os, socket, time\n\n\ndef build(constants):\n{body}\n"
    limits = replace(LIMITS, wall_s=1.0) if failure is Failure.TIMEOUT else LIMITS
    result = build(toolchain, sandbox, replace(UNIT, text=text), limits)
    assert isinstance(result, CompileError)
    assert result.failed.failure is failure
    assert result.failed.stage is Stage.BUILD
    assert detail in result.failed.detail
    assert result.repeatable is (failure is not Failure.TIMEOUT)
    assert not Path("/usr/planted").exists()
    # The next job finds an ordinary process.
    plain = "def build(constants):\n    raise KeyError(constants['SIZE'])\n"
    ordinary = build(toolchain, sandbox, replace(UNIT, text=plain), limits)
    assert isinstance(ordinary, CompileError)
    assert ordinary.failed.detail == "KeyError: 64"


@pytest.mark.compile
def test_nothing_of_one_job_is_seen_by_the_next(toolchain: CuteToolchain, sandbox: Sandbox) -> None:
    leave = (
        "def build(constants):\n"
        "    for place in ('..', '/tmp', '/dev/shm'):\n        open(place + '/planted', 'w').close()\n"
        "    raise ValueError\n"
    )
    look = (
        "import os\n\n\ndef build(constants):\n"
        "    planted = [p for p in ('..', '/tmp', '/dev/shm') if 'planted' in os.listdir(p)]\n"
        "    raise ValueError(planted, len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
    )
    for text in (leave, look):
        result = build(toolchain, sandbox, replace(UNIT, text=text))
        assert isinstance(result, CompileError)
    # The processes: the namespace's first, the one that forks, and the job itself.
    assert result.failed.detail == "ValueError: ([], 3)"
