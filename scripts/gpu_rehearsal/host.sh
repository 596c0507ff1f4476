#!/bin/bash
# The GPU rehearsal on the host itself: from pieces to an accepted, promoted, measured service, so that it resumes.
#
#   host.sh take PIECE...        take pieces in (unpack.py); starts the run when it does not run
#   host.sh look SECONDS         show where the run is; returns early when it ends or a stage fails
#   host.sh bring FOLDER         logs, reports and figures as one archive into FOLDER, kernel caches as another
#   host.sh again STAGE...       forget that these stages were done
#   host.sh run                  (started by `take`) every stage that is not done, in order; stops at a failure
#
# Environment: STASH (default /root/rehearsal), SRC (rackwright's tree, default: this one), BASE_PYTHON (a
# Python with PyTorch for CUDA 13), STAGES (default: all), ROOT (default /opt/rackwright).
# A stage is done when STASH/done/NAME exists; its output is STASH/log/NAME.log, its seconds in STASH/times.
set -u
STASH=${STASH:-/root/rehearsal}
SRC=${SRC:-$(cd "$(dirname "$0")/../.." && pwd)}
ROOT=${ROOT:-/opt/rackwright}
BASE_PYTHON=${BASE_PYTHON:-$(command -v python3)}
STAGES=${STAGES:-"controller weights wheels engine caches preflight first second promote bench kill rollback
    warm deep tp2 standard uninstall"}
# A program that uses NVLink multicast can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1
mkdir -p "$STASH/done" "$STASH/log" "$STASH/recipe/manifests"

rw() { # rackwright VERB [OPTIONS]: on this host, from this tree
    local verb=$1
    shift
    (cd "$SRC" && PYTHONPATH=$SRC "$STASH/venv/bin/python" -c 'from tasks.cli import main; main()' \
        "$verb" "$STASH/here.py" -y --data "reports=$STASH/reports" "$@")
}

memory() { nvidia-smi --query-gpu=index,name,memory.used,memory.total,utilization.gpu --format=csv | sed 's/^/memory: /'; }
caches() { du -s --block-size=1M "$ROOT"/cache/* 2>/dev/null | sed 's/^/cache MiB: /'; }
key() { cat "$ROOT/run/api-key"; }
metrics() { curl -s -m 10 "http://127.0.0.1:8000/metrics" | grep -E '^vllm:(spec_decode_num_[a-z_]*_total|prefix_cache_(hits|queries)_total|generation_tokens_total|request_success_total)\{' ; }

# The site's recipe is the project's, with the lock of what this image lacks.
recipe() { # recipe NAME SED...
    local name=$1
    shift
    cp "$SRC/scripts/gpu_rehearsal/beside-torch.lock" "$STASH/recipe/"
    cp "$SRC/inventories/recipes/manifests/deepseek-v4-mini.sha256" "$STASH/recipe/manifests/"
    sed -e 's#^lock = .*#lock = "beside-torch.lock"#' \
        -e 's#^\[serve.env\]#&\nNCCL_NVLS_ENABLE = "0"\nTORCH_SYMM_MEM_DISABLE_MULTICAST = "1"\nNVSHMEM_DISABLE_NVLS = "1"#' \
        "$@" "$SRC/inventories/recipes/deepseek-v4-mini-hopper.toml" >"$STASH/recipe/$name.toml"
    cat >"$STASH/here.py" <<PY
hosts = [("@local", {
    "recipe": "$STASH/recipe/$name.toml",
    "root": "$ROOT",
    "sources": ["generate"],
    "bundle": "$STASH/bundle",
    "python": "$BASE_PYTHON",
    "env_kind": "venv",
})]
PY
}

stage_controller() { # rackwright's own environment
    "$BASE_PYTHON" -m venv "$STASH/venv" &&
        "$STASH/venv/bin/python" -m pip install -q --no-index --no-deps --disable-pip-version-check \
            "$STASH"/controller/*.whl && recipe mini && rw status; [ -x "$STASH/venv/bin/pyinfra" ]
}
stage_weights() { rw weights && du -sh "$ROOT/models"; } # while the wheels are still on their way
stage_wheels() { # all pieces are here
    while [ ! -f "$STASH/all-here" ]; do sleep 0.5; done
}
stage_engine() { # the machine's own packages behind the environment's, through one .pth
    local site
    rw environment || return 1
    site=$("$ROOT/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$("$BASE_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
        >"$site/zz-machine-packages.pth"
    rw engine
}
stage_caches() { # kernels that an earlier run compiled, where they came along
    [ -f "$STASH/cache.tgz" ] || { echo "none came along"; return 0; }
    tar -xzf "$STASH/cache.tgz" -C "$ROOT" || return 1
    # FlashInfer asks ninja, and ninja asks whether a source is newer than what was made of it
    find "$ROOT/env/lib" -path '*site-packages*' \( -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.hpp' -o -name '*.inl' \) \
        -exec touch -d 2020-01-01 {} +
    caches
}
stage_preflight() { rw preflight; }
stage_first() { # cold: eager, to an accepted token
    rw site --data profile=smoke
    local code=$?
    memory
    caches
    return $code
}
stage_second() { rw site --data profile=smoke; } # nothing to do
stage_standard() { rw accept; }
stage_promote() {
    rw promote
    local code=$?
    memory
    metrics
    caches
    return $code
}
stage_optimized() { # instead of first and promote, where time is too short for both
    rw site --data profile=smoke --data mode=optimized
    local code=$?
    memory
    metrics
    return $code
}
stage_bench() { rw bench --data bench_runs="${BENCH_RUNS:-1}"; metrics; }
stage_kill() { # the engine's first process dies; a token must come out again
    local pid began
    pid=$(pgrep -o -f "$ROOT/env/bin/vllm serve")
    began=$(date +%s)
    kill -KILL "$pid"
    echo "killed $pid"
    sleep 3
    for _ in $(seq 60); do
        rw status >"$STASH/status.txt" 2>&1 && break
        sleep 3
    done
    grep -vE '^-' "$STASH/status.txt"
    echo "back after $(($(date +%s) - began)) s"
    grep -q "a token came out" "$STASH/status.txt"
}
stage_rollback() { rw rollback && rw status; }
stage_warm() { rw restart && memory; } # kept caches
stage_deep() { rw stop && rw preflight --data deep=true; rw start; }
stage_tp2() { # two GPUs
    [ "$(nvidia-smi -L | wc -l)" -ge 2 ] || { echo "one GPU only"; return 0; }
    recipe mini-tp2 -e 's/^tensor-parallel-size = 1/tensor-parallel-size = 2/' -e 's/^count = 1/count = 2/' \
        -e 's/^CUDA_VISIBLE_DEVICES = "0"/CUDA_VISIBLE_DEVICES = "0,1"/'
    rw site --data profile=smoke
    local code=$?
    memory
    [ $code = 0 ] && { rw promote; code=$?; memory; metrics; }
    return $code
}
stage_uninstall() {
    rw uninstall
    local code=$?
    ls -la "$ROOT" 2>&1
    id rackwright 2>&1
    nvidia-smi --query-compute-apps=pid,used_memory --format=csv
    return $code
}

run() {
    exec 9>"$STASH/lock"
    flock -n 9 || { echo "it runs already"; return 0; }
    rm -f "$STASH/failed"
    local name began code
    for name in $STAGES; do
        [ -f "$STASH/done/$name" ] && continue
        echo "$name" >"$STASH/now"
        began=$(date +%s.%N)
        "stage_$name" >"$STASH/log/$name.log" 2>&1 9>&-
        code=$?
        awk -v n="$name" -v b="$began" -v e="$(date +%s.%N)" -v c=$code \
            'BEGIN { printf "%-12s %8.1f s  exit %d\n", n, e - b, c }' | tee -a "$STASH/times"
        if [ $code != 0 ]; then
            echo "$name" >"$STASH/failed"
            case " ${GO_ON:-} " in *" $name "*) continue ;; *) return 1 ;; esac
        fi
        : >"$STASH/done/$name"
    done
    echo finished >"$STASH/now"
}

alive() { ! flock -n "$STASH/lock" true; }

case ${1:-} in
run) run ;;
take)
    shift
    for piece in "$@"; do "$BASE_PYTHON" "$SRC/scripts/gpu_rehearsal/unpack.py" "$piece" "$STASH" || exit 1; done
    : >>"$STASH/lock"
    alive || setsid nohup "$0" run >>"$STASH/run.log" 2>&1 </dev/null &
    ;;
look)
    : >>"$STASH/lock"
    end=$(($(date +%s) + ${2:-60}))
    seen=$(wc -l <"$STASH/times" 2>/dev/null || echo 0)
    while [ "$(date +%s)" -lt $end ] && alive; do
        sleep 1
        [ "$(wc -l <"$STASH/times" 2>/dev/null || echo 0)" != "$seen" ] && [ -n "${EACH:-}" ] && break
    done
    cat "$STASH/times" 2>/dev/null
    alive && echo "running: $(cat "$STASH/now")" || echo "not running: $(cat "$STASH/failed" 2>/dev/null || cat "$STASH/now")"
    now=$(cat "$STASH/failed" 2>/dev/null || cat "$STASH/now")
    tail -n "${LINES_SHOWN:-15}" "$STASH/log/$now.log" 2>/dev/null | cut -c1-300
    ;;
bring)
    mkdir -p "$2"
    (cd / && tar -czf "$2/evidence.tgz" --exclude='*/result' "${STASH#/}/log" "${STASH#/}/times" "${STASH#/}/run.log" \
        "${STASH#/}/reports" "${ROOT#/}/logs" "${ROOT#/}/receipts" "${ROOT#/}/jobs" "${ROOT#/}/run/starts" 2>/dev/null)
    tar -czf "$2/cache.tgz" -C "$ROOT" cache
    ls -la "$2"
    ;;
again)
    shift
    for name in "$@"; do rm -f "$STASH/done/$name"; done
    ;;
*)
    sed -n '2,14p' "$0"
    exit 2
    ;;
esac
