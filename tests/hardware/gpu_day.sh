#!/usr/bin/env bash
# Everything that a machine with GPUs should be asked, in order, each step with a log of its own. A step that fails
# keeps the next from nothing; the end is a table of steps, exit codes and seconds.
#
#   tests/hardware/gpu_day.sh OUT RANKS LIMIT_S [STEP...]
#
#   OUT      folder for logs, junit files, bench.json, bench.png, summary.txt
#   RANKS    as many as GPUs: 2, 4 or 8; more ranks than GPUs share them, which is slow
#   LIMIT_S  seconds that one step may take
#   STEP     only these, in the order given; without one, all of: see `steps` below
#            `mps`, only where it is named: the steps behind it run under CUDA MPS, so that ranks on one GPU run side by
#            side; its daemon is this script's own, with folders in OUT, and ends with the script, however that ends
#
# PYTHON names the interpreter (python3): with NumPy, ml_dtypes, Cython, pytest, CuPy, NVRTC and torch for CUDA.
# A step that cannot run here exits with 77, which the table calls skipped. Exit code: 1 if any step failed.
set -u

steps=(machine build kernels device engine pressure ops contract shared memcheck memcheck_ranks racecheck bench)
extra=(mps)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}

usage() {
  sed -n '2,/^set -u/p' "${BASH_SOURCE[0]}" | sed '$d; s/^# \{0,1\}//'
  echo "steps: ${steps[*]} ${extra[*]}"
  exit 2
}

skip() {
  echo "skipped: $*"
  exit 77
}

need() {
  command -v "$1" > /dev/null || skip "no $1 on PATH"
}

# Two, four, ... up to RANKS, and RANKS.
growth() {
  local count=2 list=""
  while ((count < ranks)); do
    list+="$count,"
    count=$((count * 2))
  done
  echo "$list$ranks"
}

tests() { # NAME ARGUMENT...
  local name=$1
  shift
  EPCOMM_TEST_REQUIRE=nvlink,cupy,gpu "$python" -m pytest -q -p no:cacheprovider --maxfail=40 \
    --junitxml="$out/$name.xml" "$@"
}

sanitize() { # TOOL RANKS
  need compute-sanitizer
  compute-sanitizer --tool "$1" --target-processes all --error-exitcode 9 \
    "$python" tests/perf/small_gpu_calls.py "$2"
}

step_machine() {
  "$python" -m epcomm info 2>&1 || true # before the build it cannot
  need nvidia-smi
  nvidia-smi && nvidia-smi topo -m && nvidia-smi topo -p2p r && nvidia-smi nvlink --status -i 0
}
step_build() { "$python" setup.py build_ext --inplace && "$python" -m epcomm info; }
step_kernels() { "$python" -m epcomm.kernels; }
step_device() { tests device tests/hardware/test_nvlink_device.py tests/unit/test_pool.py; }
step_engine() { tests engine tests/hardware/test_gpu_engine.py --sizes "$(growth)"; }
step_pressure() { tests pressure tests/hardware/test_gpu_pressure.py --sizes "$(growth)"; }
step_ops() { tests ops tests/hardware/test_gpu_ops.py; }
step_contract() { tests contract tests/contract --backend nvlink --sizes "$ranks"; }
step_shared() { # twice as many ranks as GPUs, and an odd number that shares them unevenly
  tests shared tests/contract/test_combine.py tests/contract/test_dispatch.py --backend nvlink \
    --sizes "$((ranks * 2)),$((ranks + 1))"
}
step_memcheck() { sanitize memcheck 1; }
step_memcheck_ranks() { sanitize memcheck "$ranks"; }
step_racecheck() { sanitize racecheck 1; }
step_bench() {
  local plot=()
  if "$python" -c "import matplotlib" 2> /dev/null; then plot=(--plot "$out/bench.png"); fi
  "$python" -m epcomm bench --device cuda --mode train --ranks "$(growth)" --sms 8,16,24,32 --timeout-s 240 \
    --json "$out/bench.json" ${plot[@]+"${plot[@]}"}
}

step_mps() {
  need nvidia-cuda-mps-control
  if [[ $mps == failed ]]; then
    echo "no folder for the daemon's sockets"
    return 1
  fi
  if [[ $mps != ours ]]; then skip "CUDA_MPS_PIPE_DIRECTORY is set already"; fi
  nvidia-cuda-mps-control -d || return
  "$python" -m epcomm info 2>&1 | grep 'CUDA MPS' || true # before the build it cannot tell
}

mps_pipe="" # of the daemon that is this script's own
begin_mps() {
  local folder=$out/mps
  if ((${#folder} > 60)); then folder=$(mktemp -d) || return; fi # names of sockets are short
  export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$out/mps/log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  mps_pipe=$CUDA_MPS_PIPE_DIRECTORY
}

# Ends the daemon that begin_mps made room for, if it runs.
end_mps() {
  local pid=$mps_pipe/nvidia-cuda-mps-control.pid
  if [[ -e $mps_pipe/control || -e $pid ]]; then
    echo quit | timeout 30 nvidia-cuda-mps-control >> "$out/mps.log" 2>&1 ||
      { [[ -s $pid ]] && kill "$(cat "$pid")"; }
  fi
  rm -rf "$mps_pipe"
  rmdir "${mps_pipe%/*}" 2> /dev/null # if it held nothing else
  mps_pipe=""
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

step_pid="" # of the step that runs
# However the script ends: first the step, which may use the daemon, then the daemon.
finish() {
  if [[ -n $step_pid ]]; then
    kill "$step_pid" 2> /dev/null
    wait "$step_pid"
  fi
  if [[ -n $mps_pipe ]]; then end_mps; fi
}

known() {
  local step
  for step in "${steps[@]}" "${extra[@]}"; do
    if [[ $step == "$1" ]]; then return 0; fi
  done
  return 1
}

if [[ ${1:-} == --step ]]; then # one step, in a process that can be given up
  out=$3 ranks=$4 mps=${5:-}
  cd "$root" || exit 1
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
  "step_$2"
  exit
fi

if (($# < 3)) || ! [[ $2 =~ ^[1-9][0-9]*$ && $3 =~ ^[1-9][0-9]*$ ]]; then usage; fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd) ranks=$2 limit=$3
shift 3
for step in "$@"; do
  if ! known "$step"; then
    echo "no step $step"
    usage
  fi
done
if (($# > 0)); then steps=("$@"); fi

failed=0
trap finish EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
summary=$out/summary.txt
printf '%-16s %5s %8s  %s\n' step exit seconds verdict | tee "$summary"
for step in "${steps[@]}"; do
  log=$out/$step.log
  begin=$SECONDS
  mps=""
  if [[ $step == mps && -z ${CUDA_MPS_PIPE_DIRECTORY:-} ]]; then if begin_mps; then mps=ours; else mps=failed; fi; fi
  timeout -k 20 "$limit" bash "${BASH_SOURCE[0]}" --step "$step" "$out" "$ranks" $mps > "$log" 2>&1 < /dev/null &
  step_pid=$!
  wait "$step_pid"
  code=$?
  step_pid=""
  case $code in
    0) verdict=ok ;;
    77) verdict="skipped: $(sed -n 's/^skipped: //p' "$log" | tail -n 1)" ;;
    124 | 137) verdict="FAILED: more than $limit s, see $step.log" ;;
    *) verdict="FAILED: $(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | cut -c 1-100)" ;;
  esac
  if ((code != 0 && code != 77)); then failed=1; fi
  if [[ $mps == ours && $code != 0 ]]; then end_mps; fi
  printf '%-16s %5d %8d  %s\n' "$step" "$code" $((SECONDS - begin)) "$verdict" | tee -a "$summary"
done
exit $failed
