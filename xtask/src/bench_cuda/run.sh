#!/bin/sh
# Checks and measures this bundle on the machine that it is on: sh run.sh [FOLDER FOR CHECKPOINTS]
# Prints tables to standard output. Uses the python3 on the path for random checkpoints, and for mlx-lm where that is installed.
# LLAMA_CPP=FOLDER names the sources of llama.cpp, which are then built with nvcc, cmake and ninja, and measured beside.
set -u
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-/tmp/mlxcel-bench-cuda}
mkdir -p "$work"
# MLX looks for NVIDIA's libraries beside its package.
nvidia=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
if [ -n "$nvidia" ]; then
    ln -sfn "$nvidia" "$here/lib/mlxcel/plugins/mlxcel-backend-cuda/nvidia"
fi
mlxcel="$here/bin/mlxcel"
"$mlxcel" doctor || exit 1
devices=$(nvidia-smi -L | wc -l)

# Everything that is checked and made comes first: compiling keeps all processors busy, and nothing is timed beside it.
llama=
if [ -n "${LLAMA_CPP:-}" ]; then
    if cmake -S "$LLAMA_CPP" -B "$work/llama.cpp" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF >"$work/llama.cpp.log" 2>&1 &&
        cmake --build "$work/llama.cpp" --target llama-bench llama-batched-bench >>"$work/llama.cpp.log" 2>&1; then
        llama="$work/llama.cpp/bin"
    else
        echo "llama.cpp was not built, so it was not measured: $(tail -1 "$work/llama.cpp.log")"
    fi
fi
python3 "$here/kernels.py" "$here/kernels" || exit 1
python3 "$here/mixture.py" "$here/kernels" || exit 1
for case in "llama8b 4" "llama8b 16" "qwen3moe 4" "smollm2 4"; do
    # shellcheck disable=SC2086
    set -- $case
    python3 "$here/checkpoint.py" "$1" "$2" "$work/$1-$2" || exit 1
    if [ -n "$llama" ] && [ "$2" = 4 ]; then
        python3 "$here/gguf_checkpoint.py" "$1" "$work/$1.gguf" || exit 1
    fi
done
python3 "$here/faults.py" "$mlxcel" "$work/smollm2-4" cuda || exit 1
# A case that fails does not keep the rest from being measured.
failed=0
mkdir -p "$work/rows"
python3 "$here/conformance.py" "$here/bin/conformance" "$here/lib/mlxcel/plugins" cuda --out "$work" --cache "$work/compiled" || failed=1
python3 "$here/conformance.py" "$here/bin/conformance" "$here/lib/mlxcel/plugins" cuda --groups rows --options '{"deterministic":true}' \
    --out "$work/rows" --cache "$work/compiled" || failed=1
python3 "$here/deterministic.py" "$mlxcel" "$work/smollm2-4" cuda || failed=1

# Compiling takes mlx-lm longer than all that is timed. Where there is a second device it has that one meanwhile, else it comes last.
mlx_lm() {
    if python3 -c 'import mlx_lm' 2>/dev/null; then
        python3 "$here/mlx_lm_speed.py" "$work/llama8b-4" 90
    else
        echo "mlx-lm is not installed here, so it was not measured"
    fi
}
if [ "$devices" -gt 1 ]; then
    for case in llama8b-4 llama8b-16; do
        "$mlxcel" bench -m "$work/$case" --backend cuda --tensor-parallel 2 -p 512 -n 128 -b 1,32 -r 2
    done
    (CUDA_VISIBLE_DEVICES=$((devices - 1)) && export CUDA_VISIBLE_DEVICES && mlx_lm) >"$work/mlx-lm.txt" 2>&1 &
fi
# One device, as on a machine that has no other.
export CUDA_VISIBLE_DEVICES=0
for case in llama8b-4 qwen3moe-4 llama8b-16 smollm2-4; do
    "$mlxcel" bench -m "$work/$case" --backend cuda -p 512,4096 -n 128 -b 1,8,32,64 -r 3
    gguf="$work/${case%-4}.gguf"
    if [ -n "$llama" ] && [ -e "$gguf" ]; then
        "$llama/llama-bench" -m "$gguf" -ngl 99 -fa 1 -p 512,4096 -n 128 -r 3
        "$llama/llama-batched-bench" -m "$gguf" -ngl 99 -fa on -npp 16 -ntg 128 -npl 8,32,64 -c 16384
    fi
done
if [ "$devices" -gt 1 ]; then
    wait
    cat "$work/mlx-lm.txt"
else
    mlx_lm
fi
exit $failed
