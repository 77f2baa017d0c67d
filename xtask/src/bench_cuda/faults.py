#!/usr/bin/env python3
"""Checks what happens when memory runs out: faults.py MLXCEL FOLDER [BACKEND]. Takes less than a minute; ends with 1 if something is wrong.

One server has a budget for keys and values that a long prompt exceeds. The other is alone with a device that somebody else has
nearly filled. In both cases the request has to end with the error that names the cause, and the server has to live, say so, and give
its former answer to the next request.
"""

import atexit
import concurrent.futures
import ctypes
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

MIB = 1 << 20
# What the other process leaves: less than keys and values of the long prompt take in any model.
LEFT_BYTES = 32 * MIB
SHORT, MANY, LONG = 24, 100, 6000
TOKENS = 16


class Device:
    """The driver, as far as it takes to fill a device."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.check(self.cuda.cuInit(0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.cuda.cuCtxSetCurrent(context))

    @staticmethod
    def check(code):
        if code != 0:
            raise RuntimeError(f"the driver says {code}")

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def fill(self, left):
        """Takes all but `left` bytes, in pieces that get smaller where there is no room for larger ones."""
        piece = 64 << 30
        while piece >= 2 * MIB:
            address = ctypes.c_uint64()
            fits = self.free_bytes() >= piece + left
            if not fits or self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(piece)) != 0:
                piece //= 2
        return self.free_bytes()


def fill():
    """The process that has the device: until its input ends."""
    print(Device().fill(LEFT_BYTES), flush=True)
    sys.stdin.read()


def own_plugins(mlxcel):
    """Flags for the plugins that came with a program, which others that are installed on the machine would hide."""
    folder = os.path.join(os.path.dirname(os.path.realpath(shutil.which(mlxcel) or mlxcel)), os.pardir, "lib", "mlxcel", "plugins")
    return ["--plugins-dir", os.path.realpath(folder)] if os.path.isdir(folder) else []


class Server:
    def __init__(self, mlxcel, folder, backend, *flags):
        self.log = tempfile.TemporaryFile("w+")
        command = [mlxcel, "serve", folder, *own_plugins(mlxcel), "--backend", backend, "--port", "0", "--metrics", "--no-prefix-cache", *flags]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        except OSError as error:
            raise SystemExit(f"{mlxcel} cannot be started: {error.strerror}: expected the program mlxcel") from error
        # Whatever ends this program ends its server, which would keep the device's memory.
        atexit.register(self.process.kill)
        first = self.process.stdout.readline()
        if not first.startswith("listening on "):
            raise SystemExit(f"the server did not start: {first}{self.said()}")
        self.base = first.split()[2]
        if not self.base.startswith("http"):
            self.base = "http://" + self.base
        for _ in range(600):
            if self.ask("/health")[0] == 200:
                return
            threading.Event().wait(0.1)
        raise SystemExit(f"the server did not get ready: {self.said()}")

    def said(self):
        self.log.seek(0)
        return self.log.read()[-4000:]

    def ask(self, route, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + route, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise SystemExit(f"the server does not answer {route}: {error}; its process: {self.process.poll()}; it said: {self.said()}") from error

    def complete(self, length):
        prompt = [(7 * i + 11) % 1000 + 100 for i in range(length)]
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        status, text = self.ask("/v1/completions", body)
        answer = json.loads(text)
        if status == 200:
            return status, answer["choices"][0]["text"]
        return status, f"{answer['error'].get('code')}: {answer['error']['message']}"

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return "still there after 60 s"


def is_right(what, found, passes):
    print(f"{'ok' if passes else 'WRONG'}: {what}: {found}", flush=True)
    return passes


def lives(server, before):
    """Whether a server does as before."""
    health = server.ask("/health")[0]
    return [
        is_right("the process lives", server.process.poll(), server.process.poll() is None),
        is_right("health", health, health == 200),
        is_right("the answer is the former", "the same" if (now := server.complete(SHORT)) == before else now, now == before),
    ]


def budget(mlxcel, folder, backend):
    server = Server(mlxcel, folder, backend, "--kv-cache-budget", str(4 * MIB))
    before = server.complete(SHORT)
    found = server.complete(LONG)
    # Each fits, all do not: some have to step back.
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        crowd = [answer[0] for answer in clients.map(server.complete, [MANY] * 8)]
    passes = [
        is_right("a short prompt within the budget", before[0], before[0] == 200),
        is_right("a prompt over the budget", found, found[0] == 400 and found[1].startswith("context_length_exceeded")),
        is_right("more prompts at a time than the budget holds", crowd, crowd == [200] * 8),
        *lives(server, before),
    ]
    code = server.end()
    return [*passes, is_right("the server's end", code, code == 0)]


def device(mlxcel, folder, backend):
    server = Server(mlxcel, folder, backend)
    before = server.complete(SHORT)
    other = subprocess.Popen([sys.executable, __file__, "fill"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    left = other.stdout.readline().strip()
    print(f"another process has left {left} bytes of the device")
    # The second time as the first: a failure must leave nothing behind.
    found = [server.complete(LONG) for _ in range(2)]
    health = server.ask("/health")[0]
    other.stdin.close()
    other.wait()
    passes = [is_right("a short prompt before", before[0], before[0] == 200)]
    for each in found:
        passes.append(is_right("a prompt that the device has no room for", each, each[0] == 503 and each[1].startswith("device_memory")))
    passes.append(is_right("health meanwhile", health, health == 200))
    passes += lives(server, before)
    again = server.complete(LONG)
    passes.append(is_right("the long prompt with room", again[0], again[0] == 200))
    metrics = [line for line in server.ask("/metrics")[1].splitlines() if line.startswith(("mlxcel_batch_failed_steps", "mlxcel_engine_live"))]
    print("\n".join(metrics))
    code = server.end()
    passes.append(is_right("the server's end", code, code == 0))
    if not all(passes):
        print(server.said())
    return passes


def main(mlxcel, folder, backend="cuda"):
    passes = budget(mlxcel, folder, backend)
    try:
        free = Device().free_bytes()
    except (OSError, RuntimeError) as error:
        print(f"there is no device to fill, so that was not checked: {error}")
    else:
        print(f"{free} bytes of the device are free")
        passes += device(mlxcel, folder, backend)
    print(f"{sum(passes)} of {len(passes)} as expected")
    return 0 if all(passes) else 1


def arguments(text, least, most):
    """Those given, where there are as many as there have to be; else what the program is for."""
    given = sys.argv[1:]
    if {"-h", "--help"} & set(given):
        print(text)
        sys.exit(0)
    if not least <= len(given) <= most:
        sys.exit(f"{text}\n\nexpected {least} to {most} arguments, found {len(given)}")
    # Ended like this, a program runs what is registered for its end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return given


def number(what, text, least):
    if not text.isdecimal() or int(text) < least:
        sys.exit(f"{what}: expected a number of at least {least}, found {text}")
    return int(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["fill"]:
        fill()
    else:
        sys.exit(main(*arguments(__doc__, 2, 3)))
