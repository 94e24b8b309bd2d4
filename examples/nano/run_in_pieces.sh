#!/usr/bin/env bash
# Trains on a machine that is lent in pieces: the run outlives the shell, and every call brings back what is ready.
#   RESULTS=folder examples/nano/run_in_pieces.sh SECONDS trunk|own|done
# Starts the run if it is not there yet, waits at most SECONDS for the trunk, the trunk's own continuations, or the end,
# then copies the newest saved state to RESULTS. DATA: what `train_nano.py data` wrote; RUN: where the run works;
# OPTIONS: of `train_nano.py train`. Run it from the repository's root, with PYTHONPATH=src unless it is installed.
set -u
seconds=$1 wanted=$2
RUN=${RUN:-/tmp/nano-run} DATA=${DATA:-build/nano}
OPTIONS=${OPTIONS:---steps 4400 --max-seconds 850 --own-max-seconds 45 --draft-max-seconds 300}
mkdir -p "$RUN" "$RESULTS"
if [ ! -e "$RUN/pid" ]; then
    export PYTHONUNBUFFERED=1
    # shellcheck disable=SC2086
    setsid nohup python3 -W ignore examples/train_nano.py train --data "$DATA" --out "$RUN" $OPTIONS >"$RUN/log.txt" 2>&1 </dev/null &
    echo $! >"$RUN/pid"
fi
for _ in $(seq 1 "$seconds"); do
    sleep 1
    case $wanted in
    trunk) grep -q '"trunk figures"' "$RUN/log.txt" && break ;;
    own) [ -e "$RUN/own.npy" ] && break ;;
    done) grep -q '"event": "done"' "$RUN/log.txt" && break ;;
    esac
    kill -0 "$(cat "$RUN/pid")" 2>/dev/null || break
done
tail -n 12 "$RUN/log.txt" | cut -c1-400
cp "$RUN/report.json" "$RESULTS/"
if [ "$wanted" = done ]; then
    cp -r "$RUN"/draft-* "$RESULTS/"
    mkdir -p "$RESULTS/checkpoint" && cp "$RUN"/checkpoint/model* "$RESULTS/checkpoint/"
else
    cp -r "$RUN"/trunk-* "$RESULTS/"
    if [ -e "$RUN/own.npy" ]; then cp "$RUN/own.npy" "$RESULTS/"; fi
fi
find "$RESULTS" -type f -printf '%s %P\n'
