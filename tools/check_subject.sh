#!/usr/bin/env bash
# Checks a commit's subject, as .pre-commit-config.yaml does: tools/check_subject.sh .git/COMMIT_EDITMSG
# At most 72 characters, no full stop, not in the past tense or the third person ("Added", "Adds").
set -euo pipefail

subject=$(sed -n '/^#/d;/./{p;q}' "${1:?usage: tools/check_subject.sh FILE}")
die() {
  echo "commit subject: $1. Received: $subject" >&2
  exit 1
}
[ -n "$subject" ] || die "must not be empty"
case $subject in "Merge "* | "Revert "* | "fixup! "* | "squash! "*) exit 0 ;; esac
[ ${#subject} -le 72 ] || die "must have at most 72 characters, has ${#subject}; details go into the body"
case $subject in *.) die "must not end in a full stop" ;; esac
first=${subject%% *}
case $first in
  *:) ;; # a part of the project: "wire: count int4 payloads"
  Added | Adds | Fixed | Fixes | Changed | Changes | Removed | Removes | Made | Makes | Moved | Moves)
    die "must be imperative, as in \`Add ...\`" ;;
esac
