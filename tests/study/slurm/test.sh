#!/bin/bash
# `make test-slurm`: start a Slurm, run the tests marked `slurm` against it, stop it. Where no Slurm
# can be started it says why and is content. PYTHON is the interpreter that has OELM.
set -uo pipefail
here=$(dirname "$(realpath "$0")")
folder=$(mktemp -d /tmp/oelm-slurm.XXXX)
reason=$("$here/up.sh" "$folder") || { code=$?; echo "test-slurm: ${reason:-failed, see $folder/log}"; exit $((code == 75 ? 0 : 1)); }
. "$folder/env.sh"
"${PYTHON:-python3}" -m pytest -m slurm -rs "$here/.."
code=$?
"$here/down.sh" "$folder"
[ $code = 0 ] && rm -rf "$folder"
exit $code
