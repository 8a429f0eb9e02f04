"""NVTX ranges: shown where a tool is attached, and nowhere else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import ModuleType

import pytest

from gpuscheduler.devices.cuda.ranges import DomainRanges, find_ranges

#: A tool: it writes what is pushed in any domain to standard error.
TOOL = r"""
#include <stdint.h>
#include <stdio.h>
typedef struct { uint16_t version, size; uint32_t category; int32_t colorType; uint32_t color;
                 int32_t payloadType; int32_t pad; union { int64_t ll; } payload;
                 int32_t messageType; union { const char *ascii; void *registered; } message;
} attributes;
typedef void (*function)(void);
typedef struct { size_t size; int (*get)(uint32_t, function ***, unsigned *); } callbacks;
typedef void *(*get_table)(uint32_t);
static const char *names[64]; static int count;
static void *create(const char *name) { fprintf(stderr, "domain %s\n", name); return (void *)1; }
static void *registered(void *d, const char *s) {
  names[++count] = s;
  return (void *)(intptr_t)count;
}
static int push(void *d, const attributes *a) {
  fprintf(stderr, "push %s %ld\n",
          a->messageType == 3 ? names[(intptr_t)a->message.registered] : a->message.ascii,
          (long)a->payload.ll);
  return 0;
}
static int pop(void *d) { fprintf(stderr, "pop\n"); return 0; }
int InitializeInjectionNvtx2(get_table table) {
  callbacks *c = table(1); function **slots; unsigned size;
  if (c && c->get(5 /* CORE2 */, &slots, &size)) {
    *slots[4] = (function)push; *slots[5] = (function)pop;
    *slots[10] = (function)registered; *slots[12] = (function)create;
    (void)size;
  }
  return 1;
}
"""


class FakeDomain:
    def __init__(self):
        self.seen = []

    def get_event_attributes(self, message, category, payload):
        return message, category, payload

    def push_range(self, attributes):
        self.seen.append(attributes)

    def pop_range(self):
        self.seen.append("pop")


def test_a_range_has_a_label_a_category_and_a_step():
    domain = FakeDomain()
    ranges = DomainRanges(domain)
    for step, device in [(7, 0), (8, 0), (9, 1)]:
        ranges.push("exp · sum", device, step)
        ranges.pop()
    name = "exp · sum"
    first, second = "device 0", "device 1"
    seen = [(name, first, 7), "pop", (name, first, 8), "pop", (name, second, 9), "pop"]
    assert domain.seen == seen


def test_without_a_tool_there_are_no_ranges():
    pytest.importorskip("nvtx")
    assert find_ranges({}) is None


def test_without_the_package_cupys_ranges_are_for_tools_only(monkeypatch):
    seen = []
    cupy_nvtx = ModuleType("cupy.cuda.nvtx")
    cupy_nvtx.RangePush = lambda *arguments: seen.append(arguments)
    cupy_nvtx.RangePop = lambda: seen.append("pop")
    cuda = ModuleType("cupy.cuda")
    cuda.nvtx = cupy_nvtx
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    assert find_ranges({}) is None
    ranges = find_ranges({"NVTX_INJECTION64_PATH": "tool.so"})
    ranges.push("exp", 1, 5)
    ranges.pop()
    assert seen == [("exp", 1), "pop"]
    del cuda.nvtx
    assert find_ranges({"NVTX_INJECTION64_PATH": "tool.so"}) is None


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_a_tool_that_is_attached_sees_domain_label_and_step(tmp_path):
    """As Nsight Systems attaches itself: by NVTX's injection library."""
    pytest.importorskip("nvtx")
    (tmp_path / "tool.c").write_text(TOOL)
    tool = tmp_path / "tool.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(tool), str(tmp_path / "tool.c")]
    subprocess.run(command, check=True)
    code = (
        "from gpuscheduler.devices.cuda.ranges import find_ranges\n"
        "ranges = find_ranges()\n"
        "ranges.push('exp + sum', 0, 41); ranges.pop()\n"
    )
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(tool)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stderr.splitlines()
    assert "domain gpuscheduler" in lines
    assert lines[-2:] == ["push exp + sum 41", "pop"]
