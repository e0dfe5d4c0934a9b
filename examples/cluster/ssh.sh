#!/usr/bin/env bash
# Starts workers on several machines over SSH, from the first of them:
#   HOSTS=a:1,b:1 ./ssh.sh ../mnist.py --epochs=3
# The machines let each other in without a password, and have this directory and Python at the same
# paths. Further flags of the launcher go into FLAGS, quoted as in a shell:
#   FLAGS='--ssh "ssh -p 2222"' HOSTS=a:1,b:1 ./ssh.sh ../mnist.py
set -euo pipefail
: "${HOSTS:?the machines and their numbers of workers, such as a:1,b:1}"

eval "flags=(${FLAGS:-})"
exec python -m tf_redsync launch --hosts "$HOSTS" --max-restarts 3 "${flags[@]}" "$@"
