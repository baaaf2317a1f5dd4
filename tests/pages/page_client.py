"""In place of the programs that a page names: passes its arguments, folder, variables and streams
to the fork server (``page_server``), and ends with the exit code of the program there.

Links to a copy of this file have the programs' names; it imports little, since every command of a
page starts it.
"""

import json
import os
import socket
import sys
import time

connection = socket.socket(socket.AF_UNIX)
for _ in range(3000):  # the server may still import
    try:
        connection.connect(os.environ["PAGE_SERVER"])
        break
    except OSError:
        time.sleep(0.1)
request = {"argv": sys.argv, "cwd": os.getcwd(), "environ": dict(os.environ)}
text = json.dumps(request).encode()
socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
connection.sendall(text)
code = connection.recv(1)
sys.exit(code[0] if code else 1)
