"""``python -I -S fork_client.py SOCKET SCRIPT ARGUMENTS``: the script, in a fork of ``ForkServer``.

It has this process's environment, folder and streams; this process lasts as long as it does.
"""

import array
import json
import os
import socket
import sys


def main() -> None:
    address, script, *arguments = sys.argv[1:]
    command = {"script": script, "arguments": arguments, "folder": os.getcwd()}  # noqa: PTH109
    request = json.dumps(command | {"env": dict(os.environ)}).encode() + b"\n"
    streams = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        sent = server.sendmsg([request], [streams])
        server.sendall(request[sent:])
        server.recv(1)


if __name__ == "__main__":
    main()
