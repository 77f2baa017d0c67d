#!/bin/sh
# Checks and measures this bundle on the machine that it is on; `sh run.sh --help` says how, README.txt what it needs.
set -u
usage() {
    cat <<'END'
Usage: sh run.sh [FOLDER] [STEP ...]

FOLDER holds checkpoints and results; /tmp/mlxcel-bench-cuda if not given. Steps are done in this order, all of them where none is named:
  prepare   random checkpoints, for llama.cpp too, which is built where LLAMA_CPP names its sources
  kernels   the kernels by themselves, checked and timed
  check     the conformance suite, answers that depend on nothing else, memory that runs out, and where there are several devices
            whether two answer as one
  measure   us and both peers; ends with the table

Environment:
  LLAMA_CPP=FOLDER         sources of llama.cpp, which are built with cmake, ninja and nvcc
  CONFORMANCE_SECONDS=N    bounds the conformance suite (600)
  MLX_LM_SECONDS=N         bounds mlx-lm with each checkpoint (90)
  SPLIT_MODEL=MODEL        one more model that two devices have to answer as one
  CUDA_VISIBLE_DEVICES     which devices are used, as ever; one is measured, the first

Uses the python3 on the path for random checkpoints, and for mlx-lm where that is installed. The exit status is 0 where all was done and right,
1 where something was not (mlx-lm may run out of its seconds, and counts as done), 2 where the command is wrong. README.txt says what is needed and
how long it takes.
END
}
refuse() {
    echo "run.sh: $1" >&2
    echo "sh run.sh --help says how it is used" >&2
    exit 2
}
for argument in "$@"; do
    case $argument in
    -h | --help | help)
        usage
        exit 0
        ;;
    -*) refuse "there is no option $argument" ;;
    esac
done
work=/tmp/mlxcel-bench-cuda
case ${1-} in
# A step in FOLDER's place: FOLDER is what it is when not given.
prepare | kernels | check | measure) ;;
*)
    [ $# -eq 0 ] || {
        work=$1
        shift
    }
    ;;
esac
[ -n "$work" ] || refuse "expected a folder, found an empty name"
steps=" ${*:-prepare kernels check measure} "
for step in "$@"; do
    case $step in
    prepare | kernels | check | measure) ;;
    *) refuse "expected prepare, kernels, check or measure, found $step" ;;
    esac
done
does() {
    case $steps in *" $1 "*) ;; *) false ;; esac
}

stop() {
    echo "run.sh: $1" >&2
    exit 1
}
# Ends all that a process started, and what that started: shells in between do not pass signals on.
end_children() {
    for stat in /proc/[0-9]*/stat; do
        { read -r line <"$stat"; } 2>/dev/null || continue
        # After the name in brackets, which may hold anything, come state and parent.
        line=${line##*) }
        line=${line#* }
        [ "${line%% *}" = "$1" ] || continue
        stat=${stat#/proc/}
        set -- "$1" "${stat%/stat}"
        # Stopped it starts no others meanwhile.
        kill -STOP "$2" 2>/dev/null
        end_children "$2"
        kill -TERM "$2" 2>/dev/null
        kill -CONT "$2" 2>/dev/null
    done
}
trap 'end_children $$' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1
command -v python3 >/dev/null || stop "there is no python3 on the path, which everything here needs"
mkdir -p -- "$work/results" "$work/rows" || stop "expected a folder that can be written to, found $work"
work=$(CDPATH='' cd -- "$work" && pwd) || exit 1
results="$work/results"
for folder in "$work" "$results" "$work/rows"; do
    [ -w "$folder" ] || stop "$folder cannot be written to: name another folder"
done
plugins="$here/lib/mlxcel/plugins"
mlxcel="$here/bin/mlxcel"
cases="llama8b-4 qwen3moe-4 llama8b-16 smollm2-4"
# What is installed on the machine is not what this measures: the bundle's own folder comes first everywhere, and no plugin of another name is used.
unset MLXCEL_PLUGIN_PATH MLXCEL_PLUGINS_DISABLE
MLXCEL_PLUGINS_SELECT=
for package in "$plugins"/mlxcel-backend-* "$plugins"/mlxcel-family-*; do
    package=${package##*/mlxcel-}
    MLXCEL_PLUGINS_SELECT="$MLXCEL_PLUGINS_SELECT${MLXCEL_PLUGINS_SELECT:+,}${package%%-*}/${package#*-}"
done
export MLXCEL_PLUGINS_SELECT
# MLX looks for NVIDIA's libraries beside its package.
nvidia=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
beside="$plugins/mlxcel-backend-cuda/nvidia"
if [ -n "$nvidia" ] && { [ -L "$beside" ] || [ ! -e "$beside" ]; }; then
    ln -sfn "$nvidia" "$beside" || echo "run.sh: $nvidia is not linked into the plugin's package, so NVIDIA's libraries have to be on the loader's path" >&2
fi
echo "mlxcel-bench-cuda $(cat "$here/VERSION" 2>/dev/null || echo unknown), in $work:$steps"
"$mlxcel" doctor --plugins-dir "$plugins"
# shellcheck disable=SC2086
found=$(python3 "$here/machine.py" "$here" "$work" $steps) || exit 1
# The steps are known, so that the arguments are free for this. First and last are what CUDA_VISIBLE_DEVICES calls these devices.
# shellcheck disable=SC2086
set -- $found
devices=$1 first=$2 last=$3 has_mlx_lm=$4 builds_llama=$5
if [ -n "${SPLIT_MODEL:-}" ] && does check && [ "$devices" -lt 2 ]; then
    echo "SPLIT_MODEL is not looked at: there is one device"
fi

# A case that fails does not keep the rest from being measured.
failed=
fail() {
    failed="$failed${failed:+, }$1"
}
llama="$work/llama.cpp/bin"

configure_llama() {
    cmake -S "$LLAMA_CPP" -B "$work/llama.cpp" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TOOLS=ON \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF
}
build_llama() {
    nice -n 19 cmake --build "$work/llama.cpp" --target llama-bench llama-batched-bench
}
no_llama() {
    log="$work/llama.cpp.log"
    why=$(grep -m1 -i -e error -e 'not found' -e 'no such' -e 'unable to' "$log" || tail -n1 "$log")
    echo "llama.cpp was not built, so it is not measured: $why; all that was said is in $log" >&2
}
# What compiles beside other work, by process: a subshell cannot call `fail` for this one.
building='' compiling=''
compiled() {
    [ -z "$compiling" ] || wait "$compiling" || fail "compiling for mlx-lm ($work/mlx-lm-compiling.txt)"
    compiling=
}
# Nothing is timed beside what compiles.
all_compiled() {
    compiled
    [ -z "$building" ] || wait "$building" || fail "building llama.cpp"
    building=
}

# Compiling takes mlx-lm longer than all that is timed, so it compiles in `prepare` what it needs in `measure`.
mlx_lm() { # checkpoint, arguments
    case=$1
    shift
    if [ "$has_mlx_lm" = yes ]; then
        CUDA_VISIBLE_DEVICES=$last MLX_PTX_CACHE_DIR="$work/mlx-lm-compiled" python3 "$here/mlx_lm_speed.py" "$work/$case" "$@"
    fi
}

if does prepare; then
    made=
    for case in $cases; do
        python3 "$here/checkpoint.py" "${case%-*}" "${case##*-}" "$work/$case" &
        made="$made $!:$case"
    done
    if [ "$builds_llama" = yes ]; then
        if configure_llama >"$work/llama.cpp.log" 2>&1; then
            (build_llama >>"$work/llama.cpp.log" 2>&1 || {
                no_llama
                exit 1
            }) &
            building=$!
            for case in $cases; do
                python3 "$here/gguf_checkpoint.py" "${case%-*}" "${case##*-}" "$work/$case.gguf" &
                made="$made $!:$case.gguf"
            done
        else
            no_llama
            fail "building llama.cpp"
        fi
    elif [ -n "${LLAMA_CPP:-}" ]; then
        # What it lacks was said above.
        fail "building llama.cpp"
    fi
    for process in $made; do
        wait "${process%%:*}" || stop "the checkpoint ${process#*:} was not written, so nothing else was done"
    done
    compile_mlx_lm() {
        status=0
        for case in $cases; do
            mlx_lm "$case" --seconds 100 --times 1 --streams 1,8,32,64 --prompts 512,4096 || status=1
        done
        return $status
    }
    compile_mlx_lm >"$work/mlx-lm-compiling.txt" 2>&1 &
    compiling=$!
    # The one device that there may be is timed next, and filled up after that.
    [ "$devices" -gt 1 ] || compiled
fi
if does kernels; then
    all_compiled
    python3 "$here/kernels.py" "$here/kernels" || fail kernels.py
    python3 "$here/mixture.py" "$here/kernels" || fail mixture.py
fi
if does check; then
    python3 "$here/conformance.py" "$here/bin/conformance" "$plugins" cuda --out "$work" --cache "$work/compiled" --seconds "${CONFORMANCE_SECONDS:-600}" ||
        fail conformance
    python3 "$here/conformance.py" "$here/bin/conformance" "$plugins" cuda --groups rows --options '{"deterministic":true}' \
        --out "$work/rows" --cache "$work/compiled" || fail "conformance of deterministic rows"
    python3 "$here/deterministic.py" "$mlxcel" "$work/smollm2-4" cuda || fail deterministic.py
    python3 "$here/faults.py" "$mlxcel" "$work/smollm2-4" cuda || fail faults.py
    if [ "$devices" -gt 1 ]; then
        for model in "$work/llama8b-16" "$work/llama8b-4" ${SPLIT_MODEL:+"$SPLIT_MODEL"}; do
            python3 "$here/split.py" "$mlxcel" "$model" cuda 2 || fail "split.py of ${model##*/}"
        done
    fi
fi
all_compiled

ours() { # checkpoint, name of the options or nothing, arguments
    case=$1 name=$2
    shift 2
    "$mlxcel" bench --plugins-dir "$plugins" -m "$work/$case" --backend cuda "$@" -o json >"$results/$case$name.json" || fail "bench of $case$name"
}
if does measure; then
    # The table is of this run alone.
    if [ -n "$(ls "$results")" ]; then
        rm -rf "$results.before"
        mkdir "$results.before" || exit 1
        mv "$results"/* "$results.before" || exit 1
    fi
    cp "$work/machine.json" "$results" || exit 1
    if [ "$devices" -gt 1 ]; then
        for case in llama8b-4 llama8b-16; do
            ours "$case" .two-devices --tensor-parallel 2 -p 512 -n 128 -b 1,32 -r 2
        done
    fi
    measure_mlx_lm() {
        status=0
        for case in $cases; do
            mlx_lm "$case" --seconds "${MLX_LM_SECONDS:-90}" --streams 1,8,32,64 --prompts 512,4096 --out "$results/$case.mlx-lm.json" || status=1
        done
        return $status
    }
    measuring=
    if [ "$devices" -gt 1 ]; then
        measure_mlx_lm >"$work/mlx-lm.txt" 2>&1 &
        measuring=$!
    fi
    # One device, as on a machine that has no other. The first process on a machine is slower than those after it.
    export CUDA_VISIBLE_DEVICES="$first"
    before=$failed
    ours llama8b-4 "" -p 512 -n 128 -r 1 2>/dev/null
    failed=$before
    for case in $cases; do
        ours "$case" "" -p 512,4096 -n 128 -b 1,8,32,64 -r 3
        if [ -x "$llama/llama-bench" ] && [ -e "$work/$case.gguf" ]; then
            "$llama/llama-bench" -m "$work/$case.gguf" -ngl 99 -fa 1 -p 512,4096 -n 128 -r 3 -o json >"$results/$case.llama.json" ||
                fail "llama-bench of $case"
            "$llama/llama-batched-bench" -m "$work/$case.gguf" -ngl 99 -fa on -npp 16 -ntg 128 -npl 8,32,64 -c 16384 --output-format jsonl \
                >"$work/llama-batched-bench.txt" || fail "llama-batched-bench of $case"
            grep '^{' "$work/llama-batched-bench.txt" >"$results/$case.llama.jsonl" || fail "lines of llama-batched-bench of $case"
        fi
    done 2>"$work/measure.log"
    [ "$failed" = "$before" ] || tail -20 "$work/measure.log" >&2
    ours llama8b-4 .lookahead --lookahead on -p 512 -n 128 -b 1,32 -r 2
    ours llama8b-4 .deterministic --deterministic -p 512 -n 128 -b 1,8 -r 2
    if [ -n "$measuring" ]; then
        wait "$measuring"
    else
        measure_mlx_lm >"$work/mlx-lm.txt" 2>&1
    fi || fail "mlx_lm_speed.py ($work/mlx-lm.txt)"
    cat "$work/mlx-lm.txt"
    python3 "$here/table.py" "$results" || fail table.py
fi
[ -z "$failed" ] || stop "not as it should be: $failed"
