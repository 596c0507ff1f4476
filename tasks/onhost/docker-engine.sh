#!/bin/sh
# Runs one container in the foreground of its supervisor, and ends it when it is told to.
#   docker-engine.sh NAME STOP_SECONDS RUN_OPTIONS...
#   docker-engine.sh --remove NAME      for its supervisor, when it ended: a killed run leaves its container
# A container of that name that a killed run left behind goes first: two engines would share the GPUs.
# A Docker that was killed, or is not up yet, is waited for, at most a minute.
set -u
if [ "$1" = --remove ]; then
    docker rm --force "$2" >/dev/null 2>&1
    exit 0
fi
name=$1 seconds=$2
shift 2
waited=0
while ! docker version >/dev/null 2>&1 && [ $waited -lt 60 ]; do
    [ $waited != 0 ] || echo "rackwright: waiting for docker"
    sleep 1
    waited=$((waited + 1))
done
docker rm --force "$name" >/dev/null 2>&1
docker run --name "$name" "$@" &
run=$!
# the docker program only passes signals on; a container that does not end is ended here
trap 'docker stop --time "$seconds" "$name" >/dev/null 2>&1' TERM INT
wait "$run"
status=$?
while kill -0 "$run" 2>/dev/null; do
    wait "$run"
    status=$?
done
trap - TERM INT
docker rm --force "$name" >/dev/null 2>&1
exit "$status"
