"""A probe of Kubernetes and Docker: exit with 0 if the server that this container runs is well.

    python healthy.py live 8000     # it answers, whatever it says
    python healthy.py ready 8000    # it accepts requests

Of the pods of one job, only the first, whose name ends in -0, has the server; others pass at once.
"""

import os
import sys
from http.client import HTTPConnection, HTTPException


def is_well(kind: str, port: int) -> bool:
    if os.environ.get("POD_NAME", "-0").rpartition("-")[2] != "0":
        return True
    connection = HTTPConnection("127.0.0.1", port, timeout=8)  # no proxy of the environment
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200 or kind == "live"
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not is_well(sys.argv[1], int(sys.argv[2])))
