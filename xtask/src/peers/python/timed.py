"""Runs a program: how long until its first byte on stdout and until its end, and its largest resident size.

    timed.py STDOUT STDERR PROGRAM ARGUMENT...

Writes one JSON object to its own stdout; what the program writes goes to the two files.
"""

import json
import os
import subprocess
import sys
import time


def main() -> None:
    out_path, err_path, *command = sys.argv[1:]
    with open(out_path, "wb") as out, open(err_path, "wb") as err:
        began = time.perf_counter()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err
        )
        first = None
        while True:
            piece = os.read(child.stdout.fileno(), 65536)
            if not piece:
                break
            # A program may begin with an empty line before it has anything to say.
            if first is None and piece.strip():
                first = time.perf_counter() - began
            out.write(piece)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
    # Kilobytes, but bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    result = {
        "status": os.waitstatus_to_exitcode(status),
        "first_byte_s": first,
        "wall_s": wall,
        "max_rss_bytes": usage.ru_maxrss * unit,
    }
    print(json.dumps(result))


main()
