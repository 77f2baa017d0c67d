#!/usr/bin/env python3
"""What a run has on this machine: machine.py BUNDLE FOLDER [STEP ...]. Ends with 1 if the steps cannot be done, and says why.

Asks the bundle's `mlxcel doctor` about the bundle's own CUDA backend, no other; looks for modules, room and checkpoints that the steps need, and
tells on stderr which peers will not be measured. Writes FOLDER/machine.json for the head of the table, and one line:

    DEVICES FIRST LAST MLX_LM LLAMA

FIRST and LAST are what CUDA_VISIBLE_DEVICES has to be for the first and the last device alone, MLX_LM and LLAMA `yes` where mlx-lm can be measured
and where llama.cpp can be built.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

BACKEND = "cuda"
# Bytes of a checkpoint; llama.cpp's are as large.
SIZES = {"llama8b-4": 4.6e9, "qwen3moe-4": 17.2e9, "llama8b-16": 16.1e9, "smollm2-4": 0.1e9}
NEEDED = ("torch", "safetensors")


def tell(text):
    print(text, file=sys.stderr, flush=True)


def own_backend(bundle):
    """What the doctor says of the backend that lies in the bundle, with the whole report."""
    program, plugins = os.path.join(bundle, "bin", "mlxcel"), os.path.join(bundle, "lib", "mlxcel", "plugins")
    try:
        done = subprocess.run([program, "doctor", "--json", "--plugins-dir", plugins], capture_output=True, text=True)
        report = json.loads(done.stdout)
    except OSError as error:
        sys.exit(f"{program} cannot be started: {error.strerror}: unpack the whole archive, on Linux on x86-64")
    except ValueError:
        sys.exit(f"{program} doctor ended with {done.returncode} and without a report: {done.stderr.strip()[-2000:]}")
    inside = os.path.realpath(plugins) + os.sep
    for found in report["backends"]:
        if found["name"] == BACKEND and os.path.realpath(found["path"]).startswith(inside):
            return found, report
    sys.exit(f"{plugins} has no backend {BACKEND}: unpack the whole archive of `cargo xtask bench-cuda --backend {BACKEND}`")


def driver_version():
    """As NVIDIA numbers it; containers have one of these places or none."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired):
        pass
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\b\d{3}(\.\d+)+", file.read())
    except OSError:
        return None
    return found and found.group()


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(bundle):
    try:
        with open(os.path.join(bundle, "VERSION"), encoding="utf-8") as file:
            return file.read().strip() or "unknown"
    except OSError:
        return "unknown"


def facts(bundle, backend, report):
    details = backend.get("details", {})
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(bundle),
        "mlxcel": report["mlxcel_version"],
        "mlx": details.get("mlx_version"),
        "devices": [device.get("description") or device["name"] for device in backend["devices"]],
        "cores": os.cpu_count(),
        "driver": driver_version(),
        "cuda": details.get("driver_cuda_version"),
        "mlx_lm": version_of("mlx-lm"),
        "mlx_lm_mlx": version_of("mlx"),
    }


def is_there(folder, case):
    return os.path.exists(os.path.join(folder, case, "config.json"))


def bytes_of(path):
    if os.path.isdir(path):
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    return os.path.getsize(path) if os.path.exists(path) else 0


def check_room(folder, with_gguf):
    """What is there is written over, so its bytes are free."""
    kinds = ("", ".gguf") if with_gguf else ("",)
    needed = len(kinds) * sum(SIZES.values())
    there = sum(bytes_of(os.path.join(folder, case + kind)) for case in SIZES for kind in kinds)
    usage = shutil.disk_usage(folder)
    # Some file systems say nothing of their size.
    if usage.total > 0 and usage.free + there < 0.98 * needed:
        sys.exit(f"{folder} has room for {(usage.free + there) / 1e9:.0f} GB, the checkpoints take {needed / 1e9:.0f} GB"
                 f"{' with those for llama.cpp' if with_gguf else ''}: name another folder")


def check_checkpoints(folder, steps, devices):
    split = ["llama8b-16", "llama8b-4"] if devices > 1 else []
    needed = list(SIZES) if "measure" in steps else ["smollm2-4", *split]
    missing = [case for case in needed if not is_there(folder, case)]
    if not missing:
        return
    text = f"{folder} has no checkpoint {', '.join(missing)}: `sh run.sh {folder} prepare` writes it"
    if "measure" in steps and len(missing) == len(needed):
        sys.exit(text)
    tell(text)


def has_mlx_lm():
    """Imported as it will be: a module that is there can lack what it needs."""
    done = subprocess.run([sys.executable, "-c", "import mlx_lm"], capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"python3 ended with {done.returncode}"]
        tell(f"mlx-lm will not be measured: {sys.executable} cannot import mlx_lm: {said[-1]}")
    return done.returncode == 0


def missing_tools():
    """What llama.cpp is built with; CMake looks for nvcc in more places than the path."""
    missing = [] if shutil.which("cmake") else ["cmake"]
    if not any(shutil.which(name) for name in ("ninja", "ninja-build", "samu")):
        missing.append("ninja")
    homes = [os.environ.get(name) for name in ("CUDAToolkit_ROOT", "CUDA_PATH", "CUDA_HOME")] + ["/usr/local/cuda"]
    places = [os.path.join(home, "bin", "nvcc") for home in homes if home]
    if not any(shutil.which(place) for place in ("nvcc", os.environ.get("CUDACXX") or "nvcc", *places)):
        missing.append("nvcc")
    return missing


def can_build_llama(steps, folder):
    sources = os.environ.get("LLAMA_CPP", "")
    if sources and "prepare" in steps:
        if not os.path.exists(os.path.join(sources, "CMakeLists.txt")):
            sys.exit(f"LLAMA_CPP is {sources}, which has no CMakeLists.txt: expected the folder of llama.cpp's sources")
        missing = missing_tools()
        if not missing:
            return True
        tell(f"llama.cpp will not be built: LLAMA_CPP names its sources, and there is no {' and no '.join(missing)} on the path")
    if "measure" in steps and not os.path.exists(os.path.join(folder, "llama.cpp", "bin", "llama-bench")):
        tell(f"llama.cpp will not be measured: it was not built in {folder}, which `LLAMA_CPP=SOURCES sh run.sh {folder} prepare` does")
    return False


def check_modules(steps):
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    for name in missing:
        tell(f"{sys.executable} has no module {name}, which the random checkpoints and the kernels by themselves need: "
             f"`{sys.executable} -m pip install {name}`")
    if missing and "prepare" in steps:
        sys.exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("folder")
    parser.add_argument("steps", nargs="*", metavar="step")
    asked = parser.parse_args()
    steps, folder = asked.steps, asked.folder
    backend, report = own_backend(asked.bundle)
    if not backend["usable"]:
        sys.exit(f"the bundle's own backend {BACKEND} cannot be used here, so nothing was run: {backend['reason']}")
    count = len(backend["devices"])
    if "prepare" in steps or "kernels" in steps:
        check_modules(steps)
    mlx_lm = has_mlx_lm() if "prepare" in steps or "measure" in steps else False
    llama = can_build_llama(steps, folder)
    if "prepare" in steps:
        check_room(folder, llama)
    elif "check" in steps or "measure" in steps:
        check_checkpoints(folder, steps, count)
    try:
        with open(os.path.join(folder, "machine.json"), "w", encoding="utf-8") as file:
            json.dump(facts(asked.bundle, backend, report), file, indent=1)
    except OSError as error:
        sys.exit(f"{error.filename} cannot be written: {error.strerror}")
    alone = [one["CUDA_VISIBLE_DEVICES"] for one in backend.get("details", {}).get("alone", [])] or [str(n) for n in range(count)]
    print(count, alone[0], alone[-1], *("yes" if can else "no" for can in (mlx_lm, llama)))


if __name__ == "__main__":
    main()
