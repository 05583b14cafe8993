#!/usr/bin/env bash
# Run the kernels over ragged shapes, masks, head dims and layouts under NVIDIA's compute-sanitizer: memcheck finds
# accesses outside of an allocation, racecheck unordered ones to shared memory. Exits non-zero after the first tool that finds something.
#
#   uv run scripts/sanitize.sh [memcheck racecheck …]
#
# racecheck watches the portable kernels alone. In Hopper's own it takes the compiler's way of handing arguments to
# warpgroups for a race, although a barrier stands between each write and read (runs/h200/accuracy/README.md).
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/{/^set/!s/^# \?//p}' "$0"
    exit
fi
for tool in "$@"; do
    if [[ " memcheck racecheck initcheck synccheck " != *" $tool "* ]]; then
        echo "no tool is called $tool; there are: memcheck racecheck initcheck synccheck" >&2
        exit 2
    fi
done
if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not installed here; it comes with the CUDA toolkit" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

python3 scripts/ragged_launches.py # compiles the kernels, at full speed

# PyTorch's allocator hands out pieces of large blocks, and an access past a piece would stay inside of its block.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
[ $# -gt 0 ] || set -- memcheck racecheck
for tool in "$@"; do
    echo "== $tool"
    [ "$tool" != racecheck ] || export CS336_HOPPER=0
    compute-sanitizer --tool "$tool" --target-processes application-only --error-exitcode 1 \
        python3 scripts/ragged_launches.py
done
