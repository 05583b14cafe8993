#!/usr/bin/env bash
# Profile the Transformer with Nsight Systems: kernels below the named parts of each pass (forward, loss, backward,
# optimizer), and a summary of where the time goes; the check of the attention before the first pass, and a buffer that
# is zeroed before each, are in it too.
#
#   scripts/profile_nsys.sh runs/profile --model-size small --context-length 1024 --attention flash_triton
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/{/^set/!s/^# \?//p}' "$0"
    exit
fi
if [ $# -eq 0 ] || [[ $1 == -* ]]; then
    echo "usage: scripts/profile_nsys.sh OUTPUT [arguments of benchmark.py …]" >&2
    exit 2
fi
[[ $1 == /* ]] && output=$1 || output=$PWD/$1
shift
cd "$(dirname "$0")/.."
if ! command -v nsys >/dev/null; then
    echo "error: Nsight Systems (nsys) is not on the PATH" >&2
    exit 1
fi
mkdir -p "$(dirname "$output")"
nsys profile --trace=cuda,nvtx --force-overwrite=true --output="$output" \
    uv run cs336_systems/benchmark.py --nvtx --fresh --out-jsonl "$output.jsonl" "$@"
nsys stats --report nvtx_sum,cuda_gpu_kern_sum "$output.nsys-rep"
