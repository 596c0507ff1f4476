#!/bin/sh
# Starts the engine with the API key in its environment, never in argv, unit or log.
#   with-key.sh PROGRAM [ARG...]
# The key is systemd's credential "api-key" where there is one, else the file in RACKWRIGHT_KEY_FILE,
# else there is no key. vLLM reads it from VLLM_API_KEY. Variables in RACKWRIGHT_UNSET are dropped.
set -eu
key=${CREDENTIALS_DIRECTORY:+$CREDENTIALS_DIRECTORY/api-key}
[ -n "$key" ] && [ -r "$key" ] || key=${RACKWRIGHT_KEY_FILE:-}
if [ -n "$key" ]; then
    VLLM_API_KEY=$(cat "$key")
    [ -n "$VLLM_API_KEY" ] || { echo "rackwright: the key file $key is empty" >&2; exit 1; }
    export VLLM_API_KEY
fi
for name in ${RACKWRIGHT_UNSET:-}; do unset "$name"; done
unset RACKWRIGHT_KEY_FILE RACKWRIGHT_UNSET
exec "$@"
