#!/bin/sh
# Checks and measures this bundle on the machine that it is on: sh run.sh [FOLDER [STEP ...]]
# FOLDER holds checkpoints and results. Steps are, in this order and all of them where none is named:
#   prepare   random checkpoints, for llama.cpp too, which is built where LLAMA_CPP=FOLDER names its sources (nvcc, cmake, ninja)
#   kernels   the kernels by themselves, checked and timed
#   check     the conformance suite, answers that depend on nothing else, memory that runs out, and where there are several devices
#             whether two answer as one (of a real model too, which SPLIT_MODEL=MODEL names)
#   measure   us and both peers; ends with the table
# CONFORMANCE_SECONDS bounds the suite (600), MLX_LM_SECONDS mlx-lm with each checkpoint (90). Uses the python3 on the path for random checkpoints, and for mlx-lm where that is installed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-/tmp/mlxcel-bench-cuda}
[ $# -gt 0 ] && shift
steps=" ${*:-prepare kernels check measure} "
for step in $steps; do
    case $step in
    prepare | kernels | check | measure) ;;
    *)
        echo "expected prepare, kernels, check or measure, found $step" >&2
        exit 2
        ;;
    esac
done
does() {
    case $steps in *" $1 "*) ;; *) false ;; esac
}
results="$work/results"
mkdir -p "$results" "$work/rows"
plugins="$here/lib/mlxcel/plugins"
mlxcel="$here/bin/mlxcel"
cases="llama8b-4 qwen3moe-4 llama8b-16 smollm2-4"
# MLX looks for NVIDIA's libraries beside its package.
nvidia=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
if [ -n "$nvidia" ]; then
    ln -sfn "$nvidia" "$plugins/mlxcel-backend-cuda/nvidia"
fi
"$mlxcel" doctor || exit 1
devices=$(nvidia-smi -L | wc -l)
last=$((devices - 1))

# A case that fails does not keep the rest from being measured.
failed=0
llama="$work/llama.cpp/bin"

build_llama() {
    cmake -S "$LLAMA_CPP" -B "$work/llama.cpp" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TOOLS=ON \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF &&
        nice -n 19 cmake --build "$work/llama.cpp" --target llama-bench llama-batched-bench
}

# Compiling takes mlx-lm longer than all that is timed, so it compiles in `prepare` what it needs in `measure`.
mlx_lm() { # checkpoint, arguments
    case=$1
    shift
    if python3 -c 'import mlx_lm' 2>/dev/null; then
        CUDA_VISIBLE_DEVICES=$last MLX_PTX_CACHE_DIR="$work/mlx-lm-compiled" python3 "$here/mlx_lm_speed.py" "$work/$case" "$@"
    fi
}

if does prepare; then
    if [ -n "${LLAMA_CPP:-}" ]; then
        (build_llama >"$work/llama.cpp.log" 2>&1 || echo "llama.cpp was not built, so it is not measured: $(grep -m1 -i error "$work/llama.cpp.log")") &
    fi
    made=
    for case in $cases; do
        shape=${case%-*} bits=${case##*-}
        python3 "$here/checkpoint.py" "$shape" "$bits" "$work/$case" &
        made="$made $!"
        if [ -n "${LLAMA_CPP:-}" ]; then
            python3 "$here/gguf_checkpoint.py" "$shape" "$bits" "$work/$case.gguf" &
            made="$made $!"
        fi
    done
    for process in $made; do
        wait "$process" || exit 1
    done
    for case in $cases; do
        mlx_lm "$case" --seconds 100 --times 1 --streams 1,8,32,64 --prompts 512,4096
    done >"$work/mlx-lm-compiling.txt" 2>&1 &
    # The one device that there may be is timed next, and filled up after that.
    [ "$devices" -gt 1 ] || wait $!
fi
if does kernels; then
    python3 "$here/kernels.py" "$here/kernels" || exit 1
    python3 "$here/mixture.py" "$here/kernels" || exit 1
fi
if does check; then
    python3 "$here/conformance.py" "$here/bin/conformance" "$plugins" cuda --out "$work" --cache "$work/compiled" --seconds "${CONFORMANCE_SECONDS:-600}" ||
        failed=1
    python3 "$here/conformance.py" "$here/bin/conformance" "$plugins" cuda --groups rows --options '{"deterministic":true}' \
        --out "$work/rows" --cache "$work/compiled" || failed=1
    python3 "$here/deterministic.py" "$mlxcel" "$work/smollm2-4" cuda || failed=1
    python3 "$here/faults.py" "$mlxcel" "$work/smollm2-4" cuda || failed=1
    if [ "$devices" -gt 1 ]; then
        for model in "$work/llama8b-16" "$work/llama8b-4" ${SPLIT_MODEL:+"$SPLIT_MODEL"}; do
            python3 "$here/split.py" "$mlxcel" "$model" cuda 2 || failed=1
        done
    fi
fi
# Nothing is timed beside what compiles.
wait

ours() { # checkpoint, name of the options or nothing, arguments
    case=$1 name=$2
    shift 2
    "$mlxcel" bench -m "$work/$case" --backend cuda "$@" -o json >"$results/$case$name.json" || failed=1
}
if does measure; then
    if [ "$devices" -gt 1 ]; then
        for case in llama8b-4 llama8b-16; do
            ours "$case" .two-devices --tensor-parallel 2 -p 512 -n 128 -b 1,32 -r 2
        done
    fi
    measure_mlx_lm() {
        for case in $cases; do
            mlx_lm "$case" --seconds "${MLX_LM_SECONDS:-90}" --streams 1,8,32,64 --prompts 512,4096 --out "$results/$case.mlx-lm.json"
        done
    }
    [ "$devices" -gt 1 ] && measure_mlx_lm >"$work/mlx-lm.txt" 2>&1 &
    # One device, as on a machine that has no other. The first process on a machine is slower than those after it.
    export CUDA_VISIBLE_DEVICES=0
    ours llama8b-4 "" -p 512 -n 128 -r 1 2>/dev/null
    for case in $cases; do
        ours "$case" "" -p 512,4096 -n 128 -b 1,8,32,64 -r 3
        if [ -x "$llama/llama-bench" ] && [ -e "$work/$case.gguf" ]; then
            "$llama/llama-bench" -m "$work/$case.gguf" -ngl 99 -fa 1 -p 512,4096 -n 128 -r 3 -o json >"$results/$case.llama.json"
            "$llama/llama-batched-bench" -m "$work/$case.gguf" -ngl 99 -fa on -npp 16 -ntg 128 -npl 8,32,64 -c 16384 --output-format jsonl |
                grep '^{' >"$results/$case.llama.jsonl"
        fi
    done 2>"$work/measure.log"
    [ $failed = 0 ] || tail -20 "$work/measure.log" >&2
    ours llama8b-4 .lookahead --lookahead on -p 512 -n 128 -b 1,32 -r 2
    ours llama8b-4 .deterministic --deterministic -p 512 -n 128 -b 1,8 -r 2
    wait
    [ "$devices" -gt 1 ] || measure_mlx_lm >"$work/mlx-lm.txt" 2>&1
    cat "$work/mlx-lm.txt"
    python3 "$here/table.py" "$results" || failed=1
fi
exit $failed
