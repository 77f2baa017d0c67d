#!/usr/bin/env python3
"""Checks and times the CUDA backend's kernels of a mixture of experts, in Qwen3-30B-A3B's shape, on the device that is there.

    python3 mixture.py [NAME=]FOLDER[,-DKEY=VALUE...][,KEY=VALUE...] ... [--only WORD,...] [--skip WORD,...]

As kernels.py, which it uses. KEY: `tiles` (of a block of `pairs_gated`);
`carveout` (per cent of a multiprocessor's fast memory that kernels prefer to be shared; with a define of its own, since kernels of
equal texts are the same). Times of experts are of launches whose choices differ, so
that their weights come from memory; GB/s count every expert that was chosen once.
"""
import struct
import sys

from kernels import (COLD_BYTES, DEVICE, EPS, GROUP_SIZE, MISSING, Attention, Call, Variant, Weight, error, main, microseconds, normed, poison,
                     random, run, stream_call)

if not MISSING:
    import torch

HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8
HEADS, KV_HEADS, WIDTH = 32, 4, 128
SILU = 1
# `CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`.
CARVEOUT = 9
TILE_BYTES = 200 << 10


class MixtureVariant(Variant):
    """Texts of a mixture's layer."""

    def wanted(self):
        base = ["F16=0"] + self.defines
        form = ["WEIGHT_BITS=4", f"GROUP_SIZE={GROUP_SIZE}"]
        newer = self.there("engine.cuh", "raw.cuh", "lines.cuh", "experts.cu", "grouped.cu", "pairs.cu", "experts_streamed.cu")
        experts = newer if self.has("pairs.cu") else ["experts.cu"]
        yield ("experts",), ["common.cuh", "few.cuh", *experts], base + form
        yield ("choice",), ["common.cuh", "choice.cu"], base + ["LOGITS_F32=0"]
        if self.has("router.cu"):
            yield ("router",), ["common.cuh", "few.cuh", "cluster.cuh", "choice.cu", "router.cu"], base + form + ["LOGITS_F32=0"]
        if self.has("clustered.cu"):
            yield ("clustered",), ["common.cuh", "few.cuh", "cluster.cuh", "raw.cuh", "clustered.cu"], base + form
        tiles = ["TILE_TEAMS=2", f"TILE_BYTES={TILE_BYTES}", "TILE_GROUPED=0"]
        yield ("tiled",), ["common.cuh", "engine.cuh", "group.cuh", "tiled.cu"], base + form + tiles
        yield ("product",), ["common.cuh", "few.cuh", "product.cu"], base + form
        yield ("attention", WIDTH, 8), ["common.cuh", *self.there("paged.cuh"), "attention.cu"], base + [f"HEAD_WIDTH={WIDTH}", "GROUP_HEADS=8"]
        for job in super().wanted():
            if job[0][0] in ("streamed", "rows") or job[0][:2] == ("decode", WIDTH):
                yield job

    def function(self, key, name, shared=0):
        found = super().function(key, name, shared)
        if "carveout" in self.options:
            self.cuda.checked(self.cuda.driver.cuFuncSetAttribute(found, CARVEOUT, self.options["carveout"]), name)
        return found

    def has(self, file):
        return bool(self.there(file))


def stack(w):
    return struct.pack("3Q", w.words.data_ptr(), w.scales.data_ptr(), w.biases.data_ptr())


class Experts:
    """Stacks of a layer, and rows that are distributed over them by choices of their own for each launch."""

    def __init__(self, cuda, rows, launches):
        self.rows, self.pairs = rows, rows * CHOSEN
        self.gate, self.up = [Weight(cuda, EXPERTS * INNER, HIDDEN) for _ in range(2)]
        self.down = Weight(cuda, EXPERTS * HIDDEN, INNER)
        self.shape(rows, launches)

    def shape(self, rows, launches):
        self.rows, self.pairs = rows, rows * CHOSEN
        # One row after another takes all experts in turns, so that few launches have read them all.
        orders = torch.cat([torch.rand(EXPERTS, device=DEVICE).argsort() for _ in range(-(-launches * self.pairs // EXPERTS))])
        self.choices = [orders[i * self.pairs:(i + 1) * self.pairs].int().contiguous() for i in range(launches)]
        if rows * CHOSEN >= EXPERTS // 2:
            # As a router would: experts of a row differ, those of rows are any.
            self.choices = [torch.rand(rows, EXPERTS, device=DEVICE).topk(CHOSEN).indices.int().reshape(-1).contiguous()
                            for _ in range(launches)]
        self.used = sum(len(torch.unique(c)) for c in self.choices) / launches
        self.x, self.residual = random(rows, HIDDEN), random(rows, HIDDEN)
        self.weights = torch.rand(rows, CHOSEN, device=DEVICE).bfloat16()
        self.both = torch.empty(self.pairs, INNER, device=DEVICE, dtype=torch.bfloat16)
        self.y = torch.empty(self.pairs, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        self.out = torch.empty(rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        self.most_groups = min(self.pairs, EXPERTS + self.pairs // 8)
        # Number of groups, groups, rows and places, for each choice.
        self.orders = {c.data_ptr(): torch.zeros(4 + 4 * self.most_groups + 2 * self.pairs, device=DEVICE, dtype=torch.int32)
                       for c in self.choices}

    def bytes(self, n, k):
        return int(self.used * (n * k // 2 + 4 * n * k // GROUP_SIZE))

    def exact(self, choice):
        """Gated activations of the pairs, and the result, in float64."""
        both = torch.empty(self.pairs, INNER, device=DEVICE, dtype=torch.float64)
        total = self.residual.double()
        for e in torch.unique(choice).tolist():
            at = (choice == e).nonzero().flatten()
            x = self.x[at // CHOSEN].double()
            gate, up = [x @ w.matrix(e * INNER, INNER).T for w in (self.gate, self.up)]
            both[at] = torch.nn.functional.silu(gate) * up
            y = both[at] @ self.down.matrix(e * HIDDEN, HIDDEN).T
            total.index_add_(0, at // CHOSEN, y * self.weights.reshape(-1)[at].double().unsqueeze(1))
        return both, total

    # Each pair for itself.

    def single_gated(self, cuda, variant, choice):
        return [Call(cuda, variant.function(("experts",), "experts_gated"), (INNER // 16, self.pairs, 1), 256, 0,
                     [stack(self.gate), stack(self.up), self.x.data_ptr(), self.both.data_ptr(), choice.data_ptr(), 0, 0, 0,
                      CHOSEN, EXPERTS, INNER, HIDDEN, SILU])]

    def single_summed(self, cuda, variant, choice):
        return [Call(cuda, variant.function(("experts",), "experts_summed"), (HIDDEN // 16, self.rows, 1), 256, 0, self.of_summed(choice))]

    def of_summed(self, choice):
        return [stack(self.down), self.both.data_ptr(), self.out.data_ptr(), choice.data_ptr(), self.weights.data_ptr(),
                self.residual.data_ptr(), CHOSEN, EXPERTS, HIDDEN, INNER]

    def apart_gated(self, cuda, variant, choice):
        tiles = variant.options.get("tiles", 3)
        shared = tiles * (8 * HIDDEN + 64 * HIDDEN // GROUP_SIZE + 40) + 2 * HIDDEN + 2 * (4 * HIDDEN // GROUP_SIZE + 32) + 8
        return [Call(cuda, variant.function(("experts",), "pairs_gated", cuda.most_shared), (-(-INNER // (8 * tiles)), self.pairs, 1),
                     128 * tiles, shared,
                     [self.gate.maps.data_ptr(), self.up.maps.data_ptr(), stack(self.gate), stack(self.up), self.x.data_ptr(), self.both.data_ptr(), choice.data_ptr(), CHOSEN, EXPERTS, INNER,
                      HIDDEN, SILU])]

    def apart_summed(self, cuda, variant, choice):
        shared = 8 * (64 + 16 * (INNER // 2 + 32) + 64 * INNER // GROUP_SIZE + 2 * INNER)
        return [Call(cuda, variant.function(("experts",), "pairs_summed", cuda.most_shared), (HIDDEN // 16, self.rows, 1), 256, shared,
                     self.of_summed(choice))]

    # In order of experts.

    def places(self, choice):
        count = self.orders[choice.data_ptr()].data_ptr()
        groups = count + 16
        rows = groups + 16 * self.most_groups
        return groups, count, rows, rows + 4 * self.pairs

    def ordered(self, cuda, variant, choice):
        return [Call(cuda, variant.function(("choice",), "group_pairs"), (1, 1, 1), 1024, 4 * 32 * EXPERTS,
                     [choice.data_ptr(), *self.places(choice), self.pairs, EXPERTS, CHOSEN, 8, 32])]

    def grouped_gated(self, cuda, variant, choice):
        groups, count, rows, _ = self.places(choice)
        return [Call(cuda, variant.function(("experts",), "grouped_gated", cuda.most_shared), (INNER // 64, self.most_groups, 1), 256,
                     8 * 2 * HIDDEN,
                     [stack(self.gate), stack(self.up), self.x.data_ptr(), self.both.data_ptr(), choice.data_ptr(), groups, count, rows,
                      CHOSEN, EXPERTS, INNER, HIDDEN, SILU])]

    def grouped_product(self, cuda, variant, choice):
        groups, count, _, _ = self.places(choice)
        return [Call(cuda, variant.function(("experts",), "grouped_product", cuda.most_shared), (HIDDEN // 128, self.most_groups, 1), 256,
                     8 * 2 * INNER,
                     [stack(self.down), self.both.data_ptr(), self.y.data_ptr(), choice.data_ptr(), groups, count, 0, EXPERTS, HIDDEN, INNER])]

    def flow(self, cuda, variant, choice, form, k, n, stacks, x, out, rows, is_gated):
        """`form`: warps, values of K in a part, parts of a warp under way."""
        warps, part, stages = form
        groups = k // GROUP_SIZE
        fixed = warps * (stages * (part * 8 + 8) + 8 * 16 * groups) + 32
        room = min(64, (cuda.most_shared - fixed) // (2 * k + 4 * groups))
        if room < 8:
            return None
        places = self.places(choice)
        record = b""
        for pointers in ([w.maps.data_ptr() for w in stacks], [w.scales.data_ptr() for w in stacks], [w.biases.data_ptr() for w in stacks],
                         [x.data_ptr(), out.data_ptr()], [places[0], places[1]], [rows]):
            record += struct.pack(f"{len(pointers)}Q", *pointers)
        record += struct.pack("6i", n, k, part, stages, room, SILU)
        name = "streamed_gated" if is_gated else "streamed_product"
        return [Call(cuda, variant.function(("experts",), name, cuda.most_shared), (cuda.processors, 1, 1), 32 * warps,
                     fixed + room * (2 * k + 4 * groups), [record])]

    def flow_gated(self, cuda, variant, choice, form=(12, 512, 2)):
        return self.flow(cuda, variant, choice, form, HIDDEN, INNER, [self.gate, self.up], self.x, self.both, self.places(choice)[2], True)

    def flow_product(self, cuda, variant, choice, form=(12, 768, 2)):
        return self.flow(cuda, variant, choice, form, INNER, HIDDEN, [self.down, self.down], self.both, self.y, 0, False)

    def sum_pairs(self, cuda, variant, choice):
        return [Call(cuda, variant.function(("choice",), "sum_pairs"), (self.rows, HIDDEN // 1024, 1), 256, 0,
                     [self.y.data_ptr(), self.places(choice)[3], self.weights.data_ptr(), self.residual.data_ptr(), self.out.data_ptr(), CHOSEN,
                      HIDDEN // 2])]

    def ways(self, variant):
        """Kernels of each way, by name."""
        single = {"single": [self.single_gated, self.single_summed]}
        apart = {"apart": [self.apart_gated, self.apart_summed]} if variant.has("pairs.cu") else {}
        grouped = {"grouped": [self.ordered, self.grouped_gated, self.grouped_product, self.sum_pairs]}
        flow = {"flow": [self.ordered, self.flow_gated, self.flow_product, self.sum_pairs]} if variant.has("experts_streamed.cu") else {}
        return (single | apart if self.pairs <= 64 else {}) | (grouped | flow if self.pairs > 8 else {})


def experts(cuda, variants, table):
    at, launches = Experts(cuda, 1, 1), 32
    for rows in (1, 2, 4, 8, 32, 64):
        at.shape(rows, launches)
        both, total = at.exact(at.choices[0])
        sizes = [at.bytes(2 * INNER, HIDDEN), at.bytes(HIDDEN, INNER)]
        for variant in variants:
            for name, makers in at.ways(variant).items():
                poison(at.both, at.y, at.out)
                run([c for make in makers for c in make(cuda, variant, at.choices[0])])
                worst = error(at.out, total)
                if name in ("single", "apart"):
                    worst = max(worst, error(at.both, both))
                run([c for choice in at.choices for c in at.ordered(cuda, variant, choice)])
                for make in makers:
                    calls = [c for choice in at.choices for c in make(cuda, variant, choice)]
                    size = sizes[0] if "gated" in make.__name__ else sizes[1] if "product" in make.__name__ or "summed" in make.__name__ else 0
                    table.add(f"{make.__name__}, {rows} rows", variant, microseconds(calls) / launches, size, worst)
                calls = [c for choice in at.choices for make in makers for c in make(cuda, variant, choice)]
                table.add(f"{name} all, {rows} rows", variant, microseconds(calls) / launches, sum(sizes), worst)


def flows(cuda, variants, table):
    """How `streamed_gated` and `streamed_product` divide their work."""
    at, launches = Experts(cuda, 1, 1), 16
    gated = [(8, 512, 4), (8, 1024, 2), (12, 512, 2), (12, 256, 4), (16, 256, 3), (16, 256, 2)]
    product = [(8, 768, 2), (12, 768, 2), (12, 256, 4), (16, 256, 3), (16, 256, 4), (16, 512, 2)]
    for rows in (4, 8, 32, 64):
        at.shape(rows, launches)
        both, total = at.exact(at.choices[0])
        sizes = [at.bytes(2 * INNER, HIDDEN), at.bytes(HIDDEN, INNER)]
        for variant in variants:
            if not variant.has("experts_streamed.cu"):
                continue
            for forms, make, size in ((gated, at.flow_gated, sizes[0]), (product, at.flow_product, sizes[1])):
                for form in forms:
                    if make(cuda, variant, at.choices[0], form) is None:
                        continue
                    own = {make: form}
                    poison(at.both, at.y, at.out)
                    chain = [m(cuda, variant, at.choices[0], *([own[m]] if m in own else []))
                             for m in (at.ordered, at.flow_gated, at.flow_product, at.sum_pairs)]
                    run([c for calls in chain for c in calls])
                    worst = error(at.out, total)
                    run([c for choice in at.choices for c in at.ordered(cuda, variant, choice)])
                    calls = [c for choice in at.choices for c in make(cuda, variant, choice, form)]
                    table.add(f"{make.__name__} {form}, {rows} rows", variant, microseconds(calls) / launches, size, worst)


class Routed:
    """A norm, a router's product, and the choice."""

    def __init__(self, cuda, rows):
        self.rows, self.w, self.norm = rows, Weight(cuda, EXPERTS, HIDDEN), random(HIDDEN)
        self.x, self.added = random(rows, HIDDEN), random(rows, HIDDEN)
        self.total, self.normed = torch.empty_like(self.x), torch.empty_like(self.x)
        self.logits = torch.empty(rows, EXPERTS, device=DEVICE, dtype=torch.bfloat16)
        self.experts = torch.empty(rows, CHOSEN, device=DEVICE, dtype=torch.int32)
        self.weights = torch.empty(rows, CHOSEN, device=DEVICE, dtype=torch.bfloat16)

    def apart(self, cuda, variant):
        norm = Call(cuda, variant.function(("rows",), "rms_norm"), (self.rows, 1, 1), 256, 0,
                    [self.x.data_ptr(), self.added.data_ptr(), self.norm.data_ptr(), self.total.data_ptr(), self.normed.data_ptr(), HIDDEN, EPS])
        product = stream_call(cuda, variant, [self.w], self.normed, [self.logits])
        route = Call(cuda, variant.function(("choice",), "route_4"), (-(-self.rows // 8), 1, 1), 256, 0,
                     [self.logits.data_ptr(), self.experts.data_ptr(), self.weights.data_ptr(), self.rows, EXPERTS, CHOSEN, 1])
        return [norm, product, route]

    def together(self, cuda, variant):
        tensors = (self.w.words, self.w.scales, self.w.biases, self.x, self.added, self.total, self.normed, self.logits, self.experts,
                   self.weights, self.norm)
        record = struct.pack("12Qfi6i", *[t.data_ptr() for t in tensors], 0, EPS, 2, self.rows, EXPERTS, HIDDEN, CHOSEN, 1, 0)
        return [Call(cuda, variant.function(("router",), "router_4", 8 * (2 * 8192 + 16)), (8, -(-self.rows // 8), 1), 256,
                     min(8, self.rows) * (2 * HIDDEN + 16), [record])]

    def check(self, calls):
        poison(self.total, self.normed, self.logits, self.weights)
        self.experts.fill_(-1)
        run(calls)
        total = self.x.double() + self.added.double()
        exact = normed(total.bfloat16(), self.norm)
        worst = max(error(self.total, total), error(self.normed, exact), error(self.logits, self.w.times(self.normed)))
        # The first of equals is taken, and of what was rounded.
        order = self.logits.double().sort(stable=True, dim=-1, descending=True)
        if not torch.equal(self.experts.long(), order.indices[:, :CHOSEN]):
            return float("nan")
        return max(worst, error(self.weights, order.values[:, :CHOSEN].softmax(-1)))


def routers(cuda, variants, table):
    for rows in (1, 8, 32):
        at = Routed(cuda, rows)
        for variant in variants:
            ways = ([("apart", at.apart)] if rows <= 4 else []) + ([("one", at.together)] if variant.has("router.cu") else [])
            for name, way in ways:
                calls = way(cuda, variant)
                worst = at.check(calls)
                table.add(f"norm, router, choice {name}, {rows} rows", variant, microseconds(calls * 32) / 32, at.w.bytes, worst)
        calls = [Call(cuda, variants[0].function(("choice",), "route_4"), (-(-rows // 8), 1, 1), 256, 0,
                      [at.logits.data_ptr(), at.experts.data_ptr(), at.weights.data_ptr(), rows, EXPERTS, CHOSEN, 1])]
        table.add(f"route_4, {rows} rows", variants[0], microseconds(calls * 32) / 32, 0, 0.0)


class Dense:
    """Products of one input, in the kernels for several rows."""

    kept = []

    def __init__(self, cuda, ns, k):
        self.k, self.weights = k, [Weight(cuda, n, k) for n in ns]
        maps = [cuda.tensor_map(2, w.words.data_ptr(), w.n, k // 8, k // 2, 128, 32, True) for w in self.weights]
        self.maps = [torch.frombuffer(bytearray(m), dtype=torch.uint8).to(DEVICE) for m in maps]
        self.bytes = sum(w.bytes for w in self.weights)

    def of_sums(self):
        """Parts of sums, and counters that are zero whenever nothing runs."""
        if not Dense.kept:
            Dense.kept = [torch.zeros(1 << 24, device=DEVICE), torch.zeros(1 << 16, device=DEVICE, dtype=torch.int32)]
        return [t.data_ptr() for t in Dense.kept]

    def record(self, each, words, outs):
        starts, tiles = [2**31 - 1] * 3, 0
        for i, w in enumerate(self.weights):
            starts[i] = tiles
            tiles += -(-w.n // each)
        fields = [words, [w.scales for w in self.weights], [w.biases for w in self.weights], outs]
        record = b"".join(struct.pack("3Q", *([t.data_ptr() for t in field] + [0] * 3)[:3]) for field in fields)
        return record + struct.pack("6i", *([w.n for w in self.weights] + [0] * 3)[:3], *starts), tiles

    def clustered(self, cuda, variant, x, outs, norm, residual):
        columns = next(c for c in (8, 16) if x.shape[0] <= c)
        record, tiles = self.record(128, [w.words for w in self.weights], outs)
        slice_k = self.k // 8
        shared = columns * (slice_k * 2 + slice_k // GROUP_SIZE * 4 + 128 * 4 + 4)
        around = struct.pack("QQfi", norm.data_ptr() if norm is not None else 0, residual.data_ptr() if residual is not None else 0, EPS,
                             0 if norm is None else 2)
        return [Call(cuda, variant.function(("clustered",), f"clustered_{columns}", cuda.most_shared), (tiles * 8, 1, 1), 256, shared,
                     [record, x.data_ptr(), self.k, x.shape[0], around])]

    def before(self, cuda, variant, x, outs, norm, residual, normed_x, made):
        """A norm, the product, and a sum, each by itself."""
        calls, rows = [], x.shape[0]
        if norm is not None:
            calls.append(Call(cuda, variant.function(("rows",), "rms_norm"), (rows, 1, 1), 256, 0,
                              [x.data_ptr(), 0, norm.data_ptr(), 0, normed_x.data_ptr(), self.k, EPS]))
            x = normed_x
        to = outs if residual is None else made
        if rows <= 8:
            record, tiles = self.record(32, [w.words for w in self.weights], to)
            calls.append(Call(cuda, variant.function(("product",), "few_rows_2"), (tiles, 1, 1), 256, 0,
                              [record, x.data_ptr(), self.k, rows, struct.pack("QQfi", 0, 0, 0.0, 0)]))
        else:
            columns = next(c for c in (16, 32, 64) if rows <= c)
            record, tiles = self.record(128, self.maps, to)
            stage = 128 * 128 + columns * 512
            blocks = min(cuda.processors, tiles * self.k // 256)
            x_map = cuda.tensor_map(1, x.data_ptr(), rows, self.k, 2 * self.k, columns, 64, True)
            calls.append(Call(cuda, variant.function(("tiled",), f"tiled_{columns}", cuda.most_shared), (blocks, 1, 1), 288,
                              min(12, TILE_BYTES // stage) * (stage + 16),
                              [record, x_map, *self.of_sums(), self.k, rows, tiles, 0]))
        if residual is not None:
            pairs = residual.numel() // 2
            calls.append(Call(cuda, variant.function(("rows",), "combine"), (min(4096, -(-pairs // 256)), 1, 1), 256, 0,
                              [made[0].data_ptr(), residual.data_ptr(), outs[0].data_ptr(), pairs, pairs, 0]))
        return calls


def dense(cuda, variants, table):
    """Queries, keys and values with their norm, and the output with its sum."""
    for name, ns, k in (("qkv", [4096, 512, 512], HIDDEN), ("o", [HIDDEN], 4096), ("qkv of 8B", [4096, 1024, 1024], 4096), ("o of 8B", [4096], 4096)):
        sets = [Dense(cuda, ns, k) for _ in range(max(2, min(48, COLD_BYTES // (sum(ns) * k * 9 // 16))))]
        for rows in (8, 16, 32):
            x, norm = random(rows, k), random(k) if len(ns) > 1 else None
            residual = None if len(ns) > 1 else random(rows, ns[0])
            outs, made = [[torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16) for n in ns] for _ in range(2)]
            normed_x, exact_x = torch.empty_like(x), x.double() if norm is None else normed(x, norm)
            exact = [w.times(exact_x) + (0 if residual is None else residual.double()) for w in sets[0].weights]
            for variant in variants:
                ways = [("before", lambda s: s.before(cuda, variant, x, outs, norm, residual, normed_x, made))]
                if variant.has("clustered.cu") and rows <= 16:
                    ways.append(("clustered", lambda s: s.clustered(cuda, variant, x, outs, norm, residual)))
                for way, make in ways:
                    poison(*outs, normed_x, *made)
                    run(make(sets[0]))
                    worst = max(error(o, e) for o, e in zip(outs, exact))
                    calls = [c for s in sets for c in make(s)]
                    table.add(f"{name} {way}, {rows} rows", variant, microseconds(calls) / len(sets), sets[0].bytes, worst)
        del sets


def heads(cuda, variants, table):
    """Attention of a step of decoding with norms of heads."""
    for sequences, keys in ((1, 128), (1, 2048), (8, 128), (8, 512), (8, 2048), (32, 128), (32, 512), (32, 2048)):
        size = sequences * keys * KV_HEADS * WIDTH * 4
        layers = max(1, min(100, COLD_BYTES // size))
        at = Attention(sequences, keys, HEADS, KV_HEADS, WIDTH, layers, is_normed=True)
        for variant in variants:
            ways = [("apart", at.apart)] + ([("one", at.together)] if variant.has_head_norms else [])
            for name, way in ways:
                worst = at.check(way(cuda, variant, 0))
                calls = [c for layer in range(layers) for c in way(cuda, variant, layer)]
                table.add(f"heads {name}, {sequences} x {keys}", variant, microseconds(calls) / layers, at.bytes, worst)
        del at


def layers(cuda, variants, table):
    """Whole layers in their order, as a step has them and with the kernels of before."""
    for rows, count in ((1, 6), (8, 6), (32, 4)):
        at = Attention(rows, 128, HEADS, KV_HEADS, WIDTH, count, is_normed=True)
        mix, routed = Experts(cuda, rows, count), Routed(cuda, rows)
        weights = [[Dense(cuda, [4096, 512, 512], HIDDEN), Dense(cuda, [HIDDEN], 4096)] for _ in range(count)]
        norm, x, normed_x, made = random(HIDDEN), random(rows, HIDDEN), random(rows, HIDDEN), [random(rows, HIDDEN)]
        mix.x, mix.residual = routed.normed, routed.x
        size = sum(w.bytes for w in weights[0]) + mix.bytes(3 * INNER, HIDDEN) + routed.w.bytes
        outs = [at.q, at.k, at.v]
        for variant in variants:
            if rows == 1:
                def products(qkv, o, _):
                    return ([stream_call(cuda, variant, qkv.weights, x, outs, norm)],
                            [stream_call(cuda, variant, o.weights, at.out, [routed.x], residual=x)])
            else:
                def products(qkv, o, is_new):
                    if is_new and rows <= 16:
                        return qkv.clustered(cuda, variant, x, outs, norm, None), o.clustered(cuda, variant, at.out, [routed.x], None, x)
                    return (qkv.before(cuda, variant, x, outs, norm, None, normed_x, made),
                            o.before(cuda, variant, at.out, [routed.x], None, x, normed_x, made))
            ways = mix.ways(variant)
            names = [("before", "grouped" if rows > 8 else "single"), ("apart", "apart"), ("flow", "flow")]
            for name, way in names:
                if way not in ways or (name != "before" and not variant.has("clustered.cu")):
                    continue
                is_new, calls = name != "before", []
                for i, (qkv, o) in enumerate(weights):
                    first, second = products(qkv, o, is_new)
                    calls += first + (at.together if is_new else at.apart)(cuda, variant, i) + second
                    calls += (routed.together if is_new or rows > 4 else routed.apart)(cuda, variant)
                    calls += [c for make in ways[way] for c in make(cuda, variant, mix.choices[i])]
                run(calls)
                table.add(f"layer, {rows} rows x 128 keys {name}", variant, microseconds(calls * 4) / (4 * count), size, 0.0)
        del at, mix, weights


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], {"layers": layers, "experts": experts, "flows": flows, "routers": routers, "heads": heads,
                                "dense": dense}, MixtureVariant))
