#!/bin/sh
# Measures this bundle on the machine that it is on: sh run.sh [FOLDER FOR CHECKPOINTS]
# Prints tables to standard output. Uses the python3 on the path for random checkpoints, and for mlx-lm where that is installed.
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
python3 "$here/kernels.py" "$here/kernels" || exit 1
python3 "$here/mixture.py" "$here/kernels" || exit 1
# gguf_checkpoint.py writes the same shapes for llama.cpp, which is not measured here.
for case in "llama8b 4" "llama8b 16" "smollm2 4"; do
    # shellcheck disable=SC2086
    set -- $case
    python3 "$here/checkpoint.py" "$1" "$2" "$work/$1-$2" || exit 1
done
python3 "$here/faults.py" "$mlxcel" "$work/smollm2-4" cuda || exit 1
python3 "$here/conformance.py" "$here/bin/conformance" "$here/lib/mlxcel/plugins" cuda --out "$work" --cache "$work/compiled" || exit 1
python3 "$here/conformance.py" "$here/bin/conformance" "$here/lib/mlxcel/plugins" cuda --groups rows --options '{"deterministic":true}' || exit 1
python3 "$here/deterministic.py" "$mlxcel" "$work/smollm2-4" cuda || exit 1
# Compiling takes mlx-lm longer than all that is timed. Where there is a second device it has that one meanwhile, else it comes last.
devices=$(nvidia-smi -L | wc -l)
mlx_lm() {
    if python3 -c 'import mlx_lm' 2>/dev/null; then
        python3 "$here/mlx_lm_speed.py" "$work/llama8b-4" 90
    else
        echo "mlx-lm is not installed here, so it was not measured"
    fi
}
if [ "$devices" -gt 1 ]; then
    (CUDA_VISIBLE_DEVICES=$((devices - 1)) && export CUDA_VISIBLE_DEVICES && mlx_lm) >"$work/mlx-lm.txt" 2>&1 &
fi
for case in llama8b-4 llama8b-16 smollm2-4; do
    "$mlxcel" bench -m "$work/$case" --backend cuda -p 512,4096 -n 128 -b 1,8,32,64 -r 3
done
if [ "$devices" -gt 1 ]; then
    wait
    cat "$work/mlx-lm.txt"
else
    mlx_lm
fi
