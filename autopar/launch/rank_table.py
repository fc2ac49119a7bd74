"""A rank table: one JSON file, the same on all nodes, that says which rank is which device of which server.

The form is that of HCCL and MindSpore (`RANK_TABLE_FILE`, version 1.0: `server_list`, each with `server_id` and its
`device`s of `device_id`, `device_ip` and `rank_id`). A process is told RANK_TABLE_FILE and RANK_ID; `runtime.launchers`
reads the rest from the table. Ranks meet at the first server.
"""

import json
import shlex
from collections.abc import Sequence

from autopar.launch.job import PORT, SCRIPT, Job

TABLE, SCRIPT_NAME = "rank_table.json", "launch_rank_table.sh"


def rank_table(job: Job, hosts: Sequence[str]) -> str:
    """The table's text.

    hosts: of the nodes, as each reaches the first; none for one node.

    Raises:
        ArgumentError: as `Job.hosts`.
    """
    servers = [
        {
            "server_id": host,
            "device": [
                {"device_id": str(d), "device_ip": host, "rank_id": str(number * job.per_node + d)}
                for d in range(job.per_node)
            ],
        }
        for number, host in enumerate(job.hosts(hosts))
    ]
    table = {"version": "1.0", "server_count": str(job.nodes), "server_list": servers, "status": "completed"}
    return json.dumps(table, indent=1) + "\n"


def rank_table_script(job: Job) -> str:
    """A shell script that starts the processes of one node, and ends them all when one fails: `bash FILE SERVER_ID`."""
    threads = 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"\n' if job.shares_cores else ""
    command = shlex.join([job.python, SCRIPT, *job.arguments])
    return f"""#!/bin/bash
# Starts the ranks of one server of {TABLE}: bash {SCRIPT_NAME} SERVER_ID, on each server.
set -euo pipefail
cd {shlex.quote(str(job.folder))}
server="${{1:?name this server as in {TABLE}}}"
export RANK_TABLE_FILE="$PWD/{TABLE}" MASTER_PORT="${{MASTER_PORT:-{PORT}}}"
{threads}ranks="$({shlex.quote(job.python)} - "$server" <<'END'
import json, sys
servers = {{s["server_id"]: s["device"] for s in json.load(open("{TABLE}"))["server_list"]}}
if sys.argv[1] not in servers:
    sys.exit("{TABLE} has no server " + sys.argv[1] + "; it has " + ", ".join(servers))
print(" ".join(device["rank_id"] for device in servers[sys.argv[1]]))
END
)"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for rank in $ranks; do
    RANK_ID="$rank" {command} &
done
for _ in $ranks; do
    wait -n
done
"""
