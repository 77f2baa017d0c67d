#!/usr/bin/env python3
"""The conformance suite in several processes: conformance.py PROGRAM PLUGINS BACKEND [--processes N] [--seconds S] ...

PROGRAM is `conformance` of the bundle, PLUGINS a folder of plugins, BACKEND a name or `reference`. Cases are handed out in small pieces. A process
that dies, answers nothing for --case-seconds or computes nothing any more costs the case it was at, no other: the rest of its piece
goes to a new one. After --seconds all that did not run is counted as such. Ends with 0 where every case passed, with 1 otherwise.

MLX compiles kernels when they are needed. Each process has a cache of compiled ones of its own, since MLX does not write them whole; what a process
has finished is given to the others between pieces. --cache names a folder that they are taken from and kept in.
"""

import argparse
import collections
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

# Groups with most kernels to compile, which go last: some take half a minute each, and the others shall be known by then.
LAST = ("mixture", "fused", "composed", "quantization")
DTYPE = re.compile(r"\b(bf16|f16|f32)\b", re.IGNORECASE)
TMPFS = "/dev/shm"


class Cache:
    """Compiled kernels that are whole, for processes that have a folder each."""

    def __init__(self, home, kept):
        self.pool, self.kept, self.lock = os.path.join(home, "pool"), kept, threading.Lock()
        os.makedirs(self.pool)
        if kept and os.path.isdir(kept):
            shutil.copytree(kept, self.pool, dirs_exist_ok=True)
        self.names = self.files(self.pool)

    @staticmethod
    def files(folder):
        return {os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names}

    @staticmethod
    def link(name, source, target):
        os.makedirs(os.path.dirname(os.path.join(target, name)), exist_ok=True)
        os.link(os.path.join(source, name), os.path.join(target, name))

    def exchange(self, folder):
        """What an idle process has goes to the others, and theirs to it. Names never change what they stand for."""
        own = self.files(folder)
        with self.lock:
            for name in own - self.names:
                self.link(name, folder, self.pool)
            self.names |= own
            lacking = self.names - own
        for name in lacking:
            self.link(name, self.pool, folder)

    def keep(self):
        if self.kept:
            shutil.copytree(self.pool, self.kept, dirs_exist_ok=True)
        return sum(1 for name in self.names if name.endswith(".ptx"))


class Gone(Exception):
    """Why a process can do no more."""


class Worker:
    def __init__(self, command, folder, log):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.lines = folder, queue.Queue()
        environment = os.environ | {"MLX_PTX_CACHE_DIR": folder}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, request):
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Gone(f"the process takes no requests: {error}") from error

    def answer(self, seconds):
        """The next line of JSON."""
        until = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(until - time.monotonic(), 0.001))
            except queue.Empty:
                raise Gone(f"no answer within {seconds:.0f} s") from None
            if line is None:
                code = self.process.wait()
                raise Gone(f"the process ended with {'signal ' if code < 0 else ''}{abs(code)}")
            if line.startswith("{"):
                return json.loads(line)

    def end(self):
        self.process.kill()
        self.process.wait()


class Run:
    """What is left to do, and what came of the rest."""

    def __init__(self, args, cache, home, log):
        self.args, self.cache, self.home, self.log = args, cache, home, log
        self.until = time.monotonic() + args.seconds
        self.lock, self.pieces, self.busy = threading.Condition(), collections.deque(), 0
        self.cases, self.outcomes, self.seconds, self.problems = {}, {}, collections.Counter(), []

    def worker(self, number):
        command = [self.args.program, self.args.plugins, self.args.backend, self.args.options]
        worker = Worker(command, os.path.join(self.home, f"cache-{number}"), self.log)
        try:
            worker.answer(self.left(60))
        except Gone:
            worker.end()
            raise
        return worker

    def left(self, most):
        left = self.until - time.monotonic()
        if left <= 0:
            raise Gone("the time of the run is over")
        return min(left, most)

    def list_cases(self):
        worker = self.worker("list")
        worker.ask("groups")
        while "group" in (line := worker.answer(self.left(60))):
            self.cases[line["group"]] = line["cases"]
        worker.end()
        chosen = self.args.groups.split(",") if self.args.groups else list(self.cases)
        if unknown := set(chosen) - set(self.cases):
            sys.exit(f"--groups: there is no group called {', '.join(sorted(unknown))}; there are {', '.join(self.cases)}")
        self.cases = {name: count for name, count in self.cases.items() if name in chosen}
        for name in sorted(self.cases, key=lambda name: LAST.index(name) if name in LAST else -1):
            size = self.args.piece if name in LAST else 4 * self.args.piece
            for start in range(0, self.cases[name], size):
                self.pieces.append((name, start, min(start + size, self.cases[name])))

    def next_piece(self):
        """A piece, or none where nothing is left: what is under way elsewhere may come back."""
        with self.lock:
            while not self.pieces and self.busy and time.monotonic() < self.until:
                self.lock.wait(1.0)
            if not self.pieces or time.monotonic() >= self.until:
                return None
            self.busy += 1
            return self.pieces.popleft()

    def finish(self, rest):
        with self.lock:
            self.busy -= 1
            if rest:
                self.pieces.append(rest)
            self.lock.notify_all()

    def record(self, group, place, case, failure, worst):
        with self.lock:
            self.outcomes[group, place] = (case, failure, worst)

    def serve(self, number):
        """One process after another until nothing is left to do."""
        worker, failures = None, 0
        while failures < 3 and (piece := self.next_piece()) is not None:
            rest, is_well = piece, False
            try:
                if worker is None:
                    worker = self.worker(number)
                self.cache.exchange(worker.folder)
                rest, is_well = self.piece(worker, *piece)
                failures = 0
            except Exception as error:  # others have to go on, whatever it is
                if time.monotonic() < self.until:
                    self.problems.append(f"process {number}: {error!r}")
                failures += 1
            self.finish(rest)
            if not is_well and worker is not None:
                worker.end()
                worker = None
        if worker is not None:
            self.cache.exchange(worker.folder)
            worker.end()

    def piece(self, worker, group, start, end):
        """Runs a piece; gives what is left of it, and whether the process can do more."""
        worker.ask(f"run {group} {start} {end}")
        place, case, began = start, None, time.monotonic()
        try:
            while True:
                line = worker.answer(self.left(self.args.case_seconds))
                if "begins" in line:
                    place, case, began = line["begins"], line["case"], time.monotonic()
                elif "ended" in line:
                    self.record(group, place, case, line["failure"], line["worst"])
                    self.seconds[case] += time.monotonic() - began
                    place, case = place + 1, None
                elif "broken" in line:
                    self.problems.append(f"{group}: the backend is broken before place {place}: {line['broken']}")
                    break
                elif "done" in line:
                    return None, True
        except Gone as gone:
            if time.monotonic() < self.until:
                name = case or f"{group}/place {place}"
                self.record(group, place, name, str(gone), 0.0)
                self.problems.append(f"{name}: {gone}")
                place += 1
        return ((group, place, end) if place < end else None), False

    def go(self):
        self.list_cases()
        threads = [threading.Thread(target=self.serve, args=(number,)) for number in range(self.args.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def table(run, took):
    print(f"conformance of {run.args.backend}: {run.args.processes} processes, {took:.0f} s")
    print("\n| group | cases | passed | failed | not run | worst share of the tolerance | seconds |\n|---|---:|---:|---:|---:|---:|---:|")
    total, types = collections.Counter(), collections.defaultdict(collections.Counter)
    for group, cases in run.cases.items():
        found = [outcome for (name, _), outcome in run.outcomes.items() if name == group]
        failed = sum(1 for _, failure, _ in found if failure)
        worst = max((worst for _, failure, worst in found if not failure and worst is not None), default=0.0)
        row = {"cases": cases, "passed": len(found) - failed, "failed": failed, "not run": cases - len(found)}
        total.update(row)
        for case, failure, _ in found:
            name = DTYPE.search(case)
            types[name.group(1).lower() if name else "other"].update(cases=1, passed=not failure, failed=bool(failure))
        seconds = sum(took for case, took in run.seconds.items() if case.startswith(group + "/"))
        print(f"| {group} | {' | '.join(str(value) for value in row.values())} | {worst:.2f} | {seconds:.0f} |")
    print(f"| all | {' | '.join(str(total[key]) for key in ('cases', 'passed', 'failed', 'not run'))} | | {sum(run.seconds.values()):.0f} |")
    if refused := [case for case, failure, worst in run.outcomes.values() if not failure and worst is None]:
        print(f"{len(refused)} of those that passed were refused by name, as they may be: {', '.join(sorted({case.split('/')[1] for case in refused}))}")
    for name, row in sorted(types.items()):
        print(f"{name}: {row['passed']} of {row['cases']} that ran passed")
    return total


def report(run, took, out):
    total = table(run, took)
    failures = [(case, failure) for _, (case, failure, _) in sorted(run.outcomes.items()) if failure]
    for case, failure in failures[:40]:
        print(f"FAILED  {case}\n        {failure}")
    if len(failures) > 40:
        print(f"... and {len(failures) - 40} more")
    for problem in run.problems[:20]:
        print(f"PROCESS {problem}")
    print("slowest cases:")
    for case, took in run.seconds.most_common(8):
        print(f"  {took:6.1f} s  {case}")
    if out:
        outcomes = [[case, failure, worst] for _, (case, failure, worst) in sorted(run.outcomes.items())]
        with open(os.path.join(out, "conformance.json"), "w", encoding="utf-8") as file:
            json.dump({"totals": total, "problems": run.problems, "outcomes": outcomes}, file, indent=0)
    return 0 if total["cases"] == total["passed"] > 0 else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("plugins")
    parser.add_argument("backend")
    parser.add_argument("--options", default="{}", help="what the backend is opened with, as JSON")
    parser.add_argument("--processes", type=int, default=min(24, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=180.0, help="for all of it")
    parser.add_argument("--case-seconds", type=float, default=240.0, help="for one case, in which MLX may compile kernels of its own")
    parser.add_argument("--piece", type=int, default=6, help="cases that a process is given at a time")
    parser.add_argument("--groups", default="", help="names with commas between them; all if not given")
    parser.add_argument("--cache", help="folder of compiled kernels, taken from and kept in")
    parser.add_argument("--out", help="folder for conformance.json and conformance.err")
    args = parser.parse_args()
    if not (os.path.isfile(args.program) and os.access(args.program, os.X_OK)):
        parser.error(f"{args.program} is no program: expected the bundle's bin/conformance, or what `cargo build -p mlxcel-tests --bin conformance` makes")
    if not os.path.isdir(args.plugins):
        parser.error(f"{args.plugins} is not a folder: expected one with plugins, such as the bundle's lib/mlxcel/plugins")
    home = tempfile.mkdtemp(prefix="mlxcel-conformance-", dir=TMPFS if os.path.isdir(TMPFS) else None)
    out = args.out or home
    try:
        try:
            os.makedirs(out, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {out}: {error.strerror}")
        with open(os.path.join(out, "conformance.err"), "w+", encoding="utf-8") as log:
            cache = Cache(home, args.cache)
            run, began = Run(args, cache, home, log), time.monotonic()
            try:
                run.go()
            except Gone as gone:
                log.seek(0)
                sys.exit(f"the cases cannot be listed: {gone}\n{log.read()[-4000:]}")
            code = report(run, time.monotonic() - began, args.out)
            print(f"{cache.keep()} compiled kernels of MLX in the cache")
            log.seek(0)
            print(log.read()[-1500:])
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
