#!/usr/bin/env bash
# Run the benchmarks and the training one after another: rows, tables, plots, and the report of a folder that has a
# template.
#
#   scripts/reproduce_runs.sh runs/mine                     all of it
#   scripts/reproduce_runs.sh runs/mine ladder plots        some steps, by the names below
#   RUN=python3 scripts/reproduce_runs.sh runs/mine         in an environment that is already there
#
# Steps: pytorch_attention small_card flash growth ladder peers tuning model training compiled plots, and report where
# there is a template. A step that was interrupted goes on where it stopped.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/{/^set/!s/^# \?//p}' "$0"
    exit
fi
if [ $# -eq 0 ] || [[ $1 == -* ]]; then
    echo "usage: scripts/reproduce_runs.sh FOLDER [STEP …]" >&2
    exit 2
fi
[[ $1 == /* ]] && out=$1 || out=$PWD/$1
shift
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
run=${RUN:-uv run}

pytorch_attention() {
    $run cs336_systems/bench_pytorch_attention.py --compile --out-dir "$out/pytorch_attention"
}
small_card() { # the course's grid on 12 GB
    local mib
    mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1) || mib=0
    if ((${mib:-0} <= 12288)); then
        echo "skipped: there is no GPU with more than 12 GiB here"
        return
    fi
    $run cs336_systems/bench_pytorch_attention.py --compile --memory-limit-gib 12 \
        --out-dir "$out/pytorch_attention_12gib"
}
flash() { # half of the usual 100 ms for each row: there are some two thousand
    local to=(--warmup 10 --rep 50 --out-jsonl "$out/flash/metrics.jsonl" --out-md "$out/flash/table.md")
    $run cs336_systems/bench_flash_vs_pytorch.py --peers "${to[@]}"
    $run cs336_systems/bench_flash_vs_pytorch.py --dtypes float32 --float32-precision high \
        --implementations naive flash_triton "${to[@]}"
}
growth() { # time against length where the GPU is full, by Hopper's own kernels and by the portable ones
    local of=(--implementations flash_triton --dtypes bfloat16 --batch-sizes 16 --seq-min 4096 --d-min 64 --d-max 64)
    $run cs336_systems/bench_flash_vs_pytorch.py "${of[@]}" \
        --out-jsonl "$out/growth/metrics.jsonl" --out-md "$out/growth/table.md"
    CS336_HOPPER=0 $run cs336_systems/bench_flash_vs_pytorch.py "${of[@]}" \
        --out-jsonl "$out/growth/portable.jsonl" --out-md "$out/growth/portable.md"
}
ladder() {
    for d in 64 128; do
        $run cs336_systems/bench_flash_leaderboard.py --d $d \
            --out-jsonl "$out/leaderboard/metrics.jsonl" --out-md "$out/leaderboard/table.md"
    done
}
peers() {
    $run cs336_systems/bench_flash_peers.py --out-jsonl "$out/peers/metrics.jsonl" --out-md "$out/peers/table.md"
}
tuning() {
    for d in 64 128; do
        $run cs336_systems/autotune.py --d $d --out-jsonl "$out/autotune/d$d.jsonl" --out-md "$out/autotune/d$d.md"
    done
}
model() { # all sizes at a short context, the smaller ones at longer contexts as far as memory goes
    local to=(--out-jsonl "$out/model/metrics.jsonl" --write-md --out-md "$out/model/table.md")
    local float32="--warmup 1 --steps 3" bfloat16="--amp bf16 --warmup 2 --steps 5" # float32 steps take seconds
    for options in "$float32" "$float32 --compile" "$bfloat16" "$bfloat16 --compile"; do
        for sizes in "--sweep --context-length 128" \
            "--model-size small medium large --sweep-contexts 512 1024 2048 4096 8192"; do
            $run cs336_systems/benchmark.py $sizes $options --attention naive flash_triton "${to[@]}"
        done
    done
    for options in "" --compile; do # what PyTorch offers, where attention counts
        $run cs336_systems/benchmark.py --model-size small medium large --sweep-contexts 4096 8192 $bfloat16 $options \
            --attention sdpa --passes training_step "${to[@]}"
    done
}
training() { # from one seed two curves that have to lie on one another, at three learning rates
    for attention in naive flash_triton; do
        local of=(--attention $attention --amp bf16)
        $run scripts/train_lm.py "${of[@]}" --out-dir "$out/training"
        $run scripts/train_lm.py "${of[@]}" --learning-rate 2e-4 --out-dir "$out/training_low_rate"
        $run scripts/train_lm.py "${of[@]}" --learning-rate 1e-3 --out-dir "$out/training_high_rate"
    done
}
compiled() { # needs no GPU
    $run scripts/compiled_kernels.py --markdown "$out/compiled_kernels.md"
}
plots() {
    $run scripts/plot.py "$out/flash/metrics.jsonl" --out-dir "$out/flash"
    $run scripts/plot.py "$out/pytorch_attention/metrics.jsonl" --out-dir "$out/pytorch_attention"
}
report() {
    $run scripts/write_report.py "$out"
}

steps=(pytorch_attention small_card flash growth ladder peers tuning model training compiled plots)
[ ! -f "$out/REPORT.template.md" ] || steps+=(report)
[ $# -gt 0 ] || set -- "${steps[@]}"
for step in "$@"; do
    if [[ " ${steps[*]} " != *" $step "* ]]; then
        echo "no step is called $step; there are: ${steps[*]}" >&2
        exit 2
    fi
done
for step in "$@"; do
    echo "== $step"
    "$step"
done
