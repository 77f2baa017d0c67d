#!/usr/bin/env python3
"""Checks and times the CUDA backend's kernels of a decode step on the device that is there.

    python3 kernels.py [NAME=]FOLDER[,-DKEY=VALUE...][,KEY=VALUE...] ... [--only WORD,...] [--skip WORD,...]

FOLDER holds the kernels' texts (backends/cuda/src/kernels). Several are compared: the same folder with other defines, or other
folders. KEY=VALUE changes how kernels are launched: `cluster`, `clusters`, `stages` (decode); `once`, `each`
(streamed).

Kernels are compiled, described and launched as the backend does it, early starts included. Every result is compared with one in
float64 (products) or float32 (attention) on fresh random inputs, after NaN was written to where it goes: `error` is
|out - ref| / |ref|. Times are medians over replays of a CUDA graph of launches over different weights, so that no cache helps.
"""
import concurrent.futures
import ctypes
import math
import os
import statistics
import struct
import sys
import time

try:
    import torch
except ImportError as problem:
    # What can be asked for is told without it.
    MISSING = problem
else:
    MISSING = None

DEVICE = "cuda"
EARLY_START, MOST_SHARED, PROCESSORS, SHARED_OPTIN = 6, 8, 16, 97
WARPS, GROUPS, GROUP_SIZE, BITS = 8, 8, 64, 4
PAGE_SHIFT = 5
EPS = 1e-5
# Bytes that the launches of a graph read at least: several times the second cache.
COLD_BYTES = 300 << 20
WORST_ERROR = 6e-3


class Cuda:
    """The driver and the run-time compiler."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.compiler = self.find_compiler()
        self.processors = self.attribute(PROCESSORS)
        self.most_shared = self.attribute(SHARED_OPTIN) - 2048
        self.modules = {}
        self.functions = {}

    @staticmethod
    def find_compiler():
        for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
            try:
                return ctypes.CDLL(name)
            except OSError:
                pass
        import nvidia
        for folder in nvidia.__path__:
            for path, _, files in os.walk(folder):
                for file in sorted(files):
                    if file.startswith("libnvrtc.so."):
                        return ctypes.CDLL(os.path.join(path, file))
        raise SystemExit("NVIDIA's run-time compiler is not there")

    def checked(self, code, what):
        if code != 0:
            name = ctypes.c_char_p()
            self.driver.cuGetErrorName(code, ctypes.byref(name))
            raise RuntimeError(f"{what}: {name.value}")

    def attribute(self, which):
        value = ctypes.c_int()
        self.checked(self.driver.cuInit(0), "cuInit")
        self.checked(self.driver.cuDeviceGetAttribute(ctypes.byref(value), which, 0), "cuDeviceGetAttribute")
        return value.value

    def compile(self, text, defines, target="sm_90"):
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        self.compiler.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        options = [f"--gpu-architecture={target}", "--std=c++17", "-default-device"] + [f"-D{d}" for d in defines]
        array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        if self.compiler.nvrtcCompileProgram(program, len(options), array) != 0:
            self.compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value + 1)
            self.compiler.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{defines}: {log.value.decode()[:2000]}")
        self.compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        self.compiler.nvrtcGetCUBIN(program, image)
        return image.raw

    def load(self, image):
        module = ctypes.c_void_p()
        self.checked(self.driver.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        return module

    def function(self, module, name, shared):
        found = ctypes.c_void_p()
        self.checked(self.driver.cuModuleGetFunction(ctypes.byref(found), module, name.encode()), name)
        if shared:
            self.checked(self.driver.cuFuncSetAttribute(found, MOST_SHARED, shared), name)
        return found

    def tensor_map(self, element, address, rows, columns, row_bytes, tile_rows, tile_columns, swizzled):
        space = ctypes.create_string_buffer(256)
        start = (ctypes.addressof(space) + 63) // 64 * 64
        code = self.driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(start), element, 2, ctypes.c_void_p(address), (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(row_bytes), (ctypes.c_uint32 * 2)(tile_columns, tile_rows), (ctypes.c_uint32 * 2)(1, 1),
            0, 3 if swizzled else 0, 3, 0)
        self.checked(code, "cuTensorMapEncodeTiled")
        return ctypes.string_at(start, 128)


class LaunchConfig(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]


class Call:
    """One launch; arguments are bytes (structs), ints (pointers or 32-bit numbers) or floats, 8 bytes each."""

    def __init__(self, cuda, function, grid, threads, shared, arguments, keep=()):
        self.cuda, self.function, self.keep = cuda, function, keep
        self.values = []
        for argument in arguments:
            if isinstance(argument, float):
                argument = struct.pack("f4x", argument)
            elif isinstance(argument, int):
                argument = struct.pack("q", argument)
            self.values.append(ctypes.create_string_buffer(argument, len(argument)))
        self.pointers = (ctypes.c_void_p * len(self.values))(*[ctypes.addressof(v) for v in self.values])
        self.attribute = ctypes.create_string_buffer(struct.pack("II16I", EARLY_START, 0, 1, *[0] * 15), 72)
        self.config = LaunchConfig((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared, None,
                                   ctypes.addressof(self.attribute), 1)

    def go(self, stream):
        self.config.stream = stream.cuda_stream
        code = self.cuda.driver.cuLaunchKernelEx(ctypes.byref(self.config), self.function, self.pointers, None)
        self.cuda.checked(code, "cuLaunchKernelEx")


def run(calls):
    """Launches once, in order."""
    stream = torch.cuda.current_stream()
    for call in calls:
        call.go(stream)
    torch.cuda.synchronize()


def microseconds(calls, replays=7):
    """Median time of all calls together, replayed as a graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for call in calls:
            call.go(stream)
        graph.capture_end()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


class Variant:
    """Texts of a folder with defines of its own."""

    def __init__(self, cuda, given):
        first, *rest = given.split(",")
        self.name, self.folder = first.split("=", 1) if "=" in first else (os.path.basename(first.rstrip("/")), first)
        self.cuda = cuda
        if not self.there("common.cuh"):
            raise SystemExit(f"{self.folder}: expected a folder with kernels' texts, found no common.cuh in it")
        self.defines = [r[2:] for r in rest if r.startswith("-D")]
        try:
            self.options = {k: int(v) for k, v in (r.split("=") for r in rest if not r.startswith("-D"))}
        except ValueError:
            raise SystemExit(f"{given}: expected -DKEY=VALUE or KEY=NUMBER after the folder") from None
        self.modules, self.functions = {}, {}
        self.has_decode = bool(self.there("decode.cu"))
        self.has_scales = "scales[3]" in self.text(["common.cuh", "streamed.cu"])
        self.has_head_norms = "HeadNorms" in self.text(["rows.cu"])

    def there(self, *files):
        """Those of the files that the folder has: older ones have fewer."""
        return [file for file in files if os.path.exists(os.path.join(self.folder, file))]

    def text(self, files):
        return "".join(open(os.path.join(self.folder, file)).read() for file in files)

    def wanted(self):
        """What is compiled: key, files, defines."""
        base = ["F16=0"] + self.defines
        streamed = [f"WEIGHT_BITS={BITS}", f"GROUP_SIZE={GROUP_SIZE}"]
        for stages in (1, 2):
            own = [f"STREAM_WARPS={WARPS}", f"STREAM_STAGES={stages}"]
            yield ("streamed", stages), ["common.cuh", "engine.cuh", "streamed.cu"], base + streamed + own
        yield ("rows",), ["common.cuh", "rows.cu"], base
        yield ("sample",), ["common.cuh", *self.there("cluster.cuh"), "sample.cu"], base + ["LOGITS_F32=0"]
        for width, group in ((128, 4), (64, 3)):
            heads = [f"HEAD_WIDTH={width}", f"GROUP_HEADS={group}"]
            yield ("attention", width), ["common.cuh", *self.there("paged.cuh"), "attention.cu"], base + heads
            if self.has_decode:
                for stages in (1, 2):
                    yield ("decode", width, stages), ["common.cuh", *self.there("cluster.cuh", "scores.cuh"), "decode.cu"], base + heads + [f"DECODE_STAGES={stages}"]

    def function(self, key, name, shared=0):
        if (key, name) not in self.functions:
            self.functions[key, name] = self.cuda.function(self.modules[key], name, shared)
        return self.functions[key, name]


def error(out, ref):
    out, ref = out.double(), ref.double()
    return ((out - ref).norm() / ref.norm()).item() if bool(torch.isfinite(out).all()) else math.nan


def poison(*tensors):
    for t in tensors:
        t.fill_(math.nan)


class Weight:
    """Quantised [n, k] on the device, with its maps."""

    def __init__(self, cuda, n, k):
        self.n, self.k = n, k
        groups = k // GROUP_SIZE
        self.words = torch.randint(-2**31, 2**31 - 1, (n, k // 8), dtype=torch.int32, device=DEVICE)
        self.scales = (torch.rand(n, groups, device=DEVICE) * 0.01 + 0.005).bfloat16()
        self.biases = (self.scales.float() * -(6 + 3 * torch.rand(n, groups, device=DEVICE))).bfloat16()
        self.bytes = n * k // 2 + 4 * n * groups
        maps = cuda.tensor_map(2, self.words.data_ptr(), n, k // 8, k // 2, 8, 32, True)
        for t in (self.scales, self.biases) if groups % 8 == 0 else ():
            maps += cuda.tensor_map(1, t.data_ptr(), n, groups, 2 * groups, 8, GROUPS, False)
        self.maps = torch.frombuffer(bytearray(maps), dtype=torch.uint8).to(DEVICE)

    def matrix(self, first, count):
        """Rows in float64."""
        rows, shifts = slice(first, first + count), torch.arange(0, 32, 4, device=DEVICE, dtype=torch.int32)
        values = ((self.words[rows].unsqueeze(-1) >> shifts) & 15).reshape(-1, self.k // GROUP_SIZE, GROUP_SIZE).double()
        values = values * self.scales[rows].double().unsqueeze(-1) + self.biases[rows].double().unsqueeze(-1)
        return values.reshape(-1, self.k)

    def times(self, x):
        """x @ w^T in float64."""
        return torch.cat([x.double() @ self.matrix(first, 8192).T for first in range(0, self.n, 8192)], 1)


def normed(x, w):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w.double()


def stream_plan(cuda, variant, k, rows, tiles):
    piece, groups = GROUPS * GROUP_SIZE, k // GROUP_SIZE

    once = variant.options.get("once", 0) and k // piece <= WARPS and tiles <= 4 * cuda.processors
    stages, warps = 1 if once else 2, WARPS
    stage = 16 * piece * BITS // 8 + 2 * 16 * GROUPS * 2 + 8
    shared = warps * stages * stage + rows * k * 2 + groups * 8 * 4 + 2 * warps * 16 * rows * 4
    each = 4 if once else min(variant.options.get("each", 2), 2 if shared <= 112 << 10 else 1)
    return stages, warps, shared, min(tiles, each * cuda.processors)


def stream_call(cuda, variant, weights, x, outs, norm=None, residual=None, gated=None):
    """A product of x and all weights; with `gated`, where the gated activation of two goes."""
    rows, k = x.shape
    each = 16 if gated is None else 8
    starts, tiles = [2**31 - 1] * 3, 0
    for i, w in enumerate(weights):
        starts[i] = tiles
        tiles += -(-w.n // 16)
    if gated is not None:
        tiles = -(-weights[0].n // each)

    def three(values):
        return struct.pack("3Q", *(list(values) + [0] * 3)[:3])

    record = three(w.maps.data_ptr() for w in weights)
    if variant.has_scales:
        record += three(w.scales.data_ptr() for w in weights) + three(w.biases.data_ptr() for w in weights)
    record += three(0 if o is None else o.data_ptr() for o in outs)
    record += struct.pack("6i", *([w.n for w in weights] + [0] * 3)[:3], *starts)
    stages, warps, shared, blocks = stream_plan(cuda, variant, k, rows, tiles)
    around = struct.pack("QQfi", 0 if norm is None else norm.data_ptr(), 0 if residual is None else residual.data_ptr(), EPS,
                         0 if norm is None else 2)
    name = "stream_rows" if gated is None else "stream_gated"
    middle = [x.data_ptr(), k, rows] if gated is None else [x.data_ptr(), gated.data_ptr(), k, rows, 1]
    function = variant.function(("streamed", stages), name, cuda.most_shared)
    return Call(cuda, function, (blocks, 1, 1), 32 * warps, shared, [record, *middle, tiles, 0, around],
                (weights, x, outs, norm, residual, gated))


def random(*shape):
    return torch.randn(*shape, device=DEVICE).bfloat16()


def products(cuda, variants, table):
    """The products of a layer of Llama-3.1-8B's shape, and its head."""
    cases = {
        "qkv": ([4096, 1024, 1024], 4096, True, False),
        "o": ([4096], 4096, False, True),
        "gate+up": ([14336, 14336], 4096, True, False),
        "down": ([4096], 14336, False, True),
        "head": ([128256], 4096, True, False),
    }
    for name, (ns, k, is_normed, adds) in cases.items():
        bytes_each = sum(n * k * 9 // 16 for n in ns)
        sets = [[Weight(cuda, n, k) for n in ns] for _ in range(max(2, min(48, COLD_BYTES // bytes_each)))]
        for rows in (1, 2, 4, 8):
            if rows > 1 and rows * k * 2 > 64 << 10:
                continue
            x = random(rows, k)
            norm = random(k) if is_normed else None
            residual = random(rows, ns[0]) if adds else None
            own = normed(x, norm) if is_normed else x
            exact = [w.times(own) for w in sets[0]]
            if name == "gate+up":
                exact = [torch.nn.functional.silu(exact[0]) * exact[1]]
            if adds:
                exact[0] = exact[0] + residual.double()
            for variant in variants:
                if rows > 4 and "squares[8]" not in variant.text(["streamed.cu"]):
                    continue
                outs = [torch.empty(rows, e.shape[1], device=DEVICE, dtype=torch.bfloat16) for e in exact]
                if name == "gate+up":
                    calls = [stream_call(cuda, variant, s, x, [None, None], norm, gated=outs[0])
                             for s in reversed(sets)]
                else:
                    calls = [stream_call(cuda, variant, s, x, outs, norm, residual)
                             for s in reversed(sets)]
                poison(*outs)
                try:
                    run(calls[-1:])
                except RuntimeError as problem:
                    # Refused launches leave the device as it was.
                    table.bad.append(f"{name}, {rows} rows [{variant.name}]: {problem}")
                    continue
                worst = max(error(o, e) for o, e in zip(outs, exact))
                calls *= max(1, 48 // len(calls))
                taken = microseconds(calls) / len(calls)
                table.add(f"{name}, {rows} rows", variant, taken, bytes_each, worst)
        del sets


class Attention:
    """Pools, page tables and rows of several layers, every row the newest of its sequence."""

    def __init__(self, sequences, keys, heads, kv_heads, width, layers, is_normed=False):
        self.sequences, self.keys, self.heads, self.kv_heads, self.width = sequences, keys, heads, kv_heads, width
        self.table_width = -(-keys >> PAGE_SHIFT)
        self.pages = sequences * self.table_width
        size = 1 << PAGE_SHIFT
        self.pools = [[torch.empty(self.pages, size, kv_heads, width, device=DEVICE, dtype=torch.bfloat16).uniform_(-1, 1)
                       for _ in range(2)] for _ in range(layers)]
        order = torch.randperm(self.pages, device=DEVICE).int()
        self.page_table = order.reshape(sequences, self.table_width).contiguous()
        self.positions = torch.full((sequences,), keys - 1, device=DEVICE, dtype=torch.int32)
        self.rows = torch.arange(sequences, device=DEVICE, dtype=torch.int32)
        last = self.page_table[:, (keys - 1) >> PAGE_SHIFT]
        self.slots = (last * size + (keys - 1) % size).int()
        self.table = (500000.0 ** (-torch.arange(0, width, 2, device=DEVICE, dtype=torch.float64) / width)).float()
        self.q, self.k, self.v = random(sequences, heads * width), random(sequences, kv_heads * width), random(sequences, kv_heads * width)
        self.out = torch.empty(sequences, heads * width, device=DEVICE, dtype=torch.bfloat16)
        self.turned = [torch.empty_like(self.q), torch.empty_like(self.k)]
        self.parts = torch.zeros(1 << 22, device=DEVICE)
        self.counters = torch.zeros(1 << 16, device=DEVICE, dtype=torch.int32)
        self.bytes = sequences * keys * kv_heads * width * 4
        self.exact = None
        # Weights of the norms of heads.
        self.norms = [random(width), random(width)] if is_normed else None

    def rotated(self, t, norm=None):
        t = t.reshape(self.sequences, -1, self.width)
        t = (t if norm is None else normed(t, norm).bfloat16()).float()
        angle = (self.positions.double().unsqueeze(1) * self.table.double()).unsqueeze(1)
        cosine, sine = angle.cos().float(), angle.sin().float()
        a, b = t.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)

    def reference(self, layer):
        """Result, and the key that is appended."""
        q, k = [self.rotated(t, n) for t, n in zip((self.q, self.k), self.norms or (None, None))]
        k = k.bfloat16().float()
        outs = []
        for s in range(self.sequences):
            keys, values = [p[self.page_table[s].long()].reshape(-1, self.kv_heads, self.width)[:self.keys].float() for p in self.pools[layer]]
            keys[-1], values[-1] = k[s], self.v[s].reshape(self.kv_heads, self.width).float()
            own = q[s].reshape(self.kv_heads, -1, self.width)
            scores = torch.einsum("hgd,khd->hgk", own, keys) / math.sqrt(self.width)
            outs.append(torch.einsum("hgk,khd->hgd", scores.softmax(-1), values).reshape(-1))
        return torch.stack(outs), k

    def apart(self, cuda, variant, layer):
        """Norms of heads, rotation and append, then attention."""
        keys, values = [p.data_ptr() for p in self.pools[layer]]
        half = self.width // 2
        elements = (self.heads + self.kv_heads) * (self.width - half) + self.kv_heads * self.width
        across = min(64, -(-elements // 256))
        norms, before, q, k = [], [], self.q, self.k
        if variant.has_head_norms:
            across = -(-(self.heads + 2 * self.kv_heads) // 8)
            norms = [struct.pack("2Qfi", *self.norm_addresses(), EPS, self.norms is not None)]
        elif self.norms is not None:
            q, k = self.turned[0].clone(), self.turned[1].clone()
            for x, to, norm in ((self.q, q, self.norms[0]), (self.k, k, self.norms[1])):
                rows = x.numel() // self.width
                before.append(Call(cuda, variant.function(("rows",), "rms_norm_short"), (-(-rows // 8), 1, 1), 256, 0,
                                   [x.data_ptr(), norm.data_ptr(), to.data_ptr(), rows, self.width, EPS], (to,)))
        rope = Call(cuda, variant.function(("rows",), "rope_append"), (self.sequences, across, 1), 256, 4 * self.width,
                    [q.data_ptr(), k.data_ptr(), self.v.data_ptr(), self.positions.data_ptr(), self.table.data_ptr(),
                     self.turned[0].data_ptr(), self.turned[1].data_ptr(), keys, values, self.slots.data_ptr(), self.heads, self.kv_heads,
                     self.width, self.width, 0, 0, 1.0, self.pages << PAGE_SHIFT, *norms])
        group = self.group(8)
        count = self.kv_heads * self.sequences
        splits = max(1, min((2 * cuda.processors) // count, -(-(self.table_width << PAGE_SHIFT) // 64), 64))
        key = ("attention", self.width) if group <= 4 else ("attention", self.width, group)
        decode = Call(cuda, variant.function(key, "decode_rows"), (splits, self.heads // group, self.sequences), 128, 0,
                      [self.turned[0].data_ptr(), keys, values, self.rows.data_ptr(), self.positions.data_ptr(), self.page_table.data_ptr(), 0,
                       self.out.data_ptr(), self.parts.data_ptr(), self.counters.data_ptr(), self.sequences, self.heads, self.kv_heads,
                       PAGE_SHIFT, self.table_width, self.pages, 0, 1 / math.sqrt(self.width), 0.0, 0])
        return [*before, rope, decode]

    def norm_addresses(self):
        return [n.data_ptr() for n in self.norms] if self.norms is not None else [0, 0]

    def group(self, most):
        """Query heads of a block."""
        each = self.heads // self.kv_heads
        return next(g for g in (8, 4, 3, 2, 1) if each % g == 0 and g <= most)

    def together(self, cuda, variant, layer):
        """All in one."""
        keys, values = [p.data_ptr() for p in self.pools[layer]]
        across, capacity = self.heads // self.group(4), self.table_width << PAGE_SHIFT
        count = across * self.sequences
        cluster = variant.options.get("cluster", next((c for c in (8, 4, 2) if count * c <= 2 * cuda.processors), 1))
        clusters = variant.options.get("clusters", max(1, min(2 * cuda.processors // (count * cluster), capacity // 1024, 8)))
        record = struct.pack("11Q", self.q.data_ptr(), self.k.data_ptr(), self.v.data_ptr(), keys, values, self.rows.data_ptr(),
                             self.positions.data_ptr(), self.page_table.data_ptr(), self.slots.data_ptr(), self.table.data_ptr(), 0)
        if variant.has_head_norms:
            record += struct.pack("2Q", *self.norm_addresses())
        record += struct.pack("3Q10i4f", self.out.data_ptr(), self.parts.data_ptr(), self.counters.data_ptr(), self.heads, self.kv_heads,
                              PAGE_SHIFT, self.table_width, self.pages, 0, self.width, 0, 0, self.sequences,
                              1 / math.sqrt(self.width), 0.0, 1.0, EPS)
        if variant.has_head_norms:
            record += struct.pack("2i", self.norms is not None, 0)
        stages = variant.options.get("stages", 1 if 8 * count <= cuda.processors and capacity <= 2048 else 2)
        shared = 8 * stages * 2 * 4 * 512
        function = variant.function(("decode", self.width, stages), f"decode_{cluster}", 200 << 10)
        return [Call(cuda, function, (cluster * clusters, across, self.sequences), 256, shared, [record])]

    def check(self, calls, layer=0):
        if self.exact is None:
            self.exact = self.reference(layer)
        exact, key = self.exact
        poison(self.out, *self.turned)
        pools = [p.reshape(-1, self.kv_heads, self.width) for p in self.pools[layer]]
        for p in pools:
            p[self.slots.long()] = math.nan
        run(calls)
        appended = error(pools[0][self.slots.long()], key)
        same = torch.equal(pools[1][self.slots.long()].reshape(self.sequences, -1), self.v)
        return max(error(self.out, exact), appended) if same else math.nan


def attentions(cuda, variants, table):
    """Decode attention with rotation and append."""
    shapes = [(32, 8, 128, [(1, n) for n in (128, 512, 2048, 8192, 32768)] + [(8, 512), (8, 2048), (8, 8192), (8, 32768), (32, 512), (32, 2048), (32, 8192),
                            (64, 512), (64, 2048)]),
              (9, 3, 64, [(1, 128), (1, 517), (1, 8192), (32, 512)])]
    for heads, kv_heads, width, cases in shapes:
        for sequences, keys in cases:
            size = sequences * keys * kv_heads * width * 4
            layers = max(1, min(160, COLD_BYTES // size))
            at = Attention(sequences, keys, heads, kv_heads, width, layers)
            rounds = max(1, (40 if size < 64 << 20 else 8) // layers)
            for variant in variants:
                ways = [("", at.apart)] + ([(" one", at.together)] if variant.has_decode else [])
                for suffix, way in ways:
                    worst = at.check(way(cuda, variant, 0))
                    calls = [c for layer in range(layers) for c in way(cuda, variant, layer)] * rounds
                    taken = microseconds(calls) / (layers * rounds)
                    table.add(f"attention {heads}/{kv_heads}x{width}, {sequences} x {keys}{suffix}", variant, taken, at.bytes, worst)
            if keys == 512 and sequences in (1, 32):
                for variant in variants:
                    calls = [at.apart(cuda, variant, layer)[0] for layer in range(layers)] * rounds
                    table.add(f"rope_append {heads}/{kv_heads}x{width}, {sequences}", variant, microseconds(calls) / len(calls), 0, 0.0)
            del at


def samples(cuda, variants, table):
    width = 128256
    for rows, k in ((1, 1), (1, 40), (32, 1)):
        logits = (3 * random(rows, width).float()).bfloat16()
        numbers = [torch.full((rows,), v, device=DEVICE) for v in (1.0, 0.0, 1.0, 0.0)]
        top_k = torch.full((rows,), k, device=DEVICE, dtype=torch.int32)
        out = torch.full((rows,), -1, device=DEVICE, dtype=torch.int32)
        # A uniform number of 0 takes the highest, whatever k is.
        places = torch.arange(width, device=DEVICE)
        best = torch.where(logits == logits.max(-1, keepdim=True).values, places, width).min(-1).values
        for variant in variants:
            names = ["sample_rows"] + (["sample_rows_8"] if "sample_rows_8" in variant.text(["sample.cu"]) else [])
            for name in names:
                arguments = [t.data_ptr() for t in (logits, top_k, *numbers, out)] + [width]
                blocks = rows * (8 if name.endswith("8") else 1)
                call = Call(cuda, variant.function(("sample",), name), (blocks, 1, 1), 1024, 0, arguments)
                out.fill_(-1)
                run([call])
                wrong = float((out.long() != best).float().mean())
                table.add(f"{name}, {rows} rows, k {k}", variant, microseconds([call] * 16) / 16, rows * width * 2, wrong)


def layers(cuda, variants, table):
    """Whole layers of 8B in their order, one stream: what a step is made of."""
    count = 6
    weights = [[[Weight(cuda, n, k) for n in ns] for ns, k in (([4096, 1024, 1024], 4096), ([4096], 4096), ([14336, 14336], 4096), ([4096], 14336))]
               for _ in range(count)]
    norms = [random(4096) for _ in range(2 * count)]
    size = sum(w.bytes for group in weights[0] for w in group)
    for keys in (128, 512, 2048):
        at = Attention(1, keys, 32, 8, 128, count)
        x, y, inner = random(1, 4096), random(1, 4096), random(1, 14336)
        for variant in variants:
            ways = [("", at.apart)] + ([(" one", at.together)] if variant.has_decode else [])
            for suffix, way in ways:
                calls = []
                for i, (qkv, o, wide, down) in enumerate(weights):
                    calls.append(stream_call(cuda, variant, qkv, x, [at.q, at.k, at.v], norms[2 * i]))
                    calls += way(cuda, variant, i)
                    calls.append(stream_call(cuda, variant, o, at.out, [y], residual=x))
                    calls.append(stream_call(cuda, variant, wide, y, [None, None], norms[2 * i + 1], gated=inner))
                    calls.append(stream_call(cuda, variant, down, inner, [x], residual=y))
                table.add(f"layer of 8B, {keys} keys{suffix}", variant, microseconds(calls * 2) / (2 * count), size, 0.0)
        del at


class Table:
    """What was measured, printed part by part."""

    def __init__(self, variants):
        self.names = [v.name for v in variants]
        self.rows = {}
        self.bad = []

    def add(self, case, variant, taken, size, worst):
        self.rows.setdefault(case, {})[variant.name] = (taken, size, worst)
        if not worst <= WORST_ERROR:
            self.bad.append(f"{case} [{variant.name}]: error {worst}")

    def show(self, part):
        print(f"{part:38}" + "".join(f"{n:>14}" for n in self.names) + f"{'worst error':>14}")
        for case, found in self.rows.items():
            cells = [f"{found[n][0]:8.2f} {found[n][1] / found[n][0] / 1000:5.0f}" if n in found else "-" for n in self.names]
            print(f"{case:38}" + "".join(f"{c:>14}" for c in cells) + f"{max(f[2] for f in found.values()):14.1e}")
        self.rows = {}
        sys.stdout.flush()


def asked(arguments, parts):
    """Folders with what comes with them, and the parts that are wanted."""
    # Of the program that this is part of.
    text = sys.modules["__main__"].__doc__
    if {"-h", "--help"} & set(arguments):
        print(text)
        raise SystemExit(0)
    chosen, given, left = list(parts), [], list(arguments)
    while left:
        argument = left.pop(0)
        if argument in ("--only", "--skip"):
            words = left.pop(0).split(",") if left else []
            if not words or not set(words) <= set(parts):
                raise SystemExit(f"{argument}: expected some of {','.join(parts)}, found {','.join(words) or 'nothing'}")
            chosen = words if argument == "--only" else [c for c in chosen if c not in words]
        elif argument.startswith("-"):
            raise SystemExit(f"there is no option {argument}; --help tells what there is")
        else:
            given.append(argument)
    if not given:
        raise SystemExit(f"{text}\nexpected a folder with the kernels' texts")
    return given, chosen


def check_device():
    """These are launches of one generation of devices; the backend has others for the rest, which the conformance suite checks."""
    if MISSING:
        raise SystemExit(f"{sys.executable} has no torch, which the kernels are compared with: {MISSING}")
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device: `nvidia-smi` tells whether there is one, and CUDA_VISIBLE_DEVICES can hide it")
    found = torch.cuda.get_device_capability()
    if found != (9, 0):
        raise SystemExit(f"the kernels by themselves are checked and timed on devices of compute capability 9.0, and this one, "
                         f"{torch.cuda.get_device_name()}, has {found[0]}.{found[1]}; those that the backend uses here are what the conformance suite checks")


def main(arguments, parts, kind=Variant):
    given, chosen = asked(arguments, parts)
    check_device()
    torch.cuda.init()
    torch.zeros(1, device=DEVICE)
    torch.backends.cuda.matmul.allow_tf32 = False
    cuda = Cuda()
    variants = [kind(cuda, g) for g in given]
    jobs, modules = {}, {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for variant in variants:
            for key, files, defines in variant.wanted():
                what = (variant.text(files), *defines)
                jobs[what] = jobs.get(what) or pool.submit(cuda.compile, what[0], defines, "sm_90a" if "group.cuh" in files else "sm_90")
        for variant in variants:
            for key, files, defines in variant.wanted():
                what = (variant.text(files), *defines)
                modules[what] = modules.get(what) or cuda.load(jobs[what].result())
                variant.modules[key] = modules[what]
    print(f"{torch.cuda.get_device_name()}; microseconds a launch, GB/s; names: " + "; ".join(arguments))
    table = Table(variants)
    for name in chosen:
        start = time.monotonic()
        try:
            parts[name](cuda, variants, table)
        except (RuntimeError, ValueError, KeyError) as problem:
            # What was measured before is still worth its time.
            table.bad.append(f"{name}: {type(problem).__name__}: {problem}")
        table.show(f"{name}, {time.monotonic() - start:.0f} s")
    print("\n".join([f"WRONG ({len(table.bad)}):"] + table.bad[:20] if table.bad else [f"all results within {WORST_ERROR}"]))
    return 1 if table.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], {"products": products, "sample": samples, "layers": layers, "attention": attentions}))
