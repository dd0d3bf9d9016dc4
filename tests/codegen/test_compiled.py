"""Kernels as they are compiled for a GPU, inline assembly and all, run in the PTX emulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.codegen.ptx import Memory, Program, parse

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
.visible .entry small(.param .u64 .ptr .global .align 1 small_param_0)
{
	.reg .b32 	%r<9>;
	ld.param.b64 	%rd1, [small_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	setp.lt.u32 	%p1, %r1, 16;
	mov.u32 %r2, 7;
	@%p1 ld.global.b32 { %r2 }, [ %rd3 + 0 ];
	@%p1 bra 	$L_low;
	shfl.sync.bfly.b32 	%r3, %r2, 1, 31, -1;
	{ .reg .b32 t; prmt.b32 t, %r2, %r3, 0x0040; lop3.b32 %r2, t, %r1, 0xF0F0F0F0, 0xE4; }
$L_low:
	add.s32 	%r4, %r2, -1;
	st.global.b32 	[%rd3], %r4;
	ret;
}
"""


def test_emulator() -> None:
    """Guards, branches that part, shuffles, permutes and memory, against the same by hand."""
    memory, x = Memory(1 << 12), np.arange(100, 132, dtype=np.int32)
    at = memory.put(x)
    Program(parse(SMALL), 1, memory, [at], (0, 0)).run()
    low = 7 | 7 << 8
    expected = [*(x[:16] - 1), *((low & 0xF0F0F0F0 | i & 0x0F0F0F0F) - 1 for i in range(16, 32))]
    np.testing.assert_array_equal(memory.get(at, x), expected)


@pytest.mark.parametrize(
    ("check", "name", "target", "launch"),
    [
        ("read", "kimi_6bit", "sm_90", 0), ("read", "qwen_4bit", "sm_80", 0), ("read", "qwen_6bit", "sm_90", 3),
        ("step", "kimi_6bit", "sm_80", 0), ("step", "qwen_4bit", "sm_90", 0), ("fold", "kimi_4bit", "sm_90", 0),
        ("fold", "qwen_6bit", "sm_80", 0), ("fold_int8", "kimi_4bit", "sm_90", 0), ("dense", "qwen_6bit", "sm_90", 0),
        ("dense", "kimi_6bit", "sm_90", 0),
    ],
)  # fmt: skip
def test_as_compiled(check: str, name: str, target: str, launch: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.codegen.compiled", check, name, target, str(launch)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["untouched"]
    if check == "dense":
        assert found["packed"] < 1e-4
        assert found["unpacked"] < 1e-6
        return
    rounded = name.startswith("qwen") or check == "fold_int8"  # outputs are bfloat16
    assert found["error"] < (1e-3 if rounded else 1e-4)
    assert found["padded"]
    if check != "read":
        assert found["folds"] >= 2
        assert found["flips"] < 1e-4
    if check == "step":
        assert found["packed"] < 1e-4
        assert max(found["unpacked 0"], found["unpacked 2"]) < 1e-6
