#!/usr/bin/env bash
# Run the kernels over ragged shapes, masks, head dims and strides under NVIDIA's compute-sanitizer: memcheck finds
# accesses outside of an allocation, racecheck unordered ones in shared memory. Exits non-zero at the first finding.
#
#   uv run scripts/sanitize.sh [more pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

# PyTorch's allocator hands out pieces of large blocks, and an access past a piece would stay inside of its block.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 python3 -m pytest -q -p no:cacheprovider \
        tests/test_agreement.py -k "triton and (ragged or head_dims)" "$@"
done
