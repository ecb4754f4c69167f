#!/usr/bin/env bash
# Tests, times and tunes dpflash on a machine with a GPU, in three stages. Each stage takes less than
# ten minutes from a bare checkout. In half an hour, run all three in this order:
#
#     benchmarks/gpu.sh right    # are the kernels and the private step right on this chip?
#     benchmarks/gpu.sh time     # how long does each kernel take, also beside other libraries?
#     benchmarks/gpu.sh tune     # time of private over non-private steps, for long contexts and for
#                                # LoRA; then choose the configurations of the attention kernels
#
# Parts of right: versions; tests of the kernels (noise, gradients, attention, shards); steps, which
#   compares private steps with the CPU's; train, memcheck, racecheck.
# Parts of time: steps, ceilings, reductions, products, rotary, attention, vendors, flex, ncu.
# Parts of tune: long, lora, tune.
# Nothing is installed outside a temporary folder and nothing is downloaded. If a part fails or runs
# out of time, the other parts still run. A part is skipped if it needs a tool that is not installed.
# The exit status is 0 only if no part failed.
#
# Environment (defaults in brackets):
#   OUT      folder of the results (runs/gpu): STAGE.tar.xz, the printed table STAGE.txt, and the
#            compiled kernels triton.tar.xz
#   PYTHON   the interpreter (.venv/bin/python if it exists, else python3)
#   WHEELS   a folder of wheels from which missing packages are installed (.whl)
#   CACHE    a triton.tar.xz of an earlier run, whose compiled kernels are reused
#   LIMIT_S  time limit of the stage in seconds (540)
#   DEVICE   cuda; cpu makes a dry run of this script, with tiny sizes and figures that mean nothing
#
# A stage prints a line for each part: its name, exit status (0, another number, "skipped" or "no
# time"), seconds, and the last line of its output. Keep STAGE.tar.xz: its gpu-time.json has the median
# time of each call. "plain" is the model without privacy, "dpflash-captured" a private step replayed
# by CUDA graphs.
#
# Open questions for a GPU, the most valuable first. The predictions are for an H100, from counts of
# launches and instructions; none is measured:
#   1. `steps`: sums, noise, norms and clipping factors take one launch per clipping gate each; they
#      took seven to ten per parameter. The mask is now copied without waiting, and rotary tables are
#      made once. Flat clipping should take 1.10 to 1.15 of plain at 184M parameters (1.31 before),
#      and 40 to 48 ms at 29M (61.6 before). No grad_sample_mode waits more than once per step
#      (book_keeping waited 37 times before).
#   2. `noise`, `gradients`: do kernels that read addresses from device memory give the bits of the
#      reference? They use 16-byte loads if all sums of a launch allow it, and do not spill (32 to 128
#      registers on sm_90).
#   3. `steps`: per_layer launches some 23 kernels per layer more than plain, book_keeping 15 more. The
#      norms of book_keeping are computed from the values that it sums, twice by one kernel, and are
#      no longer estimates.
#   4. `long`, `lora`: plain uses torch's attention (cuDNN's if available) and fused AdamW. Time above
#      1.1 of plain is attention: cuDNN's is 1.9 times as fast as dpflash's. LoRA on 6.6B parameters
#      should take 1.05 to 1.15 of plain at T = 1k and 4k, 1.4 to 1.5 at 32k; memory 1.0 to 1.1.
#   5. `reductions`, in graphs, without the host: at 184M parameters, noise should take 2.7 to 4.5 ms;
#      for 8 samples clip_reduce 3.0, squared_norm 2.0 (the bandwidth of a copy), and clip_reduce with
#      noise 4 to 5.5. Eager calls take the same time there; at 29M the host limits them.
#   6. `products`: per_sample_grad should reach 380 to 420 TFLOP/s, bmm(out_dtype=float32) 600. If the
#      bits of a sample in bmm do not depend on B, as in per_sample_grad, use bmm.
#   7. `rotary`: one launch reads and writes q and k once; torch's operations take 18 launches (10 in
#      place). The kernel has 16-byte loads and stores, and 48 registers on sm_90.
#   8. `noise`, `steps`: roundings that fp64 leaves open are settled on the device, once per step: one
#      launch of 4 to 10 us for the 2,400 of 184M parameters (2,000 instructions on sm_90, 61
#      registers, no spill). Before, each list was copied to the host, and four lists back.
#   9. `steps`: "dpflash-captured" replays forward and clipped backward. At 29M parameters it should
#      take 8 to 12 ms, 1.4 to 2 times the plain step in one graph; the aim was 1.4. The host launches
#      losses, accounting, noise and optimizer. `right` compares its weights with the CPU's.
#  10. `vendors`: dense and causal calls in 16 bit use cuDNN's forward, 1.6 to 2.1 times as fast as
#      dpflash's, and dpflash's backward: 1.1 to 1.2 times as fast together. With FlashAttention 4 it
#      is 1.4 times (deterministic) or 1.9 times ("fast"). Do the bits of a sample in cuDNN's forward
#      depend on the other samples?
#  11. `attention`: dpflash's kernels have shorter chunks (sm_90, D = 128, with a mask: forward 555
#      instructions instead of 718, dq 498 instead of 657, dkdv 371 instead of 480) and two dependent
#      loads of tables instead of five; dkdv copies 8 bytes per row, not twice 4. Patterns with many
#      short runs of keys (LongNet, documents, block-sparse) should gain most, dense least. Time dkdv
#      at 128x64: 436 instructions for 64 columns, now 2 x 264, but Triton 3.6 spills 144 bytes.
#  12. Not built yet: norms in the epilogue of products, TMA attention.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 2
stage=${1:-}
here=$PWD
OUT=${OUT:-runs/gpu}
WHEELS=${WHEELS:-.whl}
LIMIT_S=${LIMIT_S:-540}
export DEVICE=${DEVICE:-cuda}
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-$here/.venv/bin/python}
PYTHON=${PYTHON:-python3}
if ! [[ $stage =~ ^(right|time|tune)$ && $LIMIT_S =~ ^[0-9]+$ ]]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
fi
if [ "$DEVICE" = cuda ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "DEVICE=cuda: $PYTHON has a torch that sees no GPU, or none; DEVICE=cpu is a dry run" >&2
  exit 2
fi
jobs=$(($(nproc) < 12 ? $(nproc) : 12))
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
results=$work/$stage
mkdir -p "$results/logs" "$work/site/dpflash" "$work/triton"

# The package's folders lie beside each other in the checkout; pyproject.toml maps them.
ln -s "$here"/dpflash/* "$here/kernels" "$here/accounting" "$work/site/dpflash/"
ln -s "$here/benchmarks" "$work/site/dpflash/bench"
if compgen -G "$WHEELS/*.whl" >/dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" \
    "$WHEELS"/*.whl || echo "$WHEELS: not all wheels could be installed" >&2
fi
export PYTHONPATH=$work/site PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PATH=$PATH:/usr/local/cuda/bin
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 XDG_CACHE_HOME=$work/cache TRITON_CACHE_DIR=$work/triton
[ "$DEVICE" = cuda ] && export TRITON_INTERPRET=0
if [ -n "${CACHE:-}" ]; then
  tar -xJf "$CACHE" -C "$work" triton || echo "$CACHE: no compiled kernels taken" >&2
fi
rm -f "$OUT/$stage.tar.xz" "$OUT/$stage.txt"

table=
failed=0
row() { # NAME STATUS SECONDS LAST_LINE
  table+=$(printf '%-14s %-8s %4d s  %s' "$1" "$2" "$3" "$4")$'\n'
}

# part NAME SECONDS COMMAND...: runs a command within this limit and the rest of the stage's time.
part() {
  local name=$1 limit=$2 left=$((LIMIT_S - SECONDS)) rc="no time" start=$SECONDS
  local log=$results/logs/$1.txt
  shift 2
  : >"$log"
  limit=$((limit < left ? limit : left))
  if [ "$limit" -ge 5 ]; then
    echo "== $name: at most $limit s"
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
    rc=$?
    # Keep only the last state of progress bars, which overwrite themselves.
    sed -i 's/.*\r//' "$log"
    tail -n 40 "$log" | cut -c1-200
    # Save after each part, in case the machine is taken away.
    for what in "$stage" triton; do
      tar -C "$work" -cf - "$what" | xz -T0 -3 >"$work/part.xz"
      mv "$work/part.xz" "$OUT/$what.tar.xz"
    done
  fi
  [ "$rc" = 0 ] || failed=1
  row "$name" "$rc" $((SECONDS - start)) "$(grep . "$log" | tail -n 1 | cut -c1-110)"
}

# needing WHAT NAME SECONDS COMMAND...: a part that is skipped if the package or tool WHAT is missing.
needing() {
  local what=$1
  shift
  if command -v "$what" >/dev/null || "$PYTHON" -c "import $what" 2>/dev/null; then
    part "$@"
  else
    row "$1" skipped 0 "$what is not installed"
  fi
}

tests() { # NAME SECONDS FILES...
  local name=$1 limit=$2
  shift 2
  needing xdist "$name" "$limit" "$PYTHON" -m pytest -q -n "$jobs" -p no:cacheprovider --tb=short \
    --maxfail=60 "$@"
}

measure() { # SECONDS NAME...: parts of gpu_time.py; noise of private steps needs cryptography.
  local limit=$1 name
  shift
  for name in "$@"; do
    needing cryptography "$name" "$limit" "$PYTHON" benchmarks/scripts/gpu_time.py "$name" \
      --json "$results/gpu-time.json"
  done
}

case $stage in
  right)
    part versions 60 "$PYTHON" tests/gpu/versions.py "$DEVICE"
    tests noise 100 tests/kernels/test_noise_triton.py tests/kernels/test_grads_noise.py \
      tests/kernels/test_normal_tail_triton.py \
      tests/kernels/test_capture.py
    tests gradients 120 tests/kernels/test_grads_triton.py tests/kernels/test_rotary.py
    tests attention 200 tests/kernels/test_attention_triton.py tests/kernels/test_attention_squares.py \
      tests/kernels/test_attention_vendor.py
    tests shards 90 tests/kernels/test_tile_shard.py
    steps=20 sizes=()
    [ "$DEVICE" = cpu ] && steps=2 sizes=(--batch-size 4 --seq-len 128 --eval-windows 4)
    needing cryptography steps 130 "$PYTHON" tests/gpu/private_steps.py --jobs "$jobs" \
      --steps "$steps" --device "$DEVICE" --json "$results/gpu-private-steps.json"
    needing cryptography train 60 "$PYTHON" -m dpflash train --device "$DEVICE" --steps 4 \
      ${sizes[@]+"${sizes[@]}"} --out "$results/train"
    for tool in memcheck racecheck; do
      needing compute-sanitizer "$tool" 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer \
        --tool $tool --error-exitcode 1 "$PYTHON" tests/gpu/tiny_calls.py "$DEVICE"
    done
    ;;
  time)
    measure 240 steps
    measure 60 ceilings reductions products
    measure 30 rotary
    measure 100 attention flex
    measure 90 vendors
    needing ncu ncu 60 ncu --clock-control none --target-processes all -k regex:_attention_ -c 3 \
      "$PYTHON" tests/gpu/tiny_calls.py "$DEVICE"
    ;;
  tune)
    measure 240 long
    measure 300 lora
    part tune 300 "$PYTHON" benchmarks/scripts/tune_attention.py --jobs "$jobs" \
      --try-seconds 180 --json "$results/tune-attention.json" \
      --write "$results/attention_configs.json"
    ;;
esac
{
  echo
  printf '%-14s %-8s %6s  %s\n' part status time 'last line'
  printf '%s' "$table"
} | tee "$OUT/$stage.txt"
exit "$failed"
