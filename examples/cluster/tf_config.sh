#!/usr/bin/env bash
# Starts one worker under a TF_CONFIG made by hand; run it on each machine with that machine's number:
#   WORKERS="10.0.0.1:12345 10.0.0.2:12345" INDEX=0 ./tf_config.sh ../mnist.py --epochs=3
#   WORKERS="10.0.0.1:12345 10.0.0.2:12345" INDEX=1 ./tf_config.sh ../mnist.py --epochs=3
# Export the same random text on all machines as TF_REDSYNC_JOB, so that no stranger joins the workers.
# The ports must be free, and reachable from the other machines and from no one else.
set -euo pipefail
: "${WORKERS:?the address HOST:PORT of each worker, the same list on all machines}"
: "${INDEX:?the number of the worker on this machine, from 0}"

read -ra addresses <<< "$WORKERS"
quoted=$(printf '"%s", ' "${addresses[@]}")
export TF_CONFIG="{\"cluster\": {\"worker\": [${quoted%, }]},
                   \"task\": {\"type\": \"worker\", \"index\": $INDEX}}"
# Without a launcher: exec python "$@". With one the worker starts again after a failure.
exec python -m tf_redsync launch --max-restarts 3 "$@"
